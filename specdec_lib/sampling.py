"""How a token is sampled: the parameters of a request, and the draw."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from . import validate
from .distributions import Array, inverse_cdf, is_torch, warp
from .errors import SpecdecError
from .processing import Processor

LOWEST_TEMPERATURE = 1e-6  # a lower one overflows float32 logits; whoever asks for it means 0


@dataclass(frozen=True)
class SamplingParams:
    """How next-token probabilities are made from logits; the same for target and draft, as in the paper.

    Attributes:
        temperature: 0 for greedy decoding, else at least 1e-6.
        top_k, top_p, min_p: truncations, None for none; see `distributions.warp`.
        processors: applied to the logits first; they see the text so far.  See `specdec_lib.processing`.

    >>> import numpy as np
    >>> SamplingParams(temperature=1.0, top_k=2).probs(np.log([0.5, 0.3, 0.2])).round(3).tolist()
    [0.625, 0.375, 0.0]
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        everything = "leave it out to keep all tokens"
        checked: dict[str, Any] = {
            "temperature": validate.number(
                "temperature", self.temperature, 0, remedy="use 0 for greedy decoding, 1 for sampling"
            )
        }
        if 0 < checked["temperature"] < LOWEST_TEMPERATURE:
            raise SpecdecError(f"temperature {checked['temperature']:g} is too small to divide by: use 0")
        if self.top_k is not None:
            checked["top_k"] = validate.whole("top_k", self.top_k, 1, everything)
        if self.top_p is not None:
            checked["top_p"] = validate.number("top_p", self.top_p, 0, 1, open_low=True, remedy=everything)
        if self.min_p is not None:
            checked["min_p"] = validate.number("min_p", self.min_p, 0, 1, remedy=everything)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.greedy and len(checked) > 1:
            raise SpecdecError(
                f"{list(checked)[1]} changes nothing at temperature 0: leave it out, or set temperature above 0"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probs(self, logits: Array) -> Array:
        """Next-token probabilities `[..., V]` from logits `[..., V]`, in at least float32."""
        return warp(in_float32(logits), self.temperature, self.top_k, self.top_p, self.min_p)


def in_float32(logits: Array) -> Array:
    """Logits in at least float32: near -8, bfloat16 resolves steps of 0.03 only."""
    return logits.float() if is_torch(logits) and logits.element_size() < 4 else logits


def draw(probs: Array, random: Random) -> Any:
    """Draw a token from `probs` `[V]` with one number of `random`; see `distributions.inverse_cdf`.

    Every draw of the decoder goes through this function.  Tests that enumerate the decoder's output replace it.
    """
    return inverse_cdf(probs, random.random())
