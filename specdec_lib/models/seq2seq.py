"""Sessions of an encoder-decoder, the paper's own kind of model: T5, BART and the like.

The decoding loop feeds it and rolls it back like any other model.  The text is

    source, start marker, output

and `Pair.encode` writes the first two.  The marker is the id after the last of the vocabulary, so no source,
model or drafter can write it; the decoder reads it as its start token.  The encoder runs once, when the source is fed;
its output, and the decoder's keys and values of it, stay until the source changes.  Only the marker and the output have
logits.  Logits processors and stopping criteria see what transformers shows them: the start token and the output
(`DecoderView`).

This relies on two facts, pinned by `tests/test_seq2seq.py`: `EncoderDecoderCache` crops the decoder's part alone, and
the model takes `encoder_outputs` in place of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from ..errors import SpecdecError
from .pair import start_marker, vocabulary_size
from .rows import AlignedCacheRows, padded, tail
from .session import Ids, Session, cache_keyword, class_name, device_of


def start_token(model: Any) -> int:
    """The token that the decoder reads before the output."""
    token = model.config.decoder_start_token_id
    if token is None:
        raise SpecdecError(f"{class_name(model)} names no decoder_start_token_id: set it in the model's config.json")
    return token


def new_cache(of_outputs: Any = None) -> Any:
    """A cache without sources; for the outputs `of_outputs` if given, else an empty cache."""
    from transformers import DynamicCache, EncoderDecoderCache

    # without a config the caches grow a layer at a time: some configs count the encoder's layers
    return EncoderDecoderCache(DynamicCache() if of_outputs is None else of_outputs, DynamicCache())


class EncoderDecoderSession(Session):
    """A session on a transformers encoder-decoder; a row's length counts its source, the marker and its output.

    While the outputs of all rows are equally long, one decoder pass needs no mask.  Once lengths differ they are kept
    in aligned columns, which not every model can read: `support.check_rows` tests it.

    Args:
        model: for example a `T5ForConditionalGeneration`.
        rows: texts that are decoded together.
    """

    def __init__(self, model: Any, rows: int = 1):
        self.model = model
        self.marker, self.start_token = start_marker(model), start_token(model)
        self.cache = new_cache()
        self.columns = AlignedCacheRows(rows)
        self._keyword = cache_keyword(model) or "past_key_values"
        self._sources: list[list[int]] = [[] for _ in range(rows)]
        self._encoded: torch.Tensor | None = None  # [rows, longest source, width]; None once a source changed
        self._real = torch.empty(rows, 0, dtype=torch.long, device=device_of(model))  # the mask of the sources

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return [len(source) + held for source, held in zip(self._sources, self.columns.lengths, strict=True)]

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def feed(self, ids: torch.Tensor, last: int = 1) -> torch.Tensor:
        return torch.stack(self._feed_ragged(list(ids), [last] * len(ids)))

    @torch.inference_mode()
    def _feed_ragged(self, rows: Sequence[Ids], last: Sequence[int]) -> list[torch.Tensor]:
        outputs = [self._take_source(i, row) for i, row in enumerate(rows)]
        if any(k > len(output) for k, output in zip(last, outputs, strict=True)):
            least = min(map(len, outputs))
            raise ValueError(
                f"logits of {max(last)} positions were asked for, but only {least} of those fed follow the source"
            )
        if self._encoded is None:
            self._encode()
        if not any(map(len, outputs)):
            nothing = torch.empty(0, vocabulary_size(self.model), device=self.device, dtype=self.model.dtype)
            return [nothing] * len(rows)
        counts = [len(output) for output in outputs]
        masks: dict[str, torch.Tensor] = {}
        if len({*counts}) == 1 and self.columns.in_step(self.cache.get_seq_length()):
            self.columns.extend_all(counts[0])
        else:
            self.columns.align(self.cache.self_attention_cache)
            masks["decoder_attention_mask"], _ = self.columns.extend(counts, self.device)
        if self._padded(self._real.shape[1]):
            masks["attention_mask"] = self._real
        logits = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self._encoded),
            decoder_input_ids=padded(outputs, self.device),
            use_cache=True,
            **{self._keyword: self.cache},
            **masks,
        ).logits
        return tail(logits, outputs, last)

    def _take_source(self, row: int, ids: Ids) -> Ids:
        """Store the ids of the source; returns the rest, with the start token in place of the marker."""
        if self.columns.lengths[row]:
            return ids
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        end = ids.index(self.marker) if self.marker in ids else len(ids)
        if end:
            self._sources[row] = self._sources[row] + ids[:end]
            self._encoded = None
        return [self.start_token, *ids[end + 1 :]] if end < len(ids) else []

    def _encode(self) -> None:
        """Read the sources of all rows."""
        if not any(self._sources):
            raise ValueError("the output begins, but no source was fed")
        # a row without a source needs at least one token
        sources = [source or [self.start_token] for source in self._sources]
        ids = padded(sources, self.device)
        real = [[1] * len(source) + [0] * (ids.shape[1] - len(source)) for source in sources]
        self._real = torch.tensor(real, device=self.device)
        masks = {"attention_mask": self._real} if self._padded(ids.shape[1]) else {}
        self._encoded = self.model.get_encoder()(input_ids=ids, **masks).last_hidden_state
        self.cache = new_cache(self.cache.self_attention_cache)

    def _padded(self, longest: int) -> bool:
        """Whether a source is shorter than the longest one: then the decoder needs a mask."""
        return any(len(source) < longest for source in self._sources)

    def _rollback(self, lengths: list[int]) -> None:
        for i, length in enumerate(lengths):
            if length < len(self._sources[i]):
                self._sources[i], self._encoded = self._sources[i][:length], None
        held = self.cache.get_seq_length()
        in_step = self.columns.in_step(held)
        outputs = [max(n - len(source), 0) for n, source in zip(lengths, self._sources, strict=True)]
        self.columns.rollback(outputs)
        if in_step and len({*outputs}) == 1 and outputs[0] < held:
            self.cache.crop(outputs[0] - held)

    def select_rows(self, rows: Sequence[int]) -> None:
        self._sources = [self._sources[i] for i in rows]
        index = torch.tensor(rows, device=self.device)
        self._real = self._real.index_select(0, index)
        if self._encoded is not None:
            self._encoded = self._encoded.index_select(0, index)
        if self.cache.get_seq_length():
            self.cache.batch_select_indices(index)
        self.columns.select(rows)


@dataclass(frozen=True)
class DecoderView:
    """A logits processor or stopping criterion that sees the start token and the output instead of the whole text.

    Attributes:
        rule: a function of `(ids [1, n], scores)`.
        marker: the id before the output in the text.
        start: the id that `rule` sees there.

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
