"""The bench: fair baselines, equal lengths, ratios and intervals that are what they say, predictions by hand."""

import gc
import json
import shutil
import subprocess
import weakref
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import specdec_lib as sd
from specdec_lib.bench import small, speed
from specdec_lib.bench.command import bench, verdict
from specdec_lib.bench.costs import (
    CostMeter,
    Costs,
    Estimate,
    footprint,
    median,
    outside_seconds,
    pass_seconds,
    rounds_with_room,
)
from specdec_lib.bench.packed import load_contest, pack_linears
from specdec_lib.bench.prompts import Prompt, load_prompts
from specdec_lib.bench.speed import ARMS, arms_of, partings, race, ratio_of_totals, run
from specdec_lib.bench.summary import measure
from specdec_lib.decode import Round
from specdec_lib.drafters import Sampling
from specdec_lib.errors import SpecdecError
from specdec_lib.models import load_transformers, open_session
from specdec_lib.models.fast import FastLlama, packed_linears_available
from specdec_lib.models.shortlist import ShortlistLlamaConfig, ShortlistLlamaForCausalLM
from specdec_lib.theory import expected_time, improvement_factor

IDS = torch.tensor([[5, 9, 17, 3, 8, 30, 12, 7, 25, 6, 11, 14]])
WORDS = [
    "the cat sat on the mat and the cat",
    "one two one two one",
    "what is it",
    "a b a b a b",
    "to be or not",
    "so so",
]


@pytest.fixture(scope="module")
def target_folder(tiny_folder):
    return tiny_folder("llama")


@pytest.fixture(scope="module")
def draft_folder(target_folder, tmp_path_factory):
    """The target with noise on its weights: accepted now and then."""
    model = load_transformers(target_folder, device="cpu")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for weight in model.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight))
    folder = tmp_path_factory.mktemp("draft")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shortlist_folder(target_folder, tmp_path_factory):
    """A random shortlist draft of the target's vocabulary."""
    vocabulary = load_transformers(target_folder, device="cpu").config.vocab_size
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ShortlistLlamaForCausalLM(ShortlistLlamaConfig(20, vocab_size=vocabulary, **shape))
    shortlist = torch.arange(3, 23)
    model.set_shortlist(shortlist, torch.arange(vocabulary).clamp(3, 22) - 3)
    folder = tmp_path_factory.mktemp("shortlist")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def contest(target_folder, draft_folder):
    return load_contest(target_folder, draft_folder, device="cpu")


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": w, "kind": f"kind{i % 2}"}) + "\n" for i, w in enumerate(WORDS)))
    return path


@pytest.fixture(scope="module")
def prompts(prompt_file):
    return load_prompts(prompt_file)


@pytest.fixture
def no_footprint(monkeypatch):
    """The processes that measure memory take seconds; one test runs them for real."""
    sizes = {"peak_mib": 2.0, "resident_mib": 1.0, "gpu_mib": None}
    loading = {"import_seconds": 1.0, "target_seconds": 1.0, "draft_seconds": 0.1}
    fake = {"plain": sizes, "drafted": sizes, "loading": loading}
    monkeypatch.setattr("specdec_lib.bench.settings.footprint", lambda *_, **__: fake)
    monkeypatch.setattr("specdec_lib.bench.settings.cpu_use", lambda: 0.0)


# -- the baseline --------------------------------------------------------------------------------------


@pytest.mark.skipif(not packed_linears_available(), reason="this torch cannot pack")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma"])
def test_packed_linears_change_no_logit_and_free_the_stock_weights(kind, tiny_folder):
    model = load_transformers(tiny_folder(kind), device="cpu")
    with torch.inference_mode():
        before = model(IDS).logits
    linears = [m for m in model.modules() if type(m) is torch.nn.Linear]
    table = model.get_input_embeddings().weight
    weights = [weakref.ref(m.weight) for m in linears if m.weight is not table]
    count = len(linears)
    del linears
    assert pack_linears(model) == count > 0
    gc.collect()
    assert [w for w in weights if w() is not None] == []
    assert not any(type(m) is torch.nn.Linear for m in model.modules())
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, before, rtol=1e-5, atol=1e-5)
    assert pack_linears(model) == 0


