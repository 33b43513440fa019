"""Input in the shapes in which people have it: numbers of other libraries, prompts of all kinds, and what is none."""

import json

import numpy as np
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

import specdec_lib as sd
from specdec_lib import prompts
from specdec_lib.decode.draft_length import Confidence, Constant, DraftLengthPolicy, Fastest, Heuristic, as_policy
from specdec_lib.errors import SpecdecError
from specdec_lib.models.pair import resolve


@pytest.fixture(scope="module")
def pair():
    tokenizer = tiny_tokenizer("llama")
    return sd.Pair(tiny_model("llama", tokenizer, 0, {}), tiny_model("llama", tokenizer, 1, {}), tokenizer)


def refused(match):
    return pytest.raises(SpecdecError, match=match)


# -- ids -----------------------------------------------------------------------------------------------

IDS = [5, 9, 17]
ONE = [
    IDS,
    tuple(IDS),
    np.array(IDS),
    torch.tensor(IDS),
    [np.int64(i) for i in IDS],
    [torch.tensor(i) for i in IDS],
    [5, np.int32(9), 17],
]


@pytest.mark.parametrize("given", ONE)
def test_ids_of_every_library_are_one_prompt(pair, given):
    assert prompts.encode_all(pair, given) == [IDS] and pair.encode(given) == IDS
    assert all(type(i) is int for i in pair.encode(given))
    assert prompts.encode_all(pair, [given, given]) == [IDS, IDS]


@pytest.mark.parametrize("given", [np.array([IDS, IDS]), torch.tensor([IDS, IDS]), [np.array(IDS), torch.tensor(IDS)]])
def test_a_batch_of_ids(pair, given):
    assert prompts.encode_all(pair, given) == [IDS, IDS]


@pytest.mark.parametrize(
    "given, message",
    [
        (torch.tensor(5), "no prompt, got 5: give"),
        (np.array(5), "no prompt, got 5: give"),
        (5, "no prompt, got 5: give"),
        (torch.empty(0, 5, dtype=torch.long), "no prompt, got an empty one: give"),
        (np.zeros((0, 3), int), "no prompt, got an empty one"),
        (torch.zeros(2, 0, dtype=torch.long), "prompt 1 of 2: empty or unreadable prompt"),
        (torch.zeros(1, 2, 3, dtype=torch.long), "3 dimensions"),
        (torch.tensor([0.5, 1.0]), "prompt 1 of 2: empty or unreadable prompt, got 0.5"),
        ([5, "a"], "has 'a' among them"),
        ([5, True], "has True among them"),
        ([5, -1], "token id -1 in the prompt is outside"),
        ([], "no prompt, got an empty one"),
        (None, "no prompt, got None"),
        (str, "no prompt, got the class str"),
        ({"input_ids": [5]}, r'give its \["input_ids"\]'),
        (["hi", None], "prompt 2 of 2: empty or unreadable prompt, got None"),
    ],
)
def test_what_is_no_prompt_is_refused_in_one_line(pair, given, message):
    with refused(message) as caught:
        prompts.encode_all(pair, given)
    assert "\n" not in str(caught.value)


# -- texts and messages --------------------------------------------------------------------------------


def test_text_parts_of_a_message_are_joined(pair):
    parts = [{"type": "text", "text": "hi "}, {"type": "text", "text": "you"}]
    assert pair.encode([{"role": "user", "content": parts}]) == pair.encode("hi you")


@pytest.mark.parametrize(
    "messages, message",
    [
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "chat message 1 has a part of type 'image'"),
        ([{"role": "user", "content": ["hi"]}], "chat message 1 has a part of type 'str'"),
        ([{"content": "hi"}], "chat message 1 has no role"),
        ([{"role": "user", "content": "hi"}, "more"], "chat message 2 is 'more'"),
        ([{"role": "user", "content": 5}], "chat message 1 has 5 as its content"),
        ([{"role": "user", "content": "hi \ud83d"}], r"chat message 1 has half a character \(U\+D83D at position 3\)"),
        ([{"role": "user", "content": []}], "empty prompt"),
        ("hi \ud83d", "the prompt has half a character"),
        (["hi", "hi \ud83d"], "prompt 2 of 2: the prompt has half a character"),
    ],
)
def test_messages_and_texts_that_cannot_be_read(pair, messages, message):
    with refused(message):
        prompts.encode_all(pair, messages)


def test_whole_emoji_are_read(pair):
    assert pair.encode("hi \U0001f600")


def test_a_template_that_refuses_is_one_line(pair):
    tokenizer = tiny_tokenizer("llama")
    tokenizer.chat_template = "{{ raise_exception('only users\\nmay speak') }}"
    with refused(r"chat template cannot write these messages \(only users\): change their roles \(system, user\)"):
        sd.Pair(pair.target, None, tokenizer).encode(
            [{"role": "system", "content": "hi"}, {"role": "user", "content": "hi"}]
        )
    tokenizer.chat_template = "{{ messages[0]['role']['x']['y'] }}"
    with refused("chat template cannot write"):
        sd.Pair(pair.target, None, tokenizer).encode("hi")


