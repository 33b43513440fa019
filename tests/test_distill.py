"""A draft from a tiny target: every step, interrupted and resumed, and the draft that comes out."""

import dataclasses
import json
import logging
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import specdec_lib as sd
from specdec_lib.distill import needs, recipe
from specdec_lib.distill import ngram as table
from specdec_lib.distill.evaluate import Answer, draft_logits, evaluate_draft
from specdec_lib.distill.folder import TextFolder
from specdec_lib.distill.recipe import Job, distill
from specdec_lib.distill.text import OPENERS, Turns, write_shard
from specdec_lib.distill.tokenizer import OwnText, make_tokenizer
from specdec_lib.distill.train import Text, answer_positions
from specdec_lib.distill.unseen import rows_with, split
from specdec_lib.drafters import NGramDrafter
from specdec_lib.errors import SpecdecError
from specdec_lib.models import Pair, load_tokenizer, load_transformers, open_session
from specdec_lib.models import drafts as on_disk
from specdec_lib.models.fast import FastLlama

ROWS, LENGTH = 16, 96


class Quiet:
    """A board that keeps what it is told."""

    def __init__(self):
        from specdec_lib.distill.progress import Board

        self.board, self.lines = Board(), []

    def say(self, line):
        self.lines.append(line)

    def step(self, name):
        return self.board.step(name)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text(
        '{"prompt": "who are you, and what is 2 by 3?", "kind": "a"}\n'
        '{"prompt": "hello there.", "kind": "b"}\n{"prompt": "say that again", "kind": "b"}\n'
    )
    return file


def a_job(folder, target, prompts, /, **changes):
    """Three shards to train on and one to measure on, all in `folder`."""
    usual = {
        "out": folder / "draft", "target": str(target), "work": folder / "work", "prompts": prompts,
        "tokens": 3 * ROWS * LENGTH, "layers": 1, "width": 16, "heads": 2, "shortlist": 24, "passes": 4, "batch": 8,
        "rate": 0.1, "max_new_tokens": 12, "rows": ROWS, "length": LENGTH, "device": "cpu", "dtype": "float32",
        "every": 1e9,
    }  # fmt: skip
    return Job(**usual | changes)


@pytest.fixture
def job(tiny_folder, tmp_path, prompts):
    return lambda model="llama", **changes: a_job(tmp_path, tiny_folder(model, seed=2), prompts, **changes)


@pytest.fixture(scope="module")
def finished(tiny_folder, tmp_path_factory, prompts):
    """One whole run: job, manifest, what was said."""
    whole = a_job(tmp_path_factory.mktemp("finished"), tiny_folder("llama", seed=2), prompts)
    board = Quiet()
    return whole, distill(whole, board), board.lines


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def weights(out):
    return load_file(out / "model.safetensors")


# -- the whole run --------------------------------------------------------------------------------------


def test_a_run_leaves_a_draft_and_its_story(finished):
    job, manifest, lines = finished
    assert json.loads((job.out / "manifest.json").read_text()) == manifest
    assert manifest["target_hash"] == on_disk.target_hash(job.target)
    assert manifest["text"]["tokens"] == 3 * ROWS * LENGTH and manifest["text"]["held_out_tokens"] == ROWS * LENGTH
    training = manifest["training"]
    assert training["tokens"] >= job.recipe.tokens == 4 * job.tokens
    assert training["curve"][-1]["overlap"] == pytest.approx(training["on_held_out_text"]["overlap"], abs=2e-3)
    benchmark = manifest["benchmark"]
    assert set(benchmark["kinds"]) == {"a", "b"}
    assert all(0 <= benchmark[name] <= 1 for name in ("agreement", "overlap"))
    assert benchmark["by_position"][0] == benchmark["agreement"]  # a draft's first token is every position once
    assert any("held out" in line for line in lines) and "greedy agreement" in lines[-1]
    assert str(job.work) not in (job.out / "manifest.json").read_text()


