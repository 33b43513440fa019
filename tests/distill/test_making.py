"""Making a draft from a tiny target: every step, interrupted and resumed, and what is refused."""

import dataclasses
import json
import logging
import os
import shutil
import signal
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_job import LENGTH, ROWS, Quiet
from typer.testing import CliRunner

import specdec_lib as sd
from specdec_lib.distill import needs, recipe
from specdec_lib.distill import ngram as table
from specdec_lib.distill.folder import TextFolder
from specdec_lib.distill.recipe import distill
from specdec_lib.distill.table import embedding_table
from specdec_lib.distill.text import OPENERS, Turns, write_shard
from specdec_lib.distill.tokenizer import OwnText, make_tokenizer
from specdec_lib.distill.train import Text, answer_positions
from specdec_lib.distill.unseen import rows_with, split
from specdec_lib.drafters import NGramDrafter, on_disk
from specdec_lib.errors import SpecdecError
from specdec_lib.files import held
from specdec_lib.models import load_tokenizer, load_transformers


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
    shutil.copytree(whole.work, part.work, ignore=shutil.ignore_patterns("runs"))
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


def test_the_command(tmp_path, monkeypatch):
    from typer import Typer

    from specdec_lib.distill.command import distill as command

    app = Typer()
    app.command()(command)
    runner = CliRunner()
    result = runner.invoke(app, [str(tmp_path / "x"), "--heads", "3"])
    assert isinstance(result.exception, SpecdecError) and "multiple of 2 x 3 heads" in str(result.exception)
    monkeypatch.setattr(recipe, "prepare", lambda job: os.kill(os.getpid(), signal.SIGTERM))
    result = runner.invoke(app, [str(tmp_path / "x")])
    assert result.exit_code == 143 and "the same command goes on from here" in result.stderr
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


THINKS = (  # as DeepSeek-R1 and Qwen3: what opens a thought is the generation prompt's, an empty one the history's
    "{% for message in messages %}{{ message['role'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}HISTORY{% endif %}{{ message['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant PROMPT' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("history", "prompt"), [("", "<think>\\n"), ("<think>\\n\\n</think>\\n\\n", ""), ("", ""), ("so: ", "so: well, ")]
)
def test_an_answer_begins_where_generation_begins(tiny_folder, history, prompt):
    """The header is all that the generation prompt says, and a prompt as the bench encodes it ends in it."""
    from specdec_lib.bench.prompts import Prompt
    from specdec_lib.distill.evaluate import encode

    tokenizer = load_tokenizer(tiny_folder("llama"))
    tokenizer.chat_template = THINKS.replace("HISTORY", history).replace("PROMPT", prompt)
    turns = Turns.of(tokenizer)
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    assert turns.header == ids("assistant " + prompt.replace("\\n", "\n"))
    assert turns.to_assistant == [0, *turns.header] and turns.to_user == ids("<eos>user ") and turns.ends == [0]
    prompted = encode(tokenizer, Prompt("1", "x", [{"role": "user", "content": "why?"}]))
    assert prompted == [*turns.start, *ids("why?"), *turns.to_assistant]
    said = torch.tensor([[*prompted, *ids("yes<eos>")]])
    assert answer_positions(said, turns.header, turns.ends)[0].nonzero()[:, 0].tolist() == [
        len(prompted) - 1 + i
        for i in range(len("yes") + 1)  # and the end
    ]


