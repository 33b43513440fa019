"""Sessions and batches of an encoder-decoder, the paper's own kind of model: T5, BART and their like.

To the loops it looks like any other model that is fed a text and rolled back.  The text is

    source, start marker, output

and `Pair.encode` writes the first two.  The marker is the id one past the vocabulary, so no source, no model and no
drafter can write it; the decoder reads it as its start token.  The encoder runs once, when the source is fed; its
output and the keys and values that the decoder makes of it stay until the source changes.  Logits follow the marker
and the output only.  Logits processors and stopping criteria are shown what transformers shows them: the start token
and the output (`DecoderView`).

What is relied on, pinned by `tests/test_seq2seq.py`: `EncoderDecoderCache` crops the decoder's part alone, and the
model takes `encoder_outputs` in place of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SpecdecError
from .batch import Columns, last_of, padded
from .pair import start_marker, vocabulary_size
from .session import _check_rollback, cache_keyword, class_name, device_of, uncompiled


def start_token(model: Any) -> int:
    """What the decoder reads before the output."""
    token = model.config.decoder_start_token_id
    if token is None:
        raise SpecdecError(f"{class_name(model)} names no decoder_start_token_id: set it in the model's config.json")
    return token


def new_cache(of_outputs: Any = None) -> Any:
    """An empty cache; of the outputs, `of_outputs` if given: what was made of the sources is forgotten."""
    from transformers import DynamicCache, EncoderDecoderCache

    # without a config the caches grow a layer at a time: some configs count the encoder's layers
    return EncoderDecoderCache(DynamicCache() if of_outputs is None else of_outputs, DynamicCache())


class EncoderDecoderSession:
    """A session on a transformers encoder-decoder; `length` counts the source, the marker and the output.

    Args:
        model: for example a `T5ForConditionalGeneration`.
        batch: rows; the sources of all are equally long.
    """

    def __init__(self, model: Any, batch: int = 1):
        self.model = model
        self.marker = start_marker(model)
        self.start_token = start_token(model)
        self._keyword = cache_keyword(uncompiled(model).forward) or "past_key_values"
        self._source = torch.empty(batch, 0, dtype=torch.long, device=device_of(model))
        self._encode()

    def _encode(self) -> None:
        """Read the whole source; nothing of the output is left."""
        self.cache = new_cache()
        self._encoded = self.model.get_encoder()(input_ids=self._source) if self._source.shape[1] else None

    @property
    def length(self) -> int:
        return self._source.shape[1] + self.cache.get_seq_length()

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @torch.inference_mode()
    def feed(self, ids: torch.Tensor, last: int = 1) -> torch.Tensor:
        if not self.cache.get_seq_length():
            ids = self._take_source(ids)
        n = ids.shape[1]
        if last > n:
            raise ValueError(f"logits of {last} positions were asked for, but only {n} of those fed follow the source")
        if not n:
            return torch.empty(len(ids), 0, vocabulary_size(self.model), device=self.device, dtype=self.model.dtype)
        if self._encoded is None:
            raise ValueError("the output begins, but no source was fed")
        out = self.model(
            encoder_outputs=self._encoded, decoder_input_ids=ids, use_cache=True, **{self._keyword: self.cache}
        )
        return out.logits[:, n - last :]

    def _take_source(self, ids: torch.Tensor) -> torch.Tensor:
        """Keep what belongs to the source and encode it; the rest, its marker replaced by the start token."""
        started = (ids[0] == self.marker).nonzero()
        end = int(started[0]) if len(started) else ids.shape[1]
        if end:
            self._source = torch.cat([self._source, ids[:, :end]], dim=1)
            self._encode()
        return ids[:, end:].masked_fill(ids[:, end:] == self.marker, self.start_token)

    @torch.inference_mode()
    def rollback(self, length: int) -> None:
        _check_rollback(length, self.length)
        source = self._source.shape[1]
        if length < source:
            self._source = self._source[:, :length]
            self._encode()
        elif length < self.length:
            self.cache.crop(length - self.length)


# What counts a decoder's positions by the distance of cache columns.
RELATIVE = ("t5", "mt5", "umt5")


class EncoderDecoderBatch:
    """Rows of a T5: sources of different length, padded on the right and masked, and outputs in aligned columns.

    Refused by name are models that number the positions of the output from the cache's first column, which is not
    the first of every row, and models where rows depend on each other (a router with a capacity).
    """

    def __init__(self, model: Any, rows: int):
        if model.config.model_type not in RELATIVE:
            raise SpecdecError(
                f"{class_name(model)} cannot decode rows of different length together (only {', '.join(RELATIVE)} can, "
                "of encoder-decoders): leave out batch_size or drafts"
            )
        self.model = model
        self.marker, self.start_token = start_marker(model), start_token(model)
        self.cache = new_cache()
        self.columns = Columns(rows)
        self._keyword = cache_keyword(uncompiled(model).forward) or "past_key_values"
        self._sources: list[list[int]] = [[] for _ in range(rows)]
        self._encoded: torch.Tensor | None = None  # [batch, longest source, width], None when sources have changed
        self._real = torch.empty(rows, 0, dtype=torch.long, device=device_of(model))  # the mask of the sources

    @property
    def lengths(self) -> list[int]:
        return [len(source) + held for source, held in zip(self._sources, self.columns.lengths, strict=True)]

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @torch.inference_mode()
    def feed(self, rows: Sequence[list[int]], last: Sequence[int]) -> list[torch.Tensor]:
        outputs = [self._take_source(i, row) for i, row in enumerate(rows)]
        if any(k > len(output) for k, output in zip(last, outputs, strict=True)):
            raise ValueError("logits of more positions were asked for than follow the source")
        if self._encoded is None:
            self._encode()
        if not any(outputs):
            return [torch.empty(0)] * len(rows)
        self.columns.align(self.cache.self_attention_cache)
        ids, _ = padded(outputs, self.device)
        seen, _ = self.columns.extend(outputs, self.device)
        logits = self.model(
            encoder_outputs=(self._encoded,),
            attention_mask=self._real,
            decoder_input_ids=ids,
            decoder_attention_mask=seen,
            use_cache=True,
            **{self._keyword: self.cache},
        ).logits
        return last_of(logits, outputs, last)

    def _take_source(self, row: int, ids: list[int]) -> list[int]:
        """Keep what belongs to the source; the rest, its marker replaced by the start token."""
        if self.columns.lengths[row]:
            return ids
        end = ids.index(self.marker) if self.marker in ids else len(ids)
        if end:
            self._sources[row] = self._sources[row] + ids[:end]
            self._encoded = None
        return [self.start_token, *ids[end + 1 :]] if end < len(ids) else []

    def _encode(self) -> None:
        """Read the sources of all rows."""
        # a row that has none yet still needs something to look at
        ids, real = padded([source or [self.start_token] for source in self._sources], self.device)
        self._real = real.long()
        self._encoded = self.model.get_encoder()(input_ids=ids, attention_mask=self._real).last_hidden_state
        self.cache = new_cache(self.cache.self_attention_cache)

    def rollback(self, lengths: Sequence[int]) -> None:
        for i, length in enumerate(lengths):
            if length < len(self._sources[i]):
                self._sources[i], self._encoded = self._sources[i][:length], None
        sources = map(len, self._sources)
        self.columns.rollback([max(length - source, 0) for length, source in zip(lengths, sources, strict=True)])

    def keep(self, rows: list[int]) -> None:
        self._sources = [self._sources[i] for i in rows]
        self._real = self._real[rows]
        if self._encoded is not None:
            self._encoded = self._encoded[rows]
        self.cache.batch_select_indices(torch.tensor(rows))
        self.columns.keep(rows)


@dataclass(frozen=True)
class DecoderView:
    """A logits processor or a stopping criterion, shown the start token and the output in place of the whole text.

    Attributes:
        rule: a function of `(ids [1, n], scores)`.
        marker: what stands before the output in the text.
        start: what stands there for `rule`.

    >>> DecoderView(lambda ids, scores: ids.tolist(), marker=9, start=0)(torch.tensor([[5, 6, 9, 7, 8]]), None)
    [[0, 7, 8]]
    """

    rule: Callable[[torch.Tensor, Any], Any]
    marker: int
    start: int

    def __call__(self, ids: torch.Tensor, scores: Any) -> Any:
        output = ids[:, int((ids[0] == self.marker).nonzero()) :].clone()
        output[:, 0] = self.start
        return self.rule(output, scores)
