"""The benchmark's prompts: the packaged ones are what they should be, and one door reads all sources."""

import json
import os
import socket
from collections import Counter

import pytest

from specdec_lib.bench.prompts import PACKAGED, Prompt, load_prompts
from specdec_lib.errors import SpecdecError
from specdec_lib.models import packaged

KINDS = ["chat", "mathematics", "question_answering", "retrieval", "summarisation", "translation"]


@pytest.fixture(scope="module")
def prompts():
    return load_prompts()


@pytest.fixture
def write(tmp_path):
    """`write(*lines, name="mine.jsonl")`: a file in a folder of its own; objects become JSON."""

    def write(*lines, name="mine.jsonl"):
        path = tmp_path / "prompts" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines), encoding="utf-8")
        return path

    return write


def text(prompt):
    return "\n".join(message["content"] for message in prompt.messages)


# -- the packaged prompts ------------------------------------------------------------------------------


def test_six_kinds_of_twenty_or_more(prompts):
    counts = Counter(prompt.kind for prompt in prompts)
    assert sorted(counts) == KINDS
    assert min(counts.values()) >= 20


def test_ids_and_texts_are_unique(prompts):
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    texts = [" ".join(text(prompt).lower().split()) for prompt in prompts]
    assert [(i, j) for i, a in enumerate(texts) for j, b in enumerate(texts) if i != j and a in b] == []


def test_each_file_holds_its_own_kind():
    for path in PACKAGED.glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [row["id"] for row in rows] == [f"{path.stem}-{n:03d}" for n in range(1, len(rows) + 1)]
        assert {row["kind"] for row in rows} == {path.stem}


def test_roles_alternate_and_only_chat_has_several_turns(prompts):
    for prompt in prompts:
        roles = [message["role"] for message in prompt.messages]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)]
        assert len(roles) in ((3, 5) if prompt.kind == "chat" else (1,)), prompt.id


