"""The benchmark's prompts: the packaged six kinds, a user's own JSONL or a data set of the hub, by one door.

A row is an object with `messages` (a conversation whose last turn is the user's) or `prompt` (one user turn), and
with `id` and `kind` if it likes.  `data/prompts/README.md` describes the packaged ones.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecdecError
from ..paths import PROMPTS
from ..prompts import as_messages, check_text

PACKAGED = PROMPTS
ROLES = ("system", "user", "assistant")
SPEAKERS = {"human": "user", "gpt": "assistant"}  # ShareGPT's names


@dataclass(frozen=True)
class Prompt:
    """One conversation that waits for its next assistant turn.

    Attributes:
        id: unique among the prompts loaded with it.
        kind: what is asked for, such as `chat`; results are reported by it.
        messages: `[{"role": "user", "content": ...}, ...]`, as chat templates take them; the last role is `user`.
    """

    id: str
    kind: str
    messages: list[dict[str, str]]


def load_prompts(
    source: str | Path | None = None,
    kinds: Sequence[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
    split: str = "test",
    column: str | None = None,
) -> list[Prompt]:
    """Prompts in the order of their source; everything is checked before the first one is returned.

    Args:
        source: None for the packaged ones; a .jsonl file; a folder of them; or a data set of the hub, as `name` or
            `name:config` (downloaded when first used, from the local cache afterwards).
        kinds: keep these kinds, None keeps all.  A row without a kind has the name of its file or data set.
        limit: at most so many prompts *of each kind*, chosen by `seed`; a smaller limit chooses among those that a
            larger one chooses.
        seed: of that choice.
        split: of a hub data set, for example `test` or `test[:100]`; files have none.
        column: where the prompt is, text or messages, `a.b` for `b` inside `a`; None looks for `messages`, then
            `prompt`.

    Raises:
        SpecdecError: no such file or data set, nothing in it, a row that cannot be used (with its line), an id that
            occurs twice, an unknown kind, a limit below 1.

    >>> [p.id for p in load_prompts(kinds=["mathematics"])][:2]
    ['mathematics-001', 'mathematics-002']
    >>> len(load_prompts(limit=2))  # two of each of the six kinds
    12
    """
    if limit is not None and limit < 1:
        raise SpecdecError(f"limit is {limit}: ask for at least 1 prompt of each kind")
    prompts = [_prompt(where, row, column) for where, row in _rows(source, split)]
    _refuse_repeated_ids(prompts)
    if kinds:
        there = dict.fromkeys(prompt.kind for prompt in prompts)
        for kind in kinds:
            if kind not in there:
                raise SpecdecError(f"unknown kind of prompt {kind!r}: use one of {', '.join(there)}")
        prompts = [prompt for prompt in prompts if prompt.kind in kinds]
    return prompts if limit is None else _choose(prompts, limit, seed)


def _choose(prompts: list[Prompt], limit: int, seed: int) -> list[Prompt]:
    """The first `limit` of each kind after a shuffle that depends on the seed and the kind alone."""
    chosen = []
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        group = [index for index, prompt in enumerate(prompts) if prompt.kind == kind]
        random.Random(f"{seed} {kind}").shuffle(group)
        chosen += group[:limit]
    return [prompts[index] for index in sorted(chosen)]


def _refuse_repeated_ids(prompts: list[Prompt]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise SpecdecError(f'the id {prompt.id!r} occurs twice: give each prompt its own "id", or none')
        seen.add(prompt.id)


# -- one row -------------------------------------------------------------------------------------------


def _prompt(where: str, row: dict[str, Any], column: str | None) -> Prompt:
    """The row as a prompt; `where` names it in errors."""
    content = _value(row, column) if column else _content(row)
    if isinstance(content, str):
        check_text(f"{where}: the prompt", content)
    if content is None:
        wanted = f'no "{column}"' if column else 'neither "prompt" nor "messages"'
        raise SpecdecError(f"{where}: {wanted} in this row, which has {', '.join(row)}: add it or name the column")
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        try:
            messages = as_messages(messages)
        except SpecdecError as error:
            raise SpecdecError(f"{where}: {error}") from None
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise SpecdecError(
            f"{where}: a prompt is a text or a list of messages: "
            f'write {{"role": ..., "content": "..."}} with one of the roles {", ".join(ROLES)}'
        )
    if not messages or not all(message["content"].strip() for message in messages):
        raise SpecdecError(f"{where}: the prompt is empty: write its text or delete the row")
    if messages[-1]["role"] != "user":
        raise SpecdecError(f"{where}: the last message is the {messages[-1]['role']}'s: end with one of the user's")
    turns = [{"role": message["role"], "content": message["content"]} for message in messages]
    return Prompt(str(row["id"]), str(row["kind"]), turns)


def _content(row: dict[str, Any]) -> Any:
    """Where known shapes keep a prompt: a text or messages; None for none of them.

    Ours (`messages`, `prompt`), Spec-Bench and MT-bench (`turns`, of which the first is asked), ShareGPT
    (`conversations`, up to the last human turn), OpenAI's batches (`body`).

    >>> _content({"turns": ["One?", "Two?"]}), _content({"body": {"messages": [{"role": "user", "content": "Hi"}]}})
    ('One?', [{'role': 'user', 'content': 'Hi'}])
    >>> _content({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]})
    [{'role': 'user', 'content': 'Hi'}]
    """
    for name in ("messages", "prompt"):
        if row.get(name) is not None:
            return row[name]
    if isinstance(row.get("turns"), list) and row["turns"]:
        return row["turns"][0]
    if isinstance(row.get("body"), dict):
        return _content(row["body"])
    said = row.get("conversations", row.get("conversation"))
    if not isinstance(said, list) or not all(isinstance(turn, dict) for turn in said):
        return None
    turns = [{"role": SPEAKERS.get(t.get("from"), t.get("from")), "content": t.get("value")} for t in said]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return turns


def _value(row: dict[str, Any], column: str) -> Any:
    """`row[column]`, or what `a.b` leads to; None where there is nothing.

    >>> _value({"translation": {"en": "a house"}}, "translation.en")
    'a house'
    """
    if column in row:
        return row[column]
    first, _, rest = column.partition(".")
    return _value(row[first], rest) if rest and isinstance(row.get(first), dict) else None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)


def _with_defaults(row: dict[str, Any], name: str, number: int) -> dict[str, Any]:
    """The row without its empty fields, called `name-number` and of the kind `name` unless it says otherwise."""
    return {"id": f"{name}-{number}", "kind": name} | _named(row)


def _named(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row, with the names that Spec-Bench and OpenAI give to `id` and `kind`."""
    given = {key: value for key, value in row.items() if value is not None}
    for ours, names in {"id": ("question_id", "custom_id"), "kind": ("category",)}.items():
        found = next((given[name] for name in names if name in given), None)
        if ours not in given and found is not None:
            given[ours] = found
    return given


