"""Sessions of an encoder-decoder, the paper's own kind of model: T5, BART and their like.

To the loops it looks like any other model that is fed a text and rolled back.  The text is

    source, start marker, output

and `Pair.encode` writes the first two.  The marker is the id one past the vocabulary, so no source, no model and no
drafter can write it; the decoder reads it as its start token.  The encoder runs once, when the source is fed; its
output and the keys and values that the decoder makes of it stay until the source changes.  Logits follow the marker
and the output only.

What is relied on, pinned by `tests/test_seq2seq.py`: `EncoderDecoderCache` crops the decoder's part alone, and the
model takes `encoder_outputs` in place of a source.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import SpecdecError
from .pair import start_marker, vocabulary_size
from .session import _check_rollback, cache_keyword


class EncoderDecoderSession:
    """A session on a transformers encoder-decoder; `length` counts the source, the marker and the output.

    Args:
        model: for example a `T5ForConditionalGeneration`.
        batch: rows; the sources of all are equally long.
    """

    def __init__(self, model: Any, batch: int = 1):
        self.model = model
        self.marker = start_marker(model)
        self.start_token = model.config.decoder_start_token_id
        if self.start_token is None:
            raise SpecdecError(
                f"{type(model).__name__} names no decoder_start_token_id: set it in the model's config.json"
            )
        self._keyword = cache_keyword(model.forward) or "past_key_values"
        self._source = torch.empty(batch, 0, dtype=torch.long, device=model.device)
        self._encode()

    def _encode(self) -> None:
        """Read the whole source; nothing of the output is left."""
        from transformers import DynamicCache, EncoderDecoderCache

        # without a config the caches grow a layer at a time: some configs count the encoder's layers
        self.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self._encoded = self.model.get_encoder()(input_ids=self._source) if self._source.shape[1] else None

    @property
    def length(self) -> int:
        return self._source.shape[1] + self.cache.get_seq_length()

    @property
    def device(self) -> torch.device:
        return self.model.device

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