def test_a_template_without_a_generation_prompt_and_one_that_refuses(tiny_folder):
    tokenizer = load_tokenizer(tiny_folder("llama"))
    usual = Turns.of(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("add_generation_prompt", "false")
    assert Turns.of(tokenizer) == usual
    for template in ("{{ raise_exception('one turn only') }}", "{{ messages[0]['content'] }}"):
        tokenizer.chat_template = template
        with pytest.raises(SpecdecError, match="cannot tell the turns") as caught:
            Turns.of(tokenizer)
        assert "\n" not in str(caught.value)


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


# -- who else is at work ----------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"out": "elsewhere"}, {"prompts": "other"}, {"budget": 5.0}, {"seed": 1}])
def test_another_job_has_another_run_folder(job, tmp_path, prompts, changes):
    (tmp_path / "other.jsonl").write_text('{"prompt": "another", "kind": "a"}\n')
    changes = {"out": tmp_path / "elsewhere"} if "out" in changes else changes
    changes = {"prompts": tmp_path / "other.jsonl"} if "prompts" in changes else changes
    run = recipe.prepare(job()).run
    assert recipe.prepare(job()).run == run != recipe.prepare(job(**changes)).run
    copied = tmp_path / "copied.jsonl"
    shutil.copy(prompts, copied)
    assert recipe.prepare(job(prompts=copied, every=3.0)).run == run  # the same rows, wherever they are kept


def test_a_run_that_is_going_on_is_refused_and_told_who_runs(job):
    part = job()
    told = f"run folder .* is in use by process {os.getpid()} on .*: wait"
    with held(recipe.prepare(part).run, "the run folder"), pytest.raises(SpecdecError, match=told) as caught:
        distill(part, Quiet())
    assert "\n" not in str(caught.value) and not list(part.work.glob("text-*"))


def test_who_waits_for_the_text_says_so_and_keeps_what_the_other_noted(job):
    """The note is read again once the folder is free: seconds of the other's shards are not lost."""
    part, ready = job(), None
    ready = recipe.prepare(part)
    other = recipe.prepare(part)
    waiting, told = threading.Event(), []

    def wait(line):
        told.append(line)
        waiting.set()

    with held(part.work, "the text folder"):
        model, tokenizer = ready.folder, ready.tokenizer
        thread = threading.Thread(target=lambda: ready.text.write(model, tokenizer, 2, "cpu", say=wait))
        thread.start()
        assert waiting.wait(60)
        other.text.note["seconds"]["9"] = 5.0
        other.text.claim()
    thread.join()
    assert f"the text folder {part.work} is in use by process {os.getpid()}" in told[0] and "waiting" in told[0]
    assert set(json.loads((part.work / "text.json").read_text())["seconds"]) == {"0", "1", "9"}


def test_the_callers_random_numbers_are_left_alone(job, monkeypatch):
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("seeds every device, also those in use"))
    torch.default_generator.manual_seed(5)
    state = torch.get_rng_state()
    distill(job(passes=1), Quiet())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma"])
@pytest.mark.parametrize("how", ["one file", "shards", "without the head", "another name"])
def test_the_embedding_table_is_read_without_the_model(tiny_folder, tmp_path, monkeypatch, kind, how):
    model = load_transformers(tiny_folder(kind), device="cpu")
    expected = model.get_input_embeddings().weight.detach()
    (model if how != "without the head" else model.base_model).save_pretrained(
        tmp_path, max_shard_size="20KB" if how == "shards" else "5GB"
    )
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (how == "shards")
    if how == "another name":  # nothing is found by its name: the model is loaded, as the model's class knows how
        tensors = load_file(tmp_path / "model.safetensors")
        save_file({f"odd.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        monkeypatch.setattr("specdec_lib.distill.table.load_transformers", lambda *_: model)
    else:
        monkeypatch.setattr("specdec_lib.distill.table.load_transformers", lambda *_: pytest.fail("loaded whole"))
    found = embedding_table(tmp_path)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


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


# -- refused before long work ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"device": "tpu9"}, "unknown device"),
        ({"target": "/no/such/folder"}, "no model folder"),
        ({"kind": "magic"}, "unknown kind of draft"),
        ({"kind": "tokenizer", "shortlist": 40}, "has at least 259 tokens"),
        ({"tokens": 0}, "tokens must be a whole number >= 1"),
        ({"layers": 1.5}, "layers must be a whole number"),
        ({"budget": -1}, "budget must be a number > 0"),
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