def test_a_finished_run_is_not_run_again(finished, monkeypatch):
    job, manifest, _ = finished
    for name in ("write_shard", "generate_plain"):
        module = "folder" if name == "write_shard" else "evaluate"
        monkeypatch.setattr(f"specdec_lib.distill.{module}.{name}", lambda *_, **__: pytest.fail("done again"))
    monkeypatch.setattr(recipe, "at_answers", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(recipe, "evaluate", lambda *_, **__: {})
    again = distill(job, Quiet())
    assert again["files"] == manifest["files"] and again["training"]["curve"] == manifest["training"]["curve"]


def test_an_interrupted_run_ends_in_the_same_shards_and_weights(finished, job, tmp_path, monkeypatch):
    whole, manifest, _ = finished
    part = job(every=0)  # a checkpoint at each step

    def interrupted(*args, **kwargs):  # in the middle of the third shard
        if args[4] == 2:
            kwargs["tick"] = lambda t: (_ for _ in ()).throw(KeyboardInterrupt) if t == 9 else None
        write_shard(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("specdec_lib.distill.folder.write_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            distill(part, Quiet())
    names = lambda: sorted(path.name for path in part.work.glob("text-*.safetensors"))  # noqa: E731
    assert names() == ["text-00000.safetensors", "text-00001.safetensors"]

    class Stops(Quiet):
        def say(self, line):
            if line.startswith(f"{8 * 8 * LENGTH:,} tokens"):  # after the eighth step, within the second pass
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(part, Stops())
    assert len(names()) == 4
    for name in names():
        assert (part.work / name).read_bytes() == (whole.work / name).read_bytes()
    training = distill(part, Quiet())["training"]
    assert training["tokens"] == manifest["training"]["tokens"]
    assert [entry["tokens"] for entry in training["curve"]] == list(range(8 * LENGTH, 25 * 8 * LENGTH, 8 * LENGTH))
    assert training["curve"][-1]["overlap"] > training["curve"][0]["overlap"] + 0.02
    assert same(weights(part.out), weights(whole.out))


@pytest.mark.parametrize("damage", ["torn", "flipped", "both"])
def test_a_broken_checkpoint_is_said_and_the_one_before_resumed(finished, job, damage, caplog):
    whole, _, _ = finished
    part = job(every=0)
    distill(part, Quiet())
    run = recipe.prepare(part).run
    content = (run / "checkpoint.pt").read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    (run / "checkpoint.pt").write_bytes(content[:middle] if damage == "torn" else flipped)
    if damage == "both":
        (run / "previous.pt").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        distill(part, Quiet())
    assert "checkpoint.pt cannot be used" in caplog.text
    assert ("starts anew" in caplog.text) == (damage == "both")
    assert same(weights(part.out), weights(whole.out))


def test_a_budget_ends_text_and_training(job):
    manifest = distill(job(budget=1e-9), Quiet())
    assert manifest["text"]["tokens"] == ROWS * LENGTH  # the least: a shard to train on, one to measure on
    assert manifest["training"]["tokens"] == 0


def test_a_target_unknown_to_the_fast_pass_and_without_a_chat_template(job):
    manifest = distill(job("gpt2", dtype=None), Quiet())
    assert manifest["benchmark"]["tokens"]["greedy"] > 0


def test_an_ngram_table(finished, job):
    whole, _, _ = finished
    part = job(kind="ngram", work=whole.work, target=whole.target)
    manifest = distill(part, Quiet())
    assert manifest["kind"] == "ngram" and len(manifest["trials"]) == 15
    draft = on_disk.load_draft(part.out, manifest["target_hash"])
    assert isinstance(draft, NGramDrafter)
    best = max(trial["agreement"] for trial in manifest["trials"])
    ready = recipe.prepare(part)
    _, held_out, _ = recipe.read_text(ready, sorted(ready.text.path.glob("text-*")), Quiet())
    assert table.agreement(draft, held_out) == pytest.approx(best, abs=1e-4)


def test_a_draft_with_a_tokenizer_of_its_own(finished, job, tmp_path):
    whole, _, _ = finished
    part = job(kind="tokenizer", shortlist=300, work=whole.work, target=whole.target, passes=1, every=0)

    class Stops(Quiet):
        def say(self, line):
            super().say(line)
            if sum(" tokens in " in said for said in self.lines) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(part, Stops())
    manifest = distill(part, Quiet())
    assert manifest["kind"] == "tokenizer" and len(manifest["training"]["curve"]) > 3
    shutil.rmtree(recipe.prepare(part).run)
    again = distill(dataclasses.replace(part, out=tmp_path / "again", every=1e9), Quiet())
    assert again["files"] == manifest["files"]

    from transformers import LlamaForCausalLM

    own, other = load_tokenizer(part.out), load_tokenizer(part.target)
    assert len(own) == 300 and own.decode(own("A café, 12<eos>")["input_ids"]) == "A café, 12<eos>"
    assert len(own("who are you")["input_ids"]) < len(other("who are you")["input_ids"])
    assert (own.eos_token, own.chat_template) == (other.eos_token, other.chat_template)
    assert type(load_transformers(part.out, "cpu")) is LlamaForCausalLM
    with pytest.raises(SpecdecError, match=r"draft has another vocabulary.*'text'.*'shared'"):
        sd.load_pair(part.target, part.out, device="cpu")
    for how in ("text", "shared"):
        pair = sd.load_pair(part.target, part.out, device="cpu", tokenizers=how)
        out = sd.generate(pair, "who are you?", max_new_tokens=24)
        assert out.stats.drafted > 0
        assert out.tokens == sd.generate_plain(pair, "who are you?", max_new_tokens=24).tokens


def test_a_text_in_other_tokens_has_the_next_token_as_its_label():
    from tiny import tiny_tokenizer

    other = tiny_tokenizer("llama")
    own = make_tokenizer(["user ab assistant the cab"] * 2, 300, other)
    text = Text.__new__(Text)
    rows = ["user ab<eos>assistant the cab<eos>", "user x<eos>assistant xyz vwxzz"]
    text.tokens = torch.tensor([other(row)["input_ids"] for row in rows])
    found = OwnText(text, own, other)
    lengths = [len(own(row)["input_ids"]) for row in rows]
    assert len(found) == 2 and lengths[0] < found.tokens.shape[1] == round(sum(lengths) / 2) < lengths[1]
    assert own.decode(found.tokens[0]).startswith(rows[0]) and rows[1].startswith(own.decode(found.tokens[1]))
    labels = [own.decode(ids[here, 0]) for ids, here in zip(found.ids, found.answering, strict=True)]
    assert labels[0] == " the cab<eos>" and " xyz vwxzz".startswith(labels[1]) and len(labels[1]) > 5


def test_the_command(job, tmp_path, prompts):
    from typer import Typer

    from specdec_lib.distill.command import distill as command

    app = Typer()
    app.command()(command)
    runner = CliRunner()
    result = runner.invoke(app, [str(tmp_path / "x"), "--heads", "3"])
    assert isinstance(result.exception, SpecdecError) and "multiple of 2 x 3 heads" in str(result.exception)
    assert "--budget" in runner.invoke(app, ["--help"], env={"COLUMNS": "200"}).output


# -- text -----------------------------------------------------------------------------------------------


def test_a_shard_holds_what_the_target_says(finished):
    job, _, _ = finished
    shard = load_file(job.work / "text-00001.safetensors")
    model = load_transformers(job.target, device="cpu", dtype="float32")
    tokens = shard["tokens"].long()
    with torch.inference_mode():
        law = model(tokens).logits.log_softmax(-1)[:, :-1]
    stored = torch.zeros_like(law).scatter_(-1, shard["top_ids"][:, :-1].long(), shard["top_logprobs"][:, :-1].float())
    torch.testing.assert_close(stored, law, atol=2e-3, rtol=1e-3)  # half precision on disk
    assert shard["tokens"].dtype == torch.uint16

    turns = Turns.of(load_tokenizer(job.target))
    answering = answer_positions(tokens, turns.header, turns.ends)[:, :-1]
    free = answering & ~shard["forced"][:, 1:]
    written = tokens[:, 1:] == shard["top_ids"][:, :-1, 0].long()
    assert free[::2].any() and written[::2][free[::2]].all()  # even rows answer greedily
    assert not written[1::2][free[1::2]].all()  # odd ones at temperature 1


def test_turns_are_read_off_the_template(tiny_folder):
    tokenizer = load_tokenizer(tiny_folder("llama"))
    turns = Turns.of(tokenizer)
    read = tokenizer.decode
    assert read(turns.start) == "user " and read(turns.to_assistant) == "<eos>assistant "
    assert read(turns.to_user) == "<eos>user " and read(turns.header) == "assistant " and turns.ends == [0]
    plain = Turns.of(load_tokenizer(tiny_folder("gpt2")))
    assert plain.start == [1] and plain.to_user == [0, 1] and plain.header == []
    with pytest.raises(SpecdecError, match="end-of-sequence"):
        tokenizer.eos_token = None
        Turns.of(tokenizer)


def test_without_a_header_all_text_is_answer():
    tokens = torch.tensor([[1, 5, 0, 1, 6]])
    assert answer_positions(tokens, [], [0]).int().tolist() == [[1, 1, 0, 1, 1]]


def test_large_vocabularies_keep_their_ids(tmp_path, tiny_folder):
    class Session:
        device = torch.device("cpu")

        def feed(self, ids):  # every row says token 69,999 for ever
            return torch.nn.functional.one_hot(torch.full(ids.shape, 69_999), 70_000) * 99.0

    path = tmp_path / "text-00000.safetensors"
    write_shard(Session(), load_tokenizer(tiny_folder("llama")), path, seed=0, index=0, rows=2, length=50)
    shard = load_file(path)
    assert shard["tokens"].dtype == torch.int32 and shard["tokens"].max() == 69_999
    assert shard["top_ids"].shape == (2, 50, 64) and shard["top_ids"][:, :-1, 0].eq(69_999).all()


def test_a_damaged_shard_is_written_again(finished, job, caplog):
    whole, _, _ = finished
    part = job()
    ready = recipe.prepare(part)
    recipe.write_text(ready, Quiet())
    damaged = part.work / "text-00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    recipe.write_text(recipe.prepare(part), Quiet())
    assert "text-00002.safetensors cannot be used" in caplog.text
    assert damaged.read_bytes() == (whole.work / damaged.name).read_bytes()


# -- never trained on -----------------------------------------------------------------------------------


def test_every_25th_shard_is_held_out(tmp_path):
    folder = TextFolder(tmp_path, "hash", 0, 96, 448, None, "float32")
    assert folder.shards_for(1_000_000) == 25  # 24 to train on, the first held out
    assert folder.shards_for(24 * 96 * 448 + 1) == 27  # 25 to train on, and the 1st and the 26th
    train, held_out = split(folder.shard(i) for i in range(60))
    assert [path.stem[-2:] for path in held_out] == ["00", "25", "50"] and not set(train) & set(held_out)


def test_rows_that_share_twelve_tokens_with_a_prompt_are_found():
    rng = np.random.default_rng(0)
    tokens, prompt = rng.integers(0, 50_000, (6, 80)), rng.integers(0, 50_000, 40).tolist()
    tokens[1, 5:17] = prompt[3:15]
    tokens[2, 5:16] = prompt[3:14]  # eleven
    tokens[3, -12:] = prompt[-12:]
    tokens[4, :12] = prompt[:12]
    assert rows_with(tokens, [[1, 2], prompt]).tolist() == [False, True, False, True, True, False]


def test_what_is_in_a_prompt_or_held_out_is_not_trained_on(job, prompts, monkeypatch):
    part = job()
    ready = recipe.prepare(part)
    recipe.write_text(ready, Quiet())
    content = json.loads(prompts.read_text().splitlines()[0])["prompt"]
    planted = ready.tokenizer(content, add_special_tokens=False)["input_ids"]
    shard = load_file(ready.text.shard(2))
    shard["tokens"][5, 20 : 20 + len(planted)] = torch.tensor(planted).to(torch.uint16)
    save_file(shard, ready.text.shard(2))
    held_out_rows = {tuple(row) for row in load_file(ready.text.shard(0))["tokens"].long().tolist()}

    seen = []

    def watched(recipe_, model, text, held_out, *rest, **named):
        seen.append((text().tokens, held_out.tokens))
        return train(recipe_, model, text, held_out, *rest, **named)

    train = recipe.train
    monkeypatch.setattr(recipe, "train", watched)
    manifest = distill(part, Quiet())
    (trained, measured) = seen[0]
    assert manifest["text"]["rows_left_out"] == 1 and len(trained) == 3 * ROWS - 1
    assert not rows_with(trained.numpy(), [planted]).any()
    assert not held_out_rows & {tuple(row) for row in trained.tolist()}
    assert held_out_rows == {tuple(row) for row in measured.tolist()}


def test_the_openers_share_no_twelve_tokens_with_the_benchmark(packaged_folder):
    """What every run forces upon the target is not the benchmark's text."""
    from specdec_lib.bench.prompts import load_prompts

    tokenizer = load_tokenizer(packaged_folder)
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    contents = [ids(message["content"]) for prompt in load_prompts() for message in prompt.messages]
    turns = Turns.of(tokenizer)
    forced = [turns.start + ids(opener) for opener in OPENERS if opener]
    padded = np.zeros((len(forced), max(map(len, forced))), int)
    for row, opener in zip(padded, forced, strict=True):
        row[: len(opener)] = opener
    assert not rows_with(padded, contents).any()
    assert rows_with(np.array([contents[0][:20]]), contents).all()


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
    with pytest.raises(SpecdecError, match="no draft folder"):
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
    with pytest.raises(SpecdecError, match="no draft folder"):
        on_disk.write_draft(tmp_path / "mine", draft, note)
    with pytest.raises(SpecdecError, match="no draft folder"):
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
    with pytest.raises(SpecdecError, match="cannot bring owner/name from the hub"):
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


# -- refused before long work ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"device": "tpu9"}, "unknown device"),
        ({"target": "/no/such/folder"}, "no model folder"),
        ({"kind": "magic"}, "unknown kind of draft"),
        ({"kind": "tokenizer", "shortlist": 40}, "has at least 259 tokens"),
        ({"tokens": 0}, "tokens must be a whole number above 0"),
        ({"layers": 1.5}, "layers must be a whole number"),
        ({"budget": -1}, "budget must be a number above 0"),
        ({"width": 10, "heads": 2}, "multiple of 2 x 2 heads"),
        ({"length": 9999}, "rows of 9999 tokens"),
        ({"length": 8}, "rows of 8 tokens"),
        ({"max_new_tokens": 600}, "exceed the target's context of 512"),
        ({"prompts": "nowhere.jsonl"}, "no prompt file"),
        ({"dtype": "int3"}, "unknown dtype"),
    ],
)
def test_what_cannot_work_is_said_first(job, changes, message, tmp_path):
    with pytest.raises(SpecdecError, match=message):
        distill(job(**changes), Quiet())
    assert not (tmp_path / "work").exists() and not (tmp_path / "draft").exists()


def test_an_encoder_is_refused(job):
    with pytest.raises(SpecdecError, match="has an encoder"):
        distill(job("t5"), Quiet())


def test_too_little_disk_or_memory_is_said_with_the_estimate(job, monkeypatch):
    ready = recipe.prepare(job())
    disk, memory, _ = needs.needs(ready.job, ready.config, torch.device("cpu"))
    assert disk > 3 * ROWS * LENGTH * 46 * 4  # the labels alone
    large, _, _ = needs.needs(job(tokens=10_000_000), ready.config, torch.device("cpu"))
    assert large > 10_000_000 * 64 * 4
    with monkeypatch.context() as patch:
        patch.setattr(needs.shutil, "disk_usage", lambda place: type("", (), {"free": disk - 1}))
        with pytest.raises(SpecdecError, match=r"about \d+\.\d GB on the disk of .* are needed"):
            recipe.prepare(job())
    monkeypatch.setattr(needs.psutil, "virtual_memory", lambda: type("", (), {"available": memory - 1}))
    with pytest.raises(SpecdecError, match=r"about \d+\.\d GB of memory are needed"):
        recipe.prepare(job())


def test_text_of_another_target_seed_or_size_is_refused(finished, job, tiny_folder, tmp_path):
    whole, manifest, _ = finished
    other = tiny_folder("llama", seed=1)
    ours, theirs = manifest["target_hash"][:12], on_disk.target_hash(other)[:12]
    with pytest.raises(SpecdecError, match=f"{ours}.*{theirs}"):
        distill(job(target=str(other), work=whole.work), Quiet())
    with pytest.raises(SpecdecError, match="made with seed 0, not 3"):
        distill(job(work=whole.work, seed=3), Quiet())
    with pytest.raises(SpecdecError, match="made with rows 16, not 4"):
        distill(job(work=whole.work, rows=4), Quiet())
    with pytest.raises(SpecdecError, match="made with dtype"):
        distill(job(work=whole.work, dtype="float64"), Quiet())
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "text-00000.safetensors").write_bytes(b"")
    with pytest.raises(SpecdecError, match=r"holds text but no readable text\.json"):
        distill(job(work=tmp_path / "strange"), Quiet())