def test_a_table_shared_with_the_embeddings_stays_for_them(tiny_folder):
    model = load_transformers(tiny_folder("llama", tie_word_embeddings=True), device="cpu")
    table = model.get_input_embeddings().weight.clone()
    with torch.inference_mode():
        before = model(IDS).logits
        pack_linears(model)
        torch.testing.assert_close(model(IDS).logits, before, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.get_input_embeddings().weight, table)


def test_float64_is_left_alone(target_folder):
    model = load_transformers(target_folder, device="cpu", dtype="float64")
    assert pack_linears(model) == 0


def test_both_decoders_run_the_same_weights(contest):
    assert isinstance(contest.pair.target, FastLlama)
    with torch.inference_mode():
        theirs = contest.target(IDS).logits
    ours = open_session(contest.pair.target).feed(IDS, last=IDS.shape[1])
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


# -- what transformers is asked to do ------------------------------------------------------------------


def count_passes(model):
    """A list that grows by the number of positions of each forward pass."""
    seen = []

    def note(_, args, kwargs):
        seen.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    return seen, handle


@pytest.mark.parametrize("gamma", [2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_transformers_drafts_gamma_tokens_a_round(target_folder, gamma, temperature):
    contest = load_contest(target_folder, target_folder, device="cpu")  # its own draft: all is accepted
    seen, handle = count_passes(contest.target)
    run(contest, "assisted", IDS[0].tolist(), 18, gamma=gamma, temperature=temperature, seed=0)
    handle.remove()
    assert len(seen) == ceil(18 / (gamma + 1))
    assert seen[1] == gamma + 1


def test_transformers_looks_up_gamma_tokens(target_folder):
    contest = load_contest(target_folder, "lookup", device="cpu")
    seen, handle = count_passes(contest.target)
    run(contest, "assisted", [3, 4, 5, 6, 7, 8, 9] * 4, 18, gamma=3, temperature=0.0, seed=0)
    handle.remove()
    assert seen[0] == 28 + 3 and max(seen[1:]) == 4


def test_transformers_samples_the_whole_law(tiny_folder):
    contest = load_contest(tiny_folder("llama", vocab_size=200), "lookup", device="cpu")
    text = run(contest, "transformers", IDS[0].tolist(), 40, gamma=2, temperature=100.0, seed=0).tokens
    with torch.inference_mode():
        logits = contest.target(torch.tensor([IDS[0].tolist() + text])).logits[0, IDS.shape[1] - 1 : -1]
    ranks = (logits > logits[range(40), text][:, None]).sum(-1)
    assert (
        ranks >= 50
    ).sum() > 20  # three quarters of a nearly uniform law; none of them by transformers' default top_k


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_write_exactly_as_many_tokens_past_any_end_of_text(tiny_folder, contest, temperature):
    free = run(contest, "plain", IDS[0].tolist(), 20, gamma=2, temperature=0.0, seed=0).tokens
    ending = load_contest(tiny_folder("llama", eos_token_id=free[4]), "lookup", device="cpu")
    assert free[4] in ending.ends
    for arm in arms_of(ending):
        for n in (1, 2, 20):
            assert len(run(ending, arm, IDS[0].tolist(), n, gamma=3, temperature=temperature, seed=1).tokens) == n


def test_the_length_is_where_an_independent_run_ends(contest, prompts):
    rows = list(race(contest, prompts[:2], gamma=2, max_new_tokens=10))
    assert [row.new_tokens for row in rows] == [10, 10]
    text = rows[0].runs["plain"].tokens
    ended = replace(contest, ends=[text[3]])
    row = next(race(ended, prompts[:1], gamma=2, max_new_tokens=10))
    assert {len(r.tokens) for r in row.runs.values()} == {text.index(text[3]) + 1}


# -- the race ------------------------------------------------------------------------------------------


def test_greedy_texts_are_the_same_and_some_drafts_were_kept_and_some_refused(contest, prompts):
    rows = list(race(contest, prompts, gamma=3, max_new_tokens=24))
    for texts in partings(contest, rows).values():
        assert texts["identical"] + texts["ties"] == len(prompts) and texts["different"] == 0
    trace = [r for row in rows for r in row.runs["drafted"].trace]
    assert sum(r.kept for r in trace) > 0 and sum(r.rejected for r in trace) > 0


def test_a_text_that_differs_is_counted(contest, prompts):
    row = next(race(contest, prompts[:1], gamma=2, max_new_tokens=8))
    wrong = [(t + 1) % 40 for t in row.runs["drafted"].tokens]
    row = replace(row, runs=row.runs | {"drafted": replace(row.runs["drafted"], tokens=wrong)})
    assert partings(contest, [row])["drafted"]["different"] == 1


def test_a_shortlist_draft_runs_in_both(target_folder, shortlist_folder, prompts):
    contest = load_contest(target_folder, shortlist_folder, device="cpu")
    assert contest.refusal == ""
    rows = list(race(contest, prompts[:2], gamma=2, max_new_tokens=8))
    assert set(rows[0].runs) == set(ARMS)
    assert all(t["different"] == 0 for t in partings(contest, rows).values())


def test_the_order_rotates_and_every_decoder_reads_the_prompt_before_its_clock_runs(contest, prompts, monkeypatch):
    calls = []
    real = speed.run

    def record(contest, arm, ids, new_tokens, **settings):
        calls.append((arm, new_tokens))
        return real(contest, arm, ids, new_tokens, **settings)

    monkeypatch.setattr(speed, "run", record)
    list(race(contest, prompts[:4], gamma=2, max_new_tokens=8))
    timed = [[arm for arm, n in calls[i : i + 8] if n == 8] for i in range(0, 32, 8)]
    warm = [[arm for arm, n in calls[i : i + 4]] for i in range(0, 32, 8)]
    assert all(sorted(turn) == sorted(ARMS) for turn in timed + warm)
    assert [turn[0] for turn in timed] == list(ARMS)


def test_sampling_repeats_by_seed_and_leaves_the_callers_random_state_alone(contest, prompts):
    before = torch.get_rng_state()
    rows = [next(race(contest, prompts[:1], 2, 12, 1.0, seed)) for seed in (0, 0, 1)]
    texts = [{arm: r.tokens for arm, r in row.runs.items()} for row in rows]
    assert texts[0] == texts[1] and texts[0] != texts[2]
    assert torch.equal(before, torch.get_rng_state())


def test_the_clock_of_the_first_token_stops_before_the_last(contest):
    for arm in ARMS:
        out = run(contest, arm, IDS[0].tolist(), 30, gamma=2, temperature=0.0, seed=0)
        assert 0 < out.first < out.seconds


# -- ratios and intervals ------------------------------------------------------------------------------


def test_a_speed_is_a_ratio_of_totals_not_a_mean_of_ratios():
    assert ratio_of_totals([9.0, 1.0], [1.0, 1.0]).value == 5.0  # here the two agree
    assert ratio_of_totals([9.0, 1.0], [3.0, 1.0]).value == 2.5  # the mean of the ratios is 2


def test_the_interval_covers_the_ratio_of_the_means_and_not_the_mean_of_the_ratios():
    draw = np.random.default_rng(0)
    covered = mutant_covered = 0
    for trial in range(400):
        b = draw.lognormal(0, 0.5, 24)  # a short text is sped up more than a long one
        a = (1.5 + 1.5 * np.exp(-2 * b)) * b * draw.lognormal(0, 0.1, 24)
        r = ratio_of_totals(a, b, seed=trial, resamples=500)
        covered += r.low <= RATIO_OF_MEANS <= r.high
        mutant_covered += r.low <= MEAN_OF_RATIOS <= r.high
    assert 0.91 <= covered / 400 <= 0.99
    assert mutant_covered / 400 < 0.8


_b = np.random.default_rng(1).lognormal(0, 0.5, 1_000_000)
_factor, _mean_noise = 1.5 + 1.5 * np.exp(-2 * _b), np.exp(0.005)
RATIO_OF_MEANS = float((_factor * _b).mean() / _b.mean() * _mean_noise)
MEAN_OF_RATIOS = float(_factor.mean() * _mean_noise)


def test_an_interval_of_the_median_covers_whatever_the_law():
    draws = np.random.default_rng(0).lognormal(0, 2, (1000, 15))
    found = [median(x) for x in draws]
    assert 0.95 <= np.mean([e.low <= 1 <= e.high for e in found]) <= 0.98  # 0.965 with a deviation of 0.006


def test_no_interval_from_too_few():
    assert ratio_of_totals([2.0] * 5, [1.0] * 5) == Estimate(2.0)
    assert ratio_of_totals([2.0] * 6, [1.0] * 6) == Estimate(2.0, 2.0, 2.0)
    assert median([1.0] * 5) == Estimate(1.0) and median([1.0] * 6) == Estimate(1.0, 1.0, 1.0)


# -- costs and prediction ------------------------------------------------------------------------------


def a_round(drafted, accepted, seconds=10.0, target=6.0, draft=3.0):
    return Round(0, [7] * drafted, accepted, [7] * (accepted + 1), [], [], drafted, draft, target, seconds)


def costs_of(gamma, v, c, overhead=0.0, plain=0.0, prefill=(0.0, 0.0)):
    estimates = [Estimate(x) for x in v]
    return Costs(gamma, Estimate(0.1), estimates, Estimate(c), Estimate(plain), Estimate(overhead), *prefill)


def test_the_theorem_gets_alpha_and_c_and_the_terms_come_one_by_one():
    # 4 rounds of 2 drafted: 2, 1, 0, 2 accepted; alpha = 5 of 7 tested, by position 3/4 and 2/3; 9 tokens
    trace = [a_round(2, 2), a_round(2, 1), a_round(2, 0), a_round(2, 2)]
    found = costs_of(2, [1, 1.2, 1.5], 0.1).predict(trace, [12])
    assert found.alpha == pytest.approx(5 / 7)
    assert found.factors["theorem"] == pytest.approx(improvement_factor(5 / 7, 2, 0.1))
    assert found.factors["verification cost"] == pytest.approx(improvement_factor(5 / 7, 2, 0.1, 1.5))
    assert found.factors["acceptance by position"] == pytest.approx((1 + 3 / 4 + 3 / 4 * 2 / 3) / (0.2 + 1.5))
    assert found.factors["outside the models"] == pytest.approx(found.factors["prefill"])


def test_time_outside_the_models_is_charged_to_both_loops():
    trace = [a_round(2, 2), a_round(2, 0)] * 3
    costs = costs_of(2, [1, 1.2, 1.5], 0.1, overhead=0.3, plain=0.25, prefill=(4.0, 1.0))
    alphas, unit = [1 / 2, 1.0], 1.25
    time = expected_time(alphas, 16, 0.1 / unit, [1, 1.5 / unit, 1.8 / unit])
    by_hand = (4 / unit + 16) / (5 / unit + time)
    assert costs.predict(trace, [16]).factors["outside the models"] == pytest.approx(by_hand)


def test_what_a_drafter_did_not_propose_is_refused_and_not_checked():
    trace = [a_round(2, 2), a_round(0, 0)] * 3
    found = costs_of(2, [1, 1.5, 2], 0.0).predict(trace, [16])
    assert found.alpha == pytest.approx(6 / 9)
    # a round costs v(3) or v(1), by halves, and gives 3 or 1 tokens
    assert found.factors["acceptance by position"] == pytest.approx(2 / 1.5)


def test_only_rounds_with_room_for_gamma_tokens_tell_the_acceptance():
    trace = [a_round(2, 2), a_round(1, 1), a_round(2, 0), a_round(2, 0), a_round(1, 0), a_round(0, 0)]
    assert rounds_with_room(trace, 2, [5, 4]) == [trace[0], trace[2], trace[3]]


def test_a_drafter_that_never_proposes_is_predicted_to_gain_nothing():
    found = costs_of(3, [1, 1.1, 1.2, 1.3], 0.0).predict([a_round(0, 0)] * 8, [8])
    assert found.theorem == 1 and found.extended == pytest.approx(1)


def test_time_outside_the_models():
    trace = [a_round(2, 1), a_round(0, 0, seconds=8.0)]
    assert outside_seconds(trace) == [1.0, 0.0]
    assert outside_seconds(trace, [4.0, 5.0, 5.5]) == [1.5, 1.0]  # on a GPU, by the number of positions


def test_passes_are_timed_over_the_lengths_asked_for_and_leave_the_session_as_it_was(contest):
    import random

    session = open_session(contest.pair.target)
    session.feed(IDS, last=0)
    fed = []
    real = session.feed
    session.feed = lambda ids, last: fed.append((ids.shape[1], last)) or real(ids, last)
    seconds = pass_seconds(session, [1, 2, 5], random.Random(0))
    assert sorted(fed) == [(1, 1), (2, 2), (5, 5)] and session.length == IDS.shape[1]
    assert len(seconds) == 3 and min(seconds) > 0


def test_the_meter_needs_a_text(contest):
    meter = CostMeter(contest.bare, 2, Sampling())
    with pytest.raises(SpecdecError, match="nothing was measured"):
        meter.costs([], [])


def test_the_meter_on_a_prompt_as_long_as_the_context(contest):
    meter = CostMeter(contest.bare, 2, Sampling(1.0))
    meter.measure([5] * 512, [])
    assert len(meter.passes[0]) == 8 and meter.passes[0][0] > 0


def test_memory_and_loading_are_measured_in_processes_of_their_own(target_folder, draft_folder):
    held = torch.zeros(1 << 27)  # 512 MiB that are this process's own
    held += 1
    found = footprint(str(target_folder), str(draft_folder), 2, repeats=1)
    for name in ("plain", "drafted"):
        assert 0 < found[name]["resident_mib"] <= found[name]["peak_mib"] + 1
    assert min(found["loading"].values()) > 0
    import psutil

    assert found["plain"]["peak_mib"] < psutil.Process().memory_info().rss / 2**20


def test_a_footprint_that_fails_says_why(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback ...\nMemoryError: no room\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SpecdecError, match="MemoryError: no room"):
        footprint("packaged", "lookup", 2, repeats=1)


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


@pytest.fixture
def door():
    app = typer.Typer()
    app.command()(bench)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


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


def test_models_in_memory_are_refused(contest, target_folder):
    with pytest.raises(SpecdecError, match="name the draft"):
        load_contest(target_folder, contest.target)


def test_no_prompt_is_refused(contest):
    with pytest.raises(SpecdecError, match="at least one"):
        race(contest, [])


def test_a_packaged_draft_goes_by_its_name(target_folder, tmp_path, monkeypatch):
    from specdec_lib.models import drafts

    table = sd.NGramDrafter.fit([[5, 9, 17, 3, 8] * 4], order=2)
    drafts.write_draft(tmp_path / "table", table, {"target_hash": drafts.target_hash(target_folder)})
    monkeypatch.setattr(drafts, "DRAFTS", tmp_path)
    assert "NGramDrafter" in load_contest(target_folder, "table", device="cpu").refusal


def test_lookup_may_come_before_a_model(tiny_folder, target_folder, prompts):
    contest = load_contest(target_folder, f"lookup+{tiny_folder('llama')}", device="cpu")
    assert isinstance(contest.pair.draft, sd.ComposedDrafter)
    assert contest.assistant is not None and "model alone" in contest.remark and not contest.refusal
    row = next(race(contest, prompts[:1], gamma=2, max_new_tokens=6))
    assert set(row.runs) == set(ARMS)


@pytest.mark.parametrize("name", ["small+lookup", "lookup+", "+small"])
def test_a_composed_name_that_says_nothing_is_refused(name):
    from specdec_lib.load import load_pair

    with pytest.raises(SpecdecError, match="write lookup first"):
        load_pair(draft=name)


def test_the_draft_by_default_is_the_one_that_load_pair_takes(tmp_path, monkeypatch):
    from specdec_lib.load import default_draft
    from specdec_lib.models import drafts

    monkeypatch.setattr(drafts, "DRAFTS", tmp_path)
    assert default_draft("packaged") == "lookup"
    table = sd.NGramDrafter.fit([[5, 9, 17, 3, 8] * 4], order=2)
    for name, speed_up in (("slow", 1.1), ("quick", 1.3)):
        story = {"target_hash": "0" * 64, "speed": {name: {"speedup": {"0": speed_up, "1": 1.0}}}}
        drafts.write_draft(tmp_path / name, table, story)
    assert default_draft("packaged") == "quick" and default_draft("elsewhere") == "lookup"


def test_a_folder_whose_manifest_is_not_a_drafts_is_a_model(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")  # as the packaged target's folder has one
    (folder / "manifest.json").write_text('{"files": {}}')
    assert load_contest(folder, folder, device="cpu").assistant is not None


def test_a_draft_of_another_target_is_refused(target_folder, tmp_path):
    from specdec_lib.models import drafts

    table = sd.NGramDrafter.fit([[5, 9, 17, 3, 8] * 4], order=2)
    drafts.write_draft(tmp_path / "table", table, {"target_hash": "0" * 64})
    with pytest.raises(SpecdecError, match="made for the target 000000000000"):
        load_contest(target_folder, tmp_path / "table", device="cpu")


# -- the small benchmarks ------------------------------------------------------------------------------


def test_the_small_benchmarks_are_written(contest, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "load_pair", lambda: contest.pair)
    monkeypatch.setattr(small, "load_prompts", lambda **_: [Prompt("a", "a", [{"role": "user", "content": "abc abc"}])])
    monkeypatch.setattr(small, "import_seconds", lambda: Estimate(0.3))
    small.main(tmp_path / "small.json")
    found = json.loads((tmp_path / "small.json").read_text())
    assert found["overhead_per_round"]["1"]["drafted"]["value"] > 0
    assert found["within_goals"]["import_seconds"] is False
    assert found["environment"]["cpu"]["model"]


def test_the_import_is_timed_in_a_new_process():
    assert small.import_seconds(1).value > 0


def test_a_kept_speed_decides_which_draft_load_pair_takes(tmp_path):
    from specdec_lib.load import fastest
    from specdec_lib.models.drafts import note_speed, read_manifest

    folders = {}
    for name, measured in (("quick", 1.6), ("slow", 1.2), ("unmeasured", None)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "manifest.json").write_text('{"kind": "ngram", "target_hash": "x", "files": {}}')
        if measured:
            note_speed(folders[name], name, {"speedup": {"0": measured, "1": 1.0}})
    assert fastest(folders) == "quick"
    assert read_manifest(folders["slow"])["speed"]["slow"]["speedup"]["0"] == 1.2
    note_speed(folders["slow"], "lookup+slow", {"speedup": {"0": 2.0, "1": 1.0}})
    assert fastest(folders) == "lookup+slow"
    assert fastest({"unmeasured": folders["unmeasured"]}) is None


def test_a_speed_can_only_be_kept_in_a_draft():
    with pytest.raises(SpecdecError, match="lookup has none"):
        bench(draft=["lookup"], keep=True)
