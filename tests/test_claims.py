"""The ledger: verdicts, bad input, what is written when, and the referee's table."""

import json
from fractions import Fraction

import numpy as np
import pytest

from specdec_lib.errors import SpecdecError
from specdec_lib.report import chapters, claims
from specdec_lib.report.claims import claim, collect


@pytest.fixture(autouse=True)
def fresh_ledger(monkeypatch):
    monkeypatch.setattr(claims, "_ledger", {})
    monkeypatch.delenv("SPECDEC_RESULTS", raising=False)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_RESULTS", str(tmp_path))
    return tmp_path


def enter(id="a", statement="one is one", kind="measured", holds=None, **rest):
    if holds is None and kind in ("proved", "tested", "checked exactly"):
        holds = True
    return claim(id, statement, source="section 1", kind=kind, holds=holds, **rest)


def test_cards_and_their_plain_twins():
    shown = enter(predicted=0.64, measured=0.62, interval=(0.58, 0.66), above=0.5)
    assert repr(shown) == "HOLDS: one is one\n  measured 0.62 [0.58, 0.66], predicted 0.64. Measured; section 1"
    assert repr(enter("b", kind="proved")) == "HOLDS: one is one\n  Proved; section 1"
    assert repr(enter("c", kind="checked exactly", holds=False, measured=3, note="Two of five.")) == (
        "DOES NOT HOLD: one is one\n  measured 3. Two of five. Checked exactly; section 1"
    )
    assert repr(enter("d", kind="quoted", predicted=2.7)).startswith("QUOTED: one is one\n  predicted 2.7. Quoted")
    page = enter("e", "1 < 2 & 3", kind="tested")._repr_html_()
    assert "<b>Holds:</b> 1 &lt; 2 &amp; 3<br>" in page and claims.COLOURS["holds"] in page


@pytest.mark.parametrize(
    ("asked", "interval", "verdict"),
    [
        ({"above": 1}, (1.01, 1.2), "holds"),
        ({"above": 1}, (1.0, 1.2), "undecided"),
        ({"above": 1}, (0.9, 1.2), "undecided"),
        ({"above": 1}, (0.8, 1.0), "does not hold"),
        ({"above": 1}, None, "undecided"),
        ({"below": 1}, (0.8, 0.9), "holds"),
        ({"below": 1}, (1.0, 1.5), "does not hold"),
        ({"within": (0.9, 1.1)}, (0.95, 1.05), "holds"),
        ({"within": (0.9, 1.1)}, (0.85, 1.05), "undecided"),
        ({"within": (0.9, 1.1)}, (1.2, 1.3), "does not hold"),
        ({"holds": True}, (0, 1), "holds"),
        ({"holds": np.bool_(False)}, (0, 1), "does not hold"),
        ({"holds": True}, None, "undecided"),
        ({}, (0, 1), "undecided"),
    ],
)
def test_what_is_measured_is_decided_by_its_interval(asked, interval, verdict):
    found = enter(measured=1.0, interval=interval, **asked)
    assert found.verdict == verdict and not found.must_hold
    assert claims.broken([claims.asdict(found)]) == []


def test_a_test_may_be_undecided_and_what_is_predicted_follows_from_the_bounds():
    assert claim("t", "s", source="x", kind="tested").verdict == "undecided"
    assert enter("a", above=2, interval=(3, 4)).predicted == "above 2"
    assert enter("b", within=(0.5, 1.5), interval=(1, 1.2)).predicted == "within [0.5, 1.5]"


def test_statements_come_from_the_file_beside_the_notebook(monkeypatch, tmp_path):
    (tmp_path / "00_a.yaml").write_text(
        "claims:\n  pays: {statement: It pays, source: Corollary 3.9, kind: measured, must_hold: true}\n"
    )
    declared = chapters.declared_claims(tmp_path)
    monkeypatch.setattr(chapters, "declared_claims", lambda: declared)
    found = claim("pays", measured=1.2, interval=(1.1, 1.3), above=1)
    assert (found.statement, found.source, found.kind, found.must_hold) == (
        "It pays",
        "Corollary 3.9",
        "measured",
        True,
    )
    with pytest.raises(SpecdecError, match="claim 'gone' is in no YAML file of notebooks/: add it there"):
        claim("gone", holds=True)