# -- where rows come from ------------------------------------------------------------------------------


def _rows(source: str | Path | None, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """`(where, row)` for every row of the source."""
    path = PACKAGED if source is None else Path(source).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise SpecdecError(f"no .jsonl file in the folder {path}: put one there, an object with a prompt a line")
        for file in files:
            yield from _file_rows(file)
    elif path.is_file():
        yield from _file_rows(path)
    elif isinstance(source, str) and _may_be_a_hub_name(source):
        yield from _hub_rows(source, split)
    else:
        raise SpecdecError(f"no prompt file {path}: check the path")


def _may_be_a_hub_name(source: str) -> bool:
    return not (source.endswith((".jsonl", ".json", ".txt")) or source.startswith((".", "~")) or os.path.isabs(source))


def _file_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a JSONL file, or of a text file with a prompt on each line."""
    empty = True
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        empty = False
        where = f"{path}, line {number}"
        if path.suffix == ".txt":
            yield where, _with_defaults({"prompt": line.strip()}, path.stem, number)
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SpecdecError(f"{where}: not JSON ({error.msg}): write one object a line") from None
        if not isinstance(row, dict):
            raise SpecdecError(f'{where}: not an object: write {{"prompt": "..."}}')
        yield where, _with_defaults(row, path.stem, number)
    if empty:
        raise SpecdecError(f"the prompt file {path} is empty: write one object with a prompt a line")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")  # a line may hold any other separator of Unicode
    except (OSError, UnicodeDecodeError) as error:
        raise SpecdecError(f"cannot read {path} ({error}): save it as UTF-8 text") from None


def _hub_rows(source: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    name, _, config = source.partition(":")
    with _quiet_datasets() as datasets:
        try:
            table = datasets.load_dataset(name, config or None, split=split)
        except Exception as error:  # from five libraries, and every one means that there is no data set
            reason = (str(error).splitlines() or [""])[0].rstrip(".")
            raise SpecdecError(
                f"neither a file nor a data set {source!r} with the split {split!r} "
                f"({type(error).__name__}: {reason}): check the names, load it once online, or give a .jsonl file"
            ) from None
    if not len(table):
        raise SpecdecError(f"the split {split!r} of the data set {source!r} is empty: choose another")
    for number, row in enumerate(table, start=1):
        # Rows are called by their number: ids of data sets need not be unique, and the user cannot mend them.
        yield f"{source}, row {number}", _with_defaults({**row, "id": None}, name.split("/")[-1], number)


@contextmanager
def _quiet_datasets() -> Iterator[Any]:
    """The module `datasets` without progress bars; what the caller had set is restored."""
    import datasets
    import huggingface_hub.utils

    shown: list[Any] = [lib for lib in (datasets, huggingface_hub.utils) if not lib.are_progress_bars_disabled()]
    for library in shown:
        library.disable_progress_bars()
    try:
        yield datasets
    finally:
        for library in shown:
            library.enable_progress_bars()
