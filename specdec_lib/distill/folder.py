"""The folder of one target's text: who wrote it, which shards are there, and the writing of those that are not."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..errors import SpecdecError
from ..files import held, write_json
from ..models.fast import PackedLinear
from ..models.pair import load_model
from ..models.session import open_session
from .text import write_shard
from .unseen import split

log = logging.getLogger(__name__)

NOTE = "text.json"
TEXT = "the text folder"  # in messages


class TextFolder:
    """Shards `text-00000.safetensors`, ... of one target, seed and size, and a note that says so.

    Args:
        path: the folder; it need not exist.
        target_hash, seed, rows, length: of what is to be there.
        dtype: in which the target computes, such as `"bfloat16"`; None takes the folder's, or else `default`.
        default: see `dtype`.

    Raises:
        SpecdecError: the folder holds the text of another target, seed or size.
    """

    def __init__(
        self, path: Path, target_hash: str, seed: int, rows: int, length: int, dtype: str | None, default: str
    ):
        self.path, self.rows, self.length = path, rows, length
        self.wanted: dict[str, Any] = {"target_hash": target_hash, "seed": seed, "rows": rows, "length": length}
        self.dtype, self.default = dtype, default
        self.note = self.read()

    def read(self) -> dict[str, Any]:
        """The note of the folder, or a new one; refused where it is of another text than what is wanted."""
        path, wanted = self.path, self.wanted
        try:
            note = json.loads((path / NOTE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            if any(path.glob("text-*.safetensors")):
                raise SpecdecError(f"{path} holds text but no readable {NOTE}: name another work folder") from None
            note = {**wanted, "dtype": self.dtype or self.default, "seconds": {}}
        if note["target_hash"] != wanted["target_hash"]:
            raise SpecdecError(
                f"the text in {path} is by the target {note['target_hash'][:12]}, this one is "
                f"{wanted['target_hash'][:12]}: name another work folder"
            )
        for name, value in {**wanted, "dtype": self.dtype or note["dtype"]}.items():
            if note[name] != value:
                raise SpecdecError(
                    f"the text in {path} was made with {name} {note[name]}, not {value}: name another work folder"
                )
        return note

    @property
    def seconds(self) -> float:
        """How long the writing of the shards took, as far as it is noted."""
        return sum(self.note["seconds"].values())

    def claim(self) -> None:
        """Make the folder and write the note."""
        self.path.mkdir(parents=True, exist_ok=True)
        part = self.path / f"{NOTE}.part"
        write_json(part, self.note)
        part.replace(self.path / NOTE)

    def shard(self, index: int) -> Path:
        return self.path / f"text-{index:05d}.safetensors"

    def shards_for(self, tokens: int) -> int:
        """How many shards hold `tokens` tokens to train on, held-out ones not counted.

        At least two: one to train on and one to measure on.
        """
        wanted = max(math.ceil(tokens / (self.rows * self.length)), 1)
        count = wanted + 1
        while len(split(map(self.shard, range(count)))[0]) < wanted:
            count += 1
        return count

    def is_there(self, index: int) -> bool:
        """Whether a shard is there and whole, as far as its header and size tell."""
        path = self.shard(index)
        if not path.exists():
            return False
        try:
            with safe_open(path, "pt") as shard:
                return shard.get_slice("tokens").get_shape() == [self.rows, self.length]
        except Exception as error:  # a shard that cannot be opened is written again
            log.warning("the shard %s cannot be used (%s): writing it again", path.name, error)
            return False

    def missing(self, count: int) -> list[int]:
        return [index for index in range(count) if not self.is_there(index)]

    def write(
        self,
        target: str,
        tokenizer: Any,
        count: int,
        device: str,
        seconds: float = math.inf,
        tick: Callable[[float], object] = lambda share: None,
        trust_remote_code: bool = False,
        say: Callable[[str], object] = log.warning,
    ) -> list[Path]:
        """Write what is missing of the first `count` shards; returns the paths of those that are there.

        Args:
            target: its name or folder.
            tokenizer: the target's.
            count: see `shards_for`.
            device: such as `"cpu"`.
            seconds: no further shard is begun when the folder's shards took this long in all, but two are made.
            tick: called with the share that is done.
            trust_remote_code: as in `load_pair`.
            say: is told whom this waits for, where another process writes to the folder.
        """
        with held(self.path, TEXT, say):
            self.note = self.read()  # another process may have written since
            self.claim()
            missing = self.missing(count)
            model = self._load(target, device, trust_remote_code) if missing else None
            for number, index in enumerate(missing):
                if index > 1 and self.seconds >= seconds:
                    break
                start = time.monotonic()
                done = (count - len(missing) + number) / count
                write_shard(
                    open_session(model, self.rows, self.length),
                    tokenizer,
                    self.shard(index),
                    self.note["seed"],
                    index,
                    self.rows,
                    self.length,
                    tick=lambda t, done=done: tick(done + (t + 1) / self.length / count),  # type: ignore[misc]
                )
                self.note["seconds"][str(index)] = round(time.monotonic() - start, 3)
                self.claim()
        return [self.shard(index) for index in range(count) if self.shard(index).exists()]

    def _load(self, target: str, device: str, trust_remote_code: bool) -> Any:
        """The target with its weights laid out for `rows` rows at a time."""
        usual, PackedLinear.ROWS = PackedLinear.ROWS, self.rows
        try:
            return load_model(target, device, self.note["dtype"], trust_remote_code=trust_remote_code)
        finally:
            PackedLinear.ROWS = usual
