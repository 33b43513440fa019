"""Who is compared and how: fair baselines, equal lengths, every decoder in turn."""

import gc
import shutil
import weakref
from dataclasses import replace
from math import ceil

import pytest
import torch
from tiny import tiny_tokenizer

import specdec_lib as sd
from specdec_lib.bench.contest import ARMS, load_contest, pack_linears
from specdec_lib.bench.speed import partings, race
from specdec_lib.errors import SpecdecError
from specdec_lib.models import load_transformers, open_session
from specdec_lib.models.fast import FastLlama, packed_linears_available
from specdec_lib.models.shortlist import ShortlistLlamaConfig, ShortlistLlamaForCausalLM
from specdec_lib.sampling import SamplingParams

IDS = torch.tensor([[5, 9, 17, 3, 8, 30, 12, 7, 25, 6, 11, 14]])


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
    tiny_tokenizer("llama").save_pretrained(folder)
    return folder


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


def run(contest, arm, ids, new_tokens, gamma, temperature, seed):
    return contest.engines(gamma)[arm].run([ids], new_tokens, SamplingParams(temperature), seed)[0]


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
    run(contest, "assisted", IDS[0].tolist(), 18, gamma, temperature, 0)
    handle.remove()
    assert len(seen) == ceil(18 / (gamma + 1))
    assert seen[1] == gamma + 1


def test_transformers_looks_up_gamma_tokens(target_folder):
    contest = load_contest(target_folder, "lookup", device="cpu")
    seen, handle = count_passes(contest.target)
    run(contest, "assisted", [3, 4, 5, 6, 7, 8, 9] * 4, 18, 3, 0.0, 0)
    handle.remove()
    assert seen[0] == 28 + 3 and max(seen[1:]) == 4


def test_transformers_samples_the_whole_law(tiny_folder):
    contest = load_contest(tiny_folder("llama", vocab_size=200), "lookup", device="cpu")
    text = run(contest, "transformers", IDS[0].tolist(), 40, 2, 100.0, 0).tokens
    with torch.inference_mode():
        logits = contest.target(torch.tensor([IDS[0].tolist() + text])).logits[0, IDS.shape[1] - 1 : -1]
    ranks = (logits > logits[range(40), text][:, None]).sum(-1)
    assert (
        ranks >= 50
    ).sum() > 20  # three quarters of a nearly uniform law; none of them by transformers' default top_k


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_write_exactly_as_many_tokens_past_any_end_of_text(tiny_folder, contest, temperature):
    free = run(contest, "plain", IDS[0].tolist(), 20, 2, 0.0, 0).tokens
    ending = load_contest(tiny_folder("llama", eos_token_id=free[4]), "lookup", device="cpu")
    assert free[4] in ending.ends
    for arm in ending.engines(3):
        for n in (1, 2, 20):
            assert len(run(ending, arm, IDS[0].tolist(), n, 3, temperature, 1).tokens) == n


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
    assert list(partings(contest, rows)) == [arm for arm in ARMS if arm != "plain"]  # in this order in every process
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

    def recording(engine, arm):
        real = engine.run

        def run(texts, new_tokens, *rest):
            if len(rest) < 3:  # without ends: not the run that finds the length
                calls.append((arm, new_tokens))
            return real(texts, new_tokens, *rest)

        engine.run = run
        return engine

    real = type(contest).engines
    monkeypatch.setattr(
        type(contest), "engines", lambda self, gamma: {a: recording(e, a) for a, e in real(self, gamma).items()}
    )
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
        out = run(contest, arm, IDS[0].tolist(), 30, 2, 0.0, 0)
        assert 0 < out.first < out.seconds


# -- who is loaded -------------------------------------------------------------------------------------


def test_models_in_memory_are_refused(contest, target_folder):
    with pytest.raises(SpecdecError, match="name the draft"):
        load_contest(target_folder, contest.target)


def test_no_prompt_is_refused(contest):
    with pytest.raises(SpecdecError, match="at least one"):
        race(contest, [])


def test_a_packaged_draft_goes_by_its_name(target_folder, tmp_path, monkeypatch):
    from specdec_lib.drafters import on_disk as drafts

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
    from specdec_lib.drafters import on_disk as drafts
    from specdec_lib.load import default_draft

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
    from specdec_lib.drafters import on_disk as drafts

    table = sd.NGramDrafter.fit([[5, 9, 17, 3, 8] * 4], order=2)
    drafts.write_draft(tmp_path / "table", table, {"target_hash": "0" * 64})
    with pytest.raises(SpecdecError, match="made for the target 000000000000"):
        load_contest(target_folder, tmp_path / "table", device="cpu")


def test_a_kept_speed_decides_which_draft_load_pair_takes(tmp_path):
    from specdec_lib.drafters.on_disk import note_speed, read_manifest
    from specdec_lib.load import fastest

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
