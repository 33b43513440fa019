"""The ledger: verdicts, bad input, what is written when, and the referee's table."""

import json
from fractions import Fraction

import numpy as np
import pytest

from specdec_lib.errors import SpecdecError
from specdec_lib.report import claims
from specdec_lib.report.claims import claim, collect


@pytest.fixture(autouse=True)
def fresh_ledger(monkeypatch):
    monkeypatch.setattr(claims, "_ledger", {})
    monkeypatch.delenv("SPECDEC_RESULTS", raising=False)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_RESULTS", str(tmp_path))
    return tmp_path


def enter(id="a", statement="one is one", kind="measured", holds=True, **rest):
    return claim(id, statement, source="section 1", kind=kind, holds=holds, **rest)


def test_one_line_verdicts():
    assert repr(enter(predicted=0.64, measured=0.62, interval=(0.58, 0.66))) == (
        "holds — measured 0.62 [0.58, 0.66], predicted 0.64 (measured)"
    )
    assert repr(enter("b", kind="proved")) == "holds (proved)"
    assert repr(enter("c", holds=False, measured=3)) == "does not hold — measured 3 (measured)"
    assert repr(enter("d", kind="quoted", holds=None, predicted=2.7)) == "quoted — predicted 2.7"
    assert enter("e", kind="tested")._repr_markdown_() == "**holds** (tested)"


def test_by_hand_nothing_is_written_and_a_cell_may_run_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    enter(holds=False)
    assert enter(holds=True).holds
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SpecdecError, match="'a' is already"):
        enter(statement="another statement under the same id")


def test_under_the_runner_each_claim_is_written_at_once_and_ids_are_unique(folder):
    enter("a", predicted=Fraction(3, 4), measured=np.float32(0.5), interval=np.array([0.25, 0.75]))
    enter("b", kind="quoted", holds=None, measured=float("nan"))
    first, second = json.loads((folder / "claims.json").read_text())
    assert (first["predicted"], first["measured"], first["interval"]) == ("3/4", 0.5, [0.25, 0.75])
    assert (second["holds"], second["must_hold"], second["measured"]) == (None, False, "nan")
    with pytest.raises(SpecdecError, match="'a' is already"):
        enter("a")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"kind": "believed"}, "unknown kind 'believed', use one of proved, tested, measured, quoted"),
        ({"holds": None}, "needs a verdict"),
        ({"interval": (1, 2, 3)}, r"must be \(low, high\)"),
        ({"interval": (2, 1)}, r"must be \(low, high\)"),
        ({"interval": (float("nan"), 1.0)}, r"must be \(low, high\), two numbers, got \(nan, 1.0\): leave out"),
        ({"interval": (np.float32(0), np.float64("nan"))}, r"must be \(low, high\)"),
        ({"interval": (None, None)}, r"must be \(low, high\)"),
        ({"interval": 0.5}, r"must be \(low, high\)"),
        ({"interval": (Fraction(1, 9), Fraction(1, 10))}, r"must be \(low, high\)"),
    ],
)
def test_bad_claims_are_refused_and_leave_no_trace(folder, bad, message):
    with pytest.raises(SpecdecError, match=message):
        enter(**bad)
    assert not (folder / "claims.json").exists()


def test_bounds_are_compared_as_numbers_and_may_be_infinite():
    assert enter("a", interval=(Fraction(1, 10), Fraction(1, 9))).interval == ("1/10", "1/9")
    assert enter("b", interval=(0.5, float("inf"))).interval == (0.5, "inf")


def test_numpy_verdicts_become_plain_ones(folder):
    assert enter(holds=np.bool_(False)).holds is False
    assert json.loads((folder / "claims.json").read_text())[0]["holds"] is False


def ledger(results, notebook, *rows):
    (results / "claims").mkdir(exist_ok=True)
    written = [claims.asdict(row) for row in rows]
    (results / "claims" / f"{notebook}.json").write_text(json.dumps(written))


def test_collect_sorts_by_trust_then_notebook_and_counts_no_quotation(tmp_path):
    ledger(
        tmp_path,
        "02_second",
        enter("m2", kind="measured", holds=False, must_hold=False, note="two cores"),
        enter("p2", "P(x | y) = 1", kind="proved", measured="1"),
    )
    ledger(
        tmp_path,
        "01_first",
        enter("q1", kind="quoted", holds=True),
        enter("m1", kind="measured", measured=0.5, interval=(0.4, 0.6)),
        enter("t1", kind="tested", holds=False),
    )
    rows = collect(tmp_path)
    assert [(row["id"], row["notebook"]) for row in rows] == [
        ("p2", "02_second"),
        ("t1", "01_first"),
        ("m1", "01_first"),
        ("m2", "02_second"),
        ("q1", "01_first"),
    ]
    assert [row["id"] for row in claims.broken(rows)] == ["t1"]
    saved = json.loads((tmp_path / "claims.json").read_text())
    assert (saved["held"], saved["counted"], len(saved["claims"])) == (2, 4, 5)
    text = (tmp_path / "claims.md").read_text().splitlines()
    assert text[0] == "2 of 4 claims hold on this machine."
    assert "Must hold and does not: `t1` (01_first)." in text
    table = [line for line in text if line.startswith("|")]
    assert table[2] == r"| `p2` | P(x \| y) = 1 | section 1 |  | 1 | proved | holds | yes | 02_second |"
    assert "| 0.5 [0.4, 0.6] |" in table[4]
    assert "does not hold (two cores) | no |" in table[5]


def test_collect_without_claims_says_so(tmp_path):
    assert collect(tmp_path) == []
    assert (tmp_path / "claims.md").read_text().startswith("0 of 0 claims hold on this machine.")
