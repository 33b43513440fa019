"""The draft that a distillation leaves: as a model, on disk, and measured."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import specdec_lib as sd
from specdec_lib.distill import ngram as table
from specdec_lib.distill import recipe
from specdec_lib.distill.evaluate import Answer, draft_logits, evaluate_draft
from specdec_lib.distill.recipe import Job
from specdec_lib.distill.train import Text
from specdec_lib.drafters import NGramDrafter, on_disk
from specdec_lib.errors import SpecdecError
from specdec_lib.models import Pair, load_tokenizer, load_transformers, open_session
from specdec_lib.models.fast import FastLlama


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def weights(out):
    return load_file(out / "model.safetensors")


# -- the draft ------------------------------------------------------------------------------------------


def test_the_draft_is_a_causal_model_of_the_full_vocabulary(finished):
    from transformers import AutoModelForCausalLM

    job, _, _ = finished
    model = AutoModelForCausalLM.from_pretrained(job.out)
    assert model.dtype == torch.float32 and model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(46)[None]
    with torch.inference_mode():
        logits = model(ids).logits
    assert logits.shape == (1, 46, 46)
    outside = torch.ones(46, dtype=torch.bool)
    outside[model.shortlist] = False
    assert int(outside.sum()) == 46 - 24
    assert (logits[..., outside] == -torch.inf).all() and logits[..., ~outside].isfinite().all()
    fast = open_session(FastLlama(model)).feed(ids, last=46)
    torch.testing.assert_close(fast[..., ~outside], logits[..., ~outside], rtol=1e-5, atol=1e-5)
    assert (fast[..., outside] == -torch.inf).all()


def test_transformers_takes_the_draft_as_its_assistant(finished):
    from transformers import AutoModelForCausalLM

    job, _, _ = finished
    target = load_transformers(job.target, device="cpu")
    assistant = AutoModelForCausalLM.from_pretrained(job.out)
    assistant.generation_config.assistant_confidence_threshold = 0
    ids = torch.tensor([load_tokenizer(job.target)("user who are you?<eos>assistant ")["input_ids"]])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24}
    plain = target.generate(ids, do_sample=False, **settings)
    torch.testing.assert_close(target.generate(ids, do_sample=False, assistant_model=assistant, **settings), plain)
    torch.manual_seed(0)
    sampled = target.generate(ids, do_sample=True, assistant_model=assistant, **settings)
    assert sampled.shape[1] > ids.shape[1]


def test_transformers_feeds_the_assistant_new_tokens_only(finished):
    from transformers import AutoModelForCausalLM

    job, _, _ = finished
    target = load_transformers(job.target, device="cpu")
    assistant = AutoModelForCausalLM.from_pretrained(job.out)
    assistant.generation_config.update(
        num_assistant_tokens=3, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    ids = torch.tensor([load_tokenizer(job.target)("user who are you?<eos>assistant ")["input_ids"]])
    fed = []
    assistant.model.register_forward_pre_hook(
        lambda _, args, given: fed.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    target.generate(ids, assistant_model=assistant, **settings)
    assert fed[0] == ids.shape[1] and len(fed) > 6
    assert max(fed[1:]) <= 3 + 1  # what the target made of the last round, at most


def test_decoding_with_the_draft_is_greedily_identical(finished):
    job, manifest, _ = finished
    draft = on_disk.load_draft(job.out, manifest["target_hash"])
    pair = Pair(FastLlama(load_transformers(job.target, device="cpu")), draft, load_tokenizer(job.target))
    texts = ["who are you?", "hello there.", "count to 20"]
    fast = sd.generate(pair, texts, gamma=4, max_new_tokens=24)
    assert fast.tokens == sd.generate_plain(pair, texts, max_new_tokens=24).tokens
    assert fast.stats.accepted > 0
    assert len(sd.generate(pair, texts, max_new_tokens=8, temperature=1.0).tokens) == 3


def test_a_draft_of_another_target_is_refused_and_a_damaged_one(finished, tmp_path):
    job, manifest, _ = finished
    with pytest.raises(SpecdecError, match=f"{manifest['target_hash'][:12]}.*{'f' * 12}"):
        on_disk.load_draft(job.out, "f" * 64)
    copy = shutil.copytree(job.out, tmp_path / "copy")
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    with pytest.raises(SpecdecError, match=r"model\.safetensors is damaged"):
        on_disk.load_draft(copy)
    with pytest.raises(SpecdecError, match="is not a draft folder"):
        on_disk.load_draft(tmp_path)


def test_writing_replaces_a_draft_and_nothing_else(finished, tmp_path):
    job, _, _ = finished
    draft = NGramDrafter.fit([[1, 2, 3]])
    note = {"target_hash": "x"}
    on_disk.write_draft(tmp_path / "a", draft, note)
    on_disk.write_draft(tmp_path / "a", draft, note | {"second": True})
    assert on_disk.read_manifest(tmp_path / "a")["second"] and [p.name for p in tmp_path.iterdir()] == ["a"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(SpecdecError, match="is not a draft folder"):
        on_disk.write_draft(tmp_path / "mine", draft, note)
    with pytest.raises(SpecdecError, match="is not a draft folder"):
        recipe.prepare(Job(out=tmp_path / "mine", target=job.target))
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_the_hash_of_a_target_in_parts(tiny_folder, tmp_path):
    model = load_transformers(tiny_folder("llama"), device="cpu")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    whole = on_disk.target_hash(tmp_path)
    assert len(whole) == 64 and whole != on_disk.target_hash(tiny_folder("llama"))
    next(tmp_path.glob("model-*.safetensors")).unlink()
    assert on_disk.target_hash(tmp_path) != whole


def test_a_hub_id_is_the_folder_that_the_hub_brings(tiny_folder, monkeypatch):
    import huggingface_hub

    folder = tiny_folder("llama")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(folder))
    assert on_disk.target_hash("owner/name") == on_disk.target_hash(folder)
    monkeypatch.undo()
    with pytest.raises(SpecdecError, match="cannot download owner/name from the hub"):
        on_disk.target_hash("owner/name")


def test_packaged_drafts_are_whole():
    largest = {"model": 16_000_000, "features": 16_000_000, "tokenizer": 4_000_000, "ngram": 8_000_000}
    total = 0
    for name, folder in on_disk.packaged_drafts().items():
        assert on_disk.load_draft(folder, device="cpu"), name
        manifest = on_disk.read_manifest(folder)
        assert manifest["bytes"] <= largest[manifest["kind"]], name
        total += manifest["bytes"]
    assert total <= 40_000_000  # what a checkout may weigh


# -- measurement ----------------------------------------------------------------------------------------


def test_a_target_agrees_with_itself(tiny_folder):
    target = FastLlama(load_transformers(tiny_folder("llama"), device="cpu"))
    pair = Pair(target, None, load_tokenizer(tiny_folder("llama")))
    prompt = pair.encode("hello")
    greedy = sd.generate_plain(pair, prompt, max_new_tokens=20, eos=[]).tokens[0]
    result = evaluate_draft(target, target, [Answer("1", "x", prompt, greedy, greedy)])
    assert result["agreement"] == 1 and result["overlap"] == pytest.approx(1, abs=1e-4)
    assert result["by_position"] == [1.0] * 8


def test_a_draft_in_other_tokens_is_scored_in_the_targets(tiny_folder):
    """With one tokenizer on both sides it is scored as it is, but for what is no whole character."""
    tokenizer = load_tokenizer(tiny_folder("llama"))
    draft = FastLlama(load_transformers(tiny_folder("llama", seed=1), device="cpu"))
    shared = sd.SharedVocabularyDrafter(draft, tokenizer, tokenizer)
    ids = tokenizer("who are you? hello there.")["input_ids"]
    found, expected = (draft_logits(d, ids, last=6, vocabulary=46) for d in (shared, draft))
    known = found.isfinite()
    assert known.sum() == 6 * shared.shared
    torch.testing.assert_close(found[known], expected[known], rtol=1e-4, atol=1e-4)


def test_teacher_forcing_by_hand():
    draft = NGramDrafter.fit([[7, 7, 7]], order=1)
    assert draft_logits(draft, [1, 2, 3], last=2, vocabulary=9).argmax(-1).tolist() == [7, 7]
    assert draft_logits(draft, [1, 2, 3], last=2, vocabulary=9).softmax(-1)[0, 7] == 1


def test_votes_are_the_targets_modes():
    """The table learns what the target finds most probable, also where it wrote something else."""
    text = Text.__new__(Text)
    text.tokens = torch.tensor([[5, 6, 7, 5, 6, 8]])
    text.ids = torch.tensor([[[6], [9], [5], [6], [9], [0]]])
    text.answering = torch.tensor([[True, True, True, True, True, False]])
    draft = table.fit(text, order=2)
    assert [draft.following([5]), draft.following([6]), draft.following([7])] == [6, 9, 5]
    assert table.agreement(draft, text) == 1
    assert table.predictions(draft, np.array([[5, 6, 1]])).tolist() == [[6, 9, draft.following([])]]


def test_pruning_changes_no_proposal():
    rng = np.random.default_rng(0)
    full = NGramDrafter.fit([rng.zipf(1.5, 3000).clip(max=20).tolist()], order=4)
    small = table.prune(full)
    assert sum(len(keys) for keys, _ in small.tables) < sum(len(keys) for keys, _ in full.tables)
    probes = rng.integers(1, 22, (300, 4))
    assert (table.predictions(small, probes) == table.predictions(full, probes)).all()
    for probe in probes[:50].tolist():
        assert small.following(probe) == full.following(probe) == table.predictions(full, np.array([probe]))[0, -1]