def test_an_id_of_two_notebooks_is_refused(tmp_path):
    for stem in ("00_a", "01_b"):
        (tmp_path / f"{stem}.yaml").write_text("claims:\n  pays: {statement: s, source: x, kind: proved}\n")
    with pytest.raises(SpecdecError, match=r"01_b\.yaml and 00_a\.yaml both have a claim 'pays'"):
        chapters.declared_claims(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("claims: {a: {statement: s, source: x}}", "a.yaml: claim a has no kind: it needs statement, source, kind"),
        ("claims: {a: {statement: s, source: x, kind: proved, holds: true}}", "claim a has an unknown key, holds"),
        ("claims: {a: s}", "claims must map names to mappings"),
        ("size: {}", "must have the keys sizes and claims"),
        ("- a", "must have the keys sizes and claims"),
        ("{", "a.yaml: not valid YAML"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, text, message):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SpecdecError, match=message) as caught:
        chapters.read_chapter(tmp_path / "a.yaml")
    assert "\n" not in str(caught.value)
    with pytest.raises(SpecdecError, match=r"cannot read b\.yaml"):
        chapters.read_chapter(tmp_path / "b.yaml")


def test_by_hand_nothing_is_written_and_a_cell_may_run_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    enter(kind="proved", holds=False)
    assert enter(kind="proved", holds=True).verdict == "holds"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SpecdecError, match="'a' is already"):
        enter(statement="another statement under the same id")


def test_under_the_runner_each_claim_is_written_at_once_and_ids_are_unique(folder):
    enter("a", predicted=Fraction(3, 4), measured=np.float32(0.5), interval=np.array([0.25, 0.75]), above=0)
    enter("b", kind="quoted", measured=float("nan"))
    first, second = json.loads((folder / "claims.json").read_text())
    assert (first["predicted"], first["measured"], first["interval"]) == ("3/4", 0.5, [0.25, 0.75])
    assert (second["verdict"], second["must_hold"], second["measured"]) == ("quoted", False, "nan")
    with pytest.raises(SpecdecError, match="'a' is already"):
        enter("a")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"kind": "believed"}, "unknown kind 'believed', use one of proved, checked exactly, tested,"),
        ({"kind": "proved"}, "a proved claim needs a verdict"),
        ({"source": None}, "'a' has a statement and no source"),
        ({"kind": "quoted", "holds": True}, "'a' is quoted, so it has no verdict: leave out holds"),
        ({"above": 1, "holds": True}, "the verdict comes from one of above, holds"),
        ({"above": 1, "below": 2}, "the verdict comes from one of above, below"),
        ({"kind": "tested", "above": 1}, "'a' is tested: give holds=True or holds=False, above= is for what is mea"),
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
        claim(**({"id": "a", "statement": "s", "source": "x", "kind": "measured"} | bad))
    assert not (folder / "claims.json").exists()


def test_bounds_are_compared_as_numbers_and_may_be_infinite():
    assert enter("a", interval=(Fraction(1, 10), Fraction(1, 9))).interval == ("1/10", "1/9")
    assert enter("b", interval=(0.5, float("inf"))).interval == (0.5, "inf")


def ledger(results, notebook, *rows):
    (results / "claims").mkdir(exist_ok=True)
    written = [claims.asdict(row) for row in rows]
    (results / "claims" / f"{notebook}.json").write_text(json.dumps(written))


def test_collect_sorts_by_trust_then_notebook_and_counts_no_quotation(tmp_path):
    ledger(
        tmp_path,
        "02_second",
        enter("m2", interval=(0.1, 0.2), above=0.2, note="two cores"),
        enter("p2", "P(x | y) = 1", kind="proved", measured="1"),
    )
    ledger(
        tmp_path,
        "01_first",
        enter("q1", kind="quoted"),
        enter("m1", measured=0.5, interval=(0.4, 0.6)),
        enter("c1", kind="checked exactly"),
        enter("t1", kind="tested", holds=False),
    )
    rows = collect(tmp_path)
    assert [(row["id"], row["notebook"]) for row in rows] == [
        ("p2", "02_second"),
        ("c1", "01_first"),
        ("t1", "01_first"),
        ("m1", "01_first"),
        ("m2", "02_second"),
        ("q1", "01_first"),
    ]
    assert [row["id"] for row in claims.broken(rows)] == ["t1"]
    summary = "2 of 5 claims hold on this machine; 2 do not; 1 is undecided."
    saved = json.loads((tmp_path / "claims.json").read_text())
    assert (saved["summary"], len(saved["claims"])) == (summary, 6)
    text = (tmp_path / "claims.md").read_text().splitlines()
    assert text[0] == summary
    assert "Must hold and does not: `t1` (01_first)." in text
    table = [line for line in text if line.startswith("|")]
    assert table[2] == r"| `p2` | P(x \| y) = 1 | section 1 |  | 1 | proved | holds | yes | 02_second |"
    assert "| 0.5 [0.4, 0.6] |" in table[5]
    assert "does not hold (two cores) | no |" in table[6]


def test_collect_without_claims_says_so(tmp_path):
    assert collect(tmp_path) == []
    assert (tmp_path / "claims.md").read_text().startswith("0 of 0 claims hold on this machine.")
