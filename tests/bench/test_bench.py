"""The whole benchmark: numbers that fit each other, and what a person reads."""

import json
from dataclasses import replace

import pytest

import specdec_lib as sd
from specdec_lib.bench.command import bench, verdict
from specdec_lib.bench.contest import load_contest
from specdec_lib.bench.costs import CostMeter, Estimate
from specdec_lib.bench.speed import race
from specdec_lib.bench.summary import measure
from specdec_lib.errors import SpecdecError

# -- the whole -----------------------------------------------------------------------------------------


def test_the_numbers_fit_each_other(contest, prompts):
    found = measure(contest, prompts, gamma=3, max_new_tokens=16)
    assert found["prompts"] == 6 and found["new_tokens"] == 96
    assert found["speedup_low"] < found["speedup"] < found["speedup_high"]
    assert found["speedup"] == pytest.approx(found["own_speedup"] * found["plain_ratio"])
    assert found["predicted"] == pytest.approx(found["own_predicted"] * found["plain_ratio"])
    assert found["predicted_extended"] == pytest.approx(found["own_predicted_extended"] * found["plain_ratio"])
    assert found["own_predicted_extended"] == list(found["factors"].values())[-1]
    assert found["alpha_low"] <= found["alpha"] <= found["alpha_high"]
    assert len(found["verification_cost"]) == 8 and found["verification_cost"][0] == 1
    seconds = {arm: d["seconds"] for arm, d in found["decoders"].items()}
    assert found["vs_assisted"] == pytest.approx(seconds["assisted"] / seconds["drafted"])
    assert found["decoders"]["plain"]["tokens_per_second"] == pytest.approx(96 / seconds["plain"])
    assert sum(k["prompts"] for k in found["kinds"].values()) == 6 and set(found["kinds"]) == {"kind0", "kind1"}
    json.dumps(found)


def test_an_n_gram_table_has_no_assisted_rival_and_the_reason_is_given(target_folder, prompts, tmp_path):
    sd.NGramDrafter.fit([[5, 9, 17, 3, 8] * 4], order=2).save(tmp_path / "table.safetensors")
    contest = load_contest(target_folder, tmp_path / "table.safetensors", device="cpu")
    found = measure(contest, prompts[:2], gamma=2, max_new_tokens=8)
    assert found["vs_assisted"] is None and "assisted" not in found["decoders"]
    notes = " ".join(found["notes"])
    assert "NGramDrafter" in notes and "2 prompts are too few for an interval" in notes
    assert found["speedup_low"] is None and "NGramDrafter" in found["vs_assisted_missing"]


def test_an_interrupt_reports_the_prompts_that_are_done(contest, prompts):
    done = []

    def tick():
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt

    found = measure(contest, prompts, gamma=2, max_new_tokens=8, tick=tick)
    assert found["interrupted"] == "2 of 6 prompts" and found["prompts"] == 2


def test_kinds_take_turns(contest, prompts):
    rows = list(race(contest, prompts[:4], gamma=2, max_new_tokens=4))
    assert [row.prompt.kind for row in rows] == ["kind0", "kind1", "kind0", "kind1"]


def test_a_draft_slower_than_the_target_is_said_and_is_no_error(contest, prompts, monkeypatch):
    real = CostMeter.costs
    monkeypatch.setattr(CostMeter, "costs", lambda *a: replace(real(*a), cost_coefficient=Estimate(1.5)))
    found = measure(contest, prompts[:1], gamma=2, max_new_tokens=8)
    assert "slower than the target (c = 1.50)" in " ".join(found["notes"])


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(1.1, 1.3, "pays here"), (0.8, 0.9, "does not pay"), (0.9, 1.2, "No verdict"), (None, None, "too few prompts")],
)
def test_the_verdict(low, high, words):
    assert words in verdict({"speedup": 1.0, "speedup_low": low, "speedup_high": high})


# -- the door ------------------------------------------------------------------------------------------


def test_the_door_prints_and_writes(door, target_folder, draft_folder, prompt_file, tmp_path, no_footprint):
    file = tmp_path / "bench.json"
    words = ["--target", target_folder, "--draft", draft_folder, "--prompts", prompt_file, "--json", file]
    done = door(*words, "--gamma", 2, "--max-new-tokens", 8, "--temperature", 0, "--temperature", 1)
    assert done.exit_code == 0, done.exception
    for text in ("Temperature 0.", "Temperature 1.", "transformers assisted", "v(n)", "with the draft"):
        assert text in done.stdout
    found = json.loads(file.read_text())
    keys = "speedup speedup_low speedup_high vs_assisted vs_assisted_low vs_assisted_high predicted predicted_extended"
    keys += " alpha cost_coefficient verification_cost block_efficiency memory overhead_per_round environment"
    assert set(keys.split()) <= set(found)
    assert all(found[key] is not None for key in keys.split())
    assert [r["temperature"] for r in found["runs"]] == [0, 1] and found["speedup"] == found["runs"][0]["speedup"]
    assert found["setting"]["gamma"] == 2 and found["environment"]["packages"]["torch"]


def test_a_busy_machine_is_said(door, target_folder, prompt_file, no_footprint, monkeypatch):
    monkeypatch.setattr("specdec_lib.bench.settings.cpu_use", lambda: 0.87)
    done = door("--target", target_folder, "--prompts", prompt_file, "--quick", "--gamma", 2, "--max-new-tokens", 4)
    assert "87%" in done.stdout and "quiet machine" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gamma", 0], "gamma must be a whole number >= 1"),
        (["--temperature", -1], "temperature must be a number >= 0"),
        (["--limit", 0], "ask for at least 1 prompt"),
        (["--prompts", "nowhere.jsonl"], "no prompt file"),
        (["--json", "no/such/folder/file.json"], "there is no folder"),
        (["--target", "./nothing"], "there is no model folder"),
        (["--draft", "./nothing"], "there is no model folder"),
        (["--draft", "./nothing.safetensors"], "there is no n-gram table"),
        (["--gamma", 8, "--max-new-tokens", 8], "no round could draft 8 tokens"),
        (["--max-new-tokens", 500], "exceeds the target's context"),
    ],
)
def test_bad_input_is_one_line(words, message, door, target_folder, prompt_file, no_footprint):
    done = door("--target", target_folder, "--prompts", prompt_file, *words)
    assert isinstance(done.exception, SpecdecError)
    assert message in str(done.exception) and "\n" not in str(done.exception)


def test_a_speed_can_only_be_kept_in_a_draft():
    with pytest.raises(SpecdecError, match="lookup has none"):
        bench(draft=["lookup"], keep=True)