def test_short_enough_for_the_packaged_target(prompts):
    if not packaged.is_complete(packaged.folder()):
        pytest.skip("the packaged target has not been fetched")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(packaged.folder())
    lengths = {}
    for prompt in prompts:
        rendered = tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
        lengths[prompt.id] = len(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    assert min(lengths.values()) > 20  # the template alone has about that many
    assert {name: length for name, length in lengths.items() if length > 400} == {}


# -- choosing ------------------------------------------------------------------------------------------


def test_limit_takes_as_many_of_each_kind_always_the_same_and_nested(prompts):
    few, more = load_prompts(limit=3), load_prompts(limit=8)
    assert Counter(prompt.kind for prompt in few) == dict.fromkeys(KINDS, 3)
    assert few == load_prompts(limit=3)
    assert few != load_prompts(limit=3, seed=1)
    assert {prompt.id for prompt in few} < {prompt.id for prompt in more}
    assert more == [prompt for prompt in prompts if prompt in more], "the order of the files is kept"
    assert load_prompts(limit=1000) == prompts


def test_kinds_do_not_change_which_prompts_a_limit_chooses():
    chosen = load_prompts(kinds=["retrieval", "chat"], limit=2)
    assert chosen == [prompt for prompt in load_prompts(limit=2) if prompt.kind in ("chat", "retrieval")]


def test_unknown_kind_and_no_limit():
    with pytest.raises(SpecdecError, match=f"unknown kind of prompt 'poetry': use one of {', '.join(KINDS)}"):
        load_prompts(kinds=["chat", "poetry"])
    with pytest.raises(SpecdecError, match="limit is 0: ask for at least 1"):
        load_prompts(limit=0)


# -- files and folders ---------------------------------------------------------------------------------


def test_a_file_may_mix_prompts_and_messages(write):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    path = write(
        {"prompt": "2024-05-01"},  # stays a text
        "",
        {"prompt": "a\u2028b", "kind": None, "id": 7, "note": [1]},  # a line separator of Unicode does not end a line
        {"messages": turns, "kind": "short", "note": "x"},
    )
    assert load_prompts(path) == [
        Prompt("mine-1", "mine", [{"role": "user", "content": "2024-05-01"}]),
        Prompt("7", "mine", [{"role": "user", "content": "a\u2028b"}]),
        Prompt("mine-4", "short", turns),
    ]
    assert load_prompts(str(path), kinds=["short"])[0].messages == turns


def test_a_folder_is_all_of_its_files(write):
    write({"question": "2?"}, name="b.jsonl")
    write({"question": "1?", "prompt": "not this one"}, name="a [1]*.jsonl")
    folder = write("no JSON", name="README.md").parent
    assert [(p.kind, text(p)) for p in load_prompts(folder, column="question")] == [("a [1]*", "1?"), ("b", "2?")]


def test_an_edited_file_is_read_anew_even_with_the_same_size_and_time(write):
    path = write({"prompt": "one"})
    before = path.stat()
    assert text(load_prompts(path)[0]) == "one"
    write({"prompt": "two"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert text(load_prompts(path)[0]) == "two"


def test_reading_files_is_quiet_leaves_nothing_and_asks_nobody(write, tmp_path, monkeypatch, capfd):
    import datasets
    import huggingface_hub

    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: asked.append(a) or [])
    for library in (datasets.config, huggingface_hub.constants):  # as for a user, not as for the other tests
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    datasets.enable_progress_bars()
    path = write({"prompt": "one"})
    load_prompts(path)
    assert asked == []
    assert list(tmp_path.rglob("*")) == [path.parent, path]
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled(), "the caller's setting is restored"


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": "x"', r"line 2: not JSON \(.*\): write one object a line"),
        ('"just a text"', r"line 2: not an object"),
        ({"text": "x", "kind": "k"}, r'line 2: neither "prompt" nor "messages" in this row, which has id, kind, text'),
        ({"prompt": None}, r'line 2: neither "prompt" nor "messages"'),
        ({"prompt": 5}, r"line 2: a prompt is a text or a list of messages"),
        ({"messages": ["x"]}, r"line 2: a prompt is a text or a list of messages"),
        ({"messages": [{"role": "poet", "content": "x"}]}, r"line 2: .* roles system, user, assistant"),
        ({"messages": [{"role": "user", "content": None}]}, r"line 2: the prompt is empty"),
        ({"prompt": " \n"}, r"line 2: the prompt is empty"),
        ({"messages": []}, r"line 2: the prompt is empty"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, r"line 2: the last message is the assistant's"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(write, line, message):
    with pytest.raises(SpecdecError, match=rf"mine\.jsonl, {message}") as error:
        load_prompts(write({"prompt": "fine"}, line))
    assert "\n" not in str(error.value)


def test_a_missing_column_is_named(write):
    with pytest.raises(SpecdecError, match=r'line 1: no "question" in this row, which has id, kind, prompt'):
        load_prompts(write({"prompt": "x"}), column="question")


def test_an_id_that_occurs_twice(write):
    with pytest.raises(SpecdecError, match="the id 'a' occurs twice"):
        load_prompts(write({"prompt": "x", "id": "a"}, {"prompt": "y", "id": "a"}))


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file(write, content):
    path = write()
    path.write_bytes(content)
    with pytest.raises(SpecdecError, match=r"the prompt file .*mine\.jsonl is empty"):
        load_prompts(path)


def test_bytes_that_are_not_text(write):
    path = write()
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(SpecdecError, match=r"cannot read .*mine\.jsonl \(.*\): save it as UTF-8 text"):
        load_prompts(path)


def test_what_is_not_there(tmp_path):
    for source in (tmp_path / "none", str(tmp_path / "none"), "none.jsonl", "./none"):
        with pytest.raises(SpecdecError, match=r"no prompt file .*none.*: check the path"):
            load_prompts(source)
    with pytest.raises(SpecdecError, match=r"no \.jsonl file in the folder"):
        load_prompts(tmp_path)


# -- data sets of the hub ------------------------------------------------------------------------------


def test_a_hub_data_set_goes_through_the_same_door(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **settings):
        asked.append((args, settings))
        return datasets.Dataset.from_list([{"id": 3, "article": "First."}, {"id": 3, "article": "Second."}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    loaded = load_prompts("someone/news:en", split="train[:2]", column="article")
    assert asked == [(("someone/news", "en"), {"split": "train[:2]"})]
    assert [(p.id, p.kind, text(p)) for p in loaded] == [("news-1", "news", "First."), ("news-2", "news", "Second.")]
    with pytest.raises(SpecdecError, match="someone/news, row 1: neither"):
        load_prompts("someone/news")
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: datasets.Dataset.from_list([]))
    with pytest.raises(SpecdecError, match="the split 'test' of the data set 'someone/news' is empty"):
        load_prompts("someone/news")


def test_a_hub_data_set_that_cannot_be_reached():
    with pytest.raises(
        SpecdecError, match=r"data set 'no-one/nothing' with the split 'test' .*load it once online"
    ) as e:
        load_prompts("no-one/nothing")
    assert "\n" not in str(e.value)


# -- known shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, kind, content",
    [
        ({"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]}, "writing", "One?"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, "mine", "Hi"),
        ({"custom_id": "a", "body": {"messages": [{"role": "user", "content": "Hi"}]}}, "mine", "Hi"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, "mine", "Hi"),
        ({"prompt": "a [/INST] b", "kind": "[/INST]"}, "[/INST]", "a [/INST] b"),
    ],
)
def test_known_shapes_are_read(write, row, kind, content):
    (prompt,) = load_prompts(write(row))
    assert (prompt.kind, prompt.messages) == (kind, [{"role": "user", "content": content}])
    assert prompt.id == str(row.get("question_id", row.get("custom_id", "mine-1")))


def test_text_lines_with_a_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes("\ufeffOne?\r\n\r\nTwo\u2028three?\r\n".encode())
    assert [p.messages[0]["content"] for p in load_prompts(path)] == ["One?", "Two\u2028three?"]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "One?"}\r\n\r\n{"prompt": "Two?"}\r\n')
    assert [p.id for p in load_prompts(path)] == ["rows-1", "rows-3"]


def test_half_a_character_is_refused_with_its_line(write):
    with pytest.raises(SpecdecError, match="line 2: the prompt has half a character"):
        load_prompts(write({"prompt": "hi"}, '{"prompt": "hi \\ud83d"}'))