# -- draft lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("three", [3, np.int64(3), np.array(3), torch.tensor(3)])
def test_draft_lengths_of_every_library(three):
    found = [as_policy(three).gamma, Constant(three).gamma, Heuristic(three).first, Fastest(three, three).longest]
    found.append(Confidence(np.float32(0.5), three).longest)
    assert found == [3] * 5 and all(type(n) is int for n in found)
    assert type(Confidence(np.float32(0.5)).threshold) is float


class Policy(DraftLengthPolicy):
    """A policy of somebody's own."""

    def start(self):
        return Constant(2).start()


@pytest.mark.parametrize(
    "gamma, message",
    [
        (Heuristic, r"gamma is the class Heuristic: make one of it, Heuristic\(\)"),
        (sd.PromptLookupDrafter(), "gamma is a drafter, PromptLookupDrafter: give it as the pair's draft"),
        (
            lambda: sd.ModelDrafter(tiny_model("gpt2", tiny_tokenizer("gpt2"), 0, {})),
            "gamma is a drafter, ModelDrafter",
        ),
        (2.0, "gamma must be a whole number >= 1, got 2.0"),
        ("3", "gamma must be a whole number >= 1, got '3'"),
        ([3], r"gamma must be a whole number >= 1, got \[3\]"),
    ],
)
def test_what_is_no_draft_length(gamma, message):
    gamma = gamma() if getattr(gamma, "__name__", "") == "<lambda>" else gamma
    with refused(message):
        as_policy(gamma)


def test_a_policy_of_ones_own_is_taken():
    policy = Policy()
    assert as_policy(policy) is policy and policy.confidence == 0


# -- places --------------------------------------------------------------------------------------------


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({}))
    assert resolve("~/m") == str(tmp_path / "m")
    with refused("there is no model folder ~/none: give an existing folder"):
        resolve("~/none")


def test_a_name_that_can_be_no_hub_id_is_refused_before_any_network(monkeypatch):
    import socket

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("went to the network"))
    with refused("there is no model 'smal': use 'packaged', a folder, or a hub id such as owner/name"):
        resolve("smal")
    with refused("no model folder"):
        resolve(r"C:\models\mine")
    assert resolve("owner/name") == "owner/name"


# -- drafts by name ------------------------------------------------------------------------------------


def test_an_unknown_draft_is_refused_with_what_there_is(tmp_path):
    from specdec_lib.audit.command import load_engine
    from specdec_lib.load import check_draft, draft_source, resolve_draft

    for door in (draft_source, resolve_draft, lambda name: load_engine("transformers", "packaged", name, 3, 1.0)):
        with refused("there is no draft 'smal': use one of lookup, .*small.*, a folder, or owner/name"):
            door("smal")
    with refused("there is no draft 'lookup"):
        load_engine("transformers", "packaged", "lookup+small", 3, 1.0)
    with refused("class PromptLookupDrafter: make one"):
        check_draft(sd.PromptLookupDrafter)
    with refused("a policy for the draft length, Heuristic: give it as gamma"):
        check_draft(Heuristic())


# -- the shell -----------------------------------------------------------------------------------------


def test_the_shells_console_shows_markup_as_it_is_written(capsys):
    from rich.table import Table

    from specdec_lib.console import shell_console

    table = Table("kind [/INST]", title="[bold]x[/INST]")
    table.add_row("[/INST] :smile:")
    for shown in ("[/INST] :smile:", table):
        shell_console().print(shown, style="bold")
    out = capsys.readouterr().out
    assert out.count("[/INST]") == 4 and out.count(":smile:") == 2


def test_a_character_that_the_code_page_lacks_is_replaced():
    import os
    import subprocess
    import sys

    code = "from specdec_lib.console import *; tolerate_code_pages(); shell_console().print('hi \\U0001f600 \\ud83d')"
    env = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    assert done.returncode == 0 and done.stdout.strip() == b"hi ? ?"


@pytest.mark.parametrize("damage", ["absent", "damaged", "another"])
def test_a_draft_whose_tokens_are_unknown_is_refused_by_every_door(damage, tmp_path, tiny_folder):
    import shutil

    from specdec_lib.audit.command import load_engine
    from specdec_lib.bench.contest import load_contest

    target, draft = str(tiny_folder("llama")), str(shutil.copytree(tiny_folder("llama", 1), tmp_path / "draft"))
    file = tmp_path / "draft" / "tokenizer.json"
    if damage == "another":
        text = json.loads(file.read_text())
        vocabulary = text["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        file.write_text(json.dumps(text))
    elif damage == "damaged":
        file.write_text(file.read_text()[:200])
    else:
        for path in [*tmp_path.glob("draft/tokenizer*"), *tmp_path.glob("draft/special*")]:
            path.unlink()
    message = "another vocabulary" if damage == "another" else "nobody knows what its tokens are"
    for door in (
        lambda: sd.load_pair(target, draft, device="cpu"),
        lambda: load_contest(target, draft, device="cpu"),
        lambda: load_engine("transformers", target, draft, 3, 1.0),
    ):
        with refused(message):
            door()


def test_no_verdict_on_the_time_of_nothing(tiny_folder, capsys):
    from specdec_lib.report.attempt import attempt

    attempt("hi", str(tiny_folder("llama")), "lookup", 3, 0, 0.0, None, None, 0)
    out = capsys.readouterr().out
    assert "no token was decoded, so there is nothing to time" in out and "times as fast" not in out
