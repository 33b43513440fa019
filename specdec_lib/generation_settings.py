"""A model's own generation settings: how its `generation_config` changes the next-token distribution.

transformers applies them by default: Qwen2.5-Instruct ships a repetition penalty, Whisper suppresses tokens, BART
forces its first and last token.  `generate` here decodes the model's own distribution.  It names the settings in one
warning, and `processors_of(pair)` builds transformers' own processors for them.  A comparison with transformers runs
both sides under the same settings: the context manager `neutral(model)` switches them off.

Temperature, truncations and beams of a generation config say how to search, not what the model is: they are never
applied.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .errors import SpecdecError
from .models.pair import Pair, end_tokens, is_encoder_decoder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Span:
    """Where a text begins and ends; some settings depend on it.

    Attributes:
        prompt: the prompt's ids; for an encoder-decoder the source, without the marker after it.
        begin: how many ids stand before the first new token: the prompt's, or the start token of an encoder-decoder.
        new_tokens: how many may follow.
        ends: the ids that end the text.
    """

    prompt: tuple[int, ...]
    begin: int
    new_tokens: int
    ends: tuple[int, ...]


def _ends(span: Span, device: torch.device) -> Any:
    return torch.tensor(span.ends, device=device)


def _with_ends(make: Callable[[Any, Span, Any], Any]) -> Callable[[Any, Span, Any], Any]:
    """`make`, or no processor for a text without end tokens: there is no end token to suppress."""
    return lambda value, span, device: make(value, span, device) if span.ends else None


def _prompt(span: Span, device: torch.device) -> Any:
    return torch.tensor([span.prompt], device=device)


def _makers() -> dict[str, Callable[[Any, Span, Any], Any]]:
    """For each setting `(value, span, device) -> ` transformers' processor, in the order in which it applies them."""
    from transformers.generation import logits_process as t

    return {
        "sequence_bias": lambda v, s, d: t.SequenceBiasLogitsProcessor(v),
        "encoder_repetition_penalty": lambda v, s, d: t.EncoderRepetitionPenaltyLogitsProcessor(v, _prompt(s, d)),
        "repetition_penalty": lambda v, s, d: t.RepetitionPenaltyLogitsProcessor(v),
        "no_repeat_ngram_size": lambda v, s, d: t.NoRepeatNGramLogitsProcessor(v),
        "encoder_no_repeat_ngram_size": lambda v, s, d: t.EncoderNoRepeatNGramLogitsProcessor(v, _prompt(s, d)),
        "bad_words_ids": lambda v, s, d: t.NoBadWordsLogitsProcessor(v, _ends(s, d) if s.ends else None),
        "min_length": _with_ends(lambda v, s, d: t.MinLengthLogitsProcessor(v, _ends(s, d), device=d)),
        "min_new_tokens": _with_ends(
            lambda v, s, d: t.MinNewTokensLengthLogitsProcessor(s.begin, v, _ends(s, d), device=d)
        ),
        "forced_bos_token_id": lambda v, s, d: t.ForcedBOSTokenLogitsProcessor(v),
        "forced_eos_token_id": lambda v, s, d: t.ForcedEOSTokenLogitsProcessor(s.begin + s.new_tokens, v, device=d),
        "remove_invalid_values": lambda v, s, d: t.InfNanRemoveLogitsProcessor(),
        "exponential_decay_length_penalty": _with_ends(
            lambda v, s, d: t.ExponentialDecayLengthPenalty(tuple(v), _ends(s, d), s.begin)
        ),
        "suppress_tokens": lambda v, s, d: t.SuppressTokensLogitsProcessor(v, device=d),
        "begin_suppress_tokens": lambda v, s, d: t.SuppressTokensAtBeginLogitsProcessor(v, s.begin, device=d),
    }


NEUTRAL: dict[str, tuple[Any, ...]] = {
    # the values besides None that change nothing; a guidance scale and a watermark are not functions of the text
    "sequence_bias": (), "encoder_repetition_penalty": (1.0,), "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "bad_words_ids": (), "min_length": (0,),
    "min_new_tokens": (0,), "forced_bos_token_id": (), "forced_eos_token_id": (), "remove_invalid_values": (False,),
    "exponential_decay_length_penalty": (), "suppress_tokens": (), "begin_suppress_tokens": (),
    "guidance_scale": (1.0,), "watermarking_config": (),
}  # fmt: skip
ELSEWHERE = ("guidance_scale", "watermarking_config")
"""Settings that no processor of drafted text can apply: they need a second batch, or keep state."""

SEARCH = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping", "penalty_alpha",
    "dola_layers", "num_return_sequences", "renormalize_logits", "max_length", "max_time", "stop_strings",
    "prompt_lookup_num_tokens", "prefill_chunk_size",
)  # fmt: skip
"""How transformers searches, unless the call sets it."""


def shaping(model_or_pair: Any) -> dict[str, Any]:
    """The settings of a model's generation config that change its distribution, with their values.

    >>> from types import SimpleNamespace as Some
    >>> shaping(Some(generation_config=Some(repetition_penalty=1.1, no_repeat_ngram_size=0, temperature=0.7)))
    {'repetition_penalty': 1.1}
    """
    config = getattr(model_of(model_or_pair), "generation_config", None)
    found = {name: getattr(config, name, None) for name in NEUTRAL}
    empty: tuple[Any, ...] = (None, [], {}, ())
    return {name: value for name, value in found.items() if value not in empty and value not in NEUTRAL[name]}


def model_of(model_or_pair: Any) -> Any:
    return model_or_pair.target if isinstance(model_or_pair, Pair) else model_or_pair


class SettingProcessor:
    """A generation setting as a logits processor: transformers' own, made once the text and the device are known.

    Attributes:
        name, value: as in the generation config.
        span: of the text; None until `bound` sets it.
    """

    def __init__(self, name: str, value: Any, span: Span | None = None):
        self.name, self.value, self.span = name, value, span
        self.made: dict[torch.device, Any] = {}

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.span is None:
            raise SpecdecError(f"{self.name} is not bound to a text: use bound(processors, span)")
        device = scores.device
        if device not in self.made:
            self.made[device] = _makers()[self.name](self.value, self.span, device)
        processor = self.made[device]
        return scores if processor is None else processor(ids, scores)

    def __repr__(self) -> str:
        return f"{self.name}={self.value!r}"


def processors_of(model_or_pair: Any) -> tuple[SettingProcessor, ...]:
    """The model's own generation settings as processors, in transformers' order: `generate(processors=...)`.

    Empty if it has none.  `generate` binds them to each text.

    Raises:
        SpecdecError: for a guidance scale or a watermark, which are not functions of the text so far.
    """
    found = shaping(model_or_pair)
    if bad := [name for name in ELSEWHERE if name in found]:
        raise SpecdecError(
            f"the generation setting {bad[0]} is not a function of the text so far, as drafting needs: "
            f"set generation_config.{bad[0]} to None, or use transformers' own generate"
        )
    return tuple(SettingProcessor(name, found[name]) for name in NEUTRAL if name in found)


def span_of(pair: Pair, ids: Sequence[int], new_tokens: int, ends: Sequence[int] | None = None) -> Span:
    """The span of a text: `ids` from `pair.encode`, `ends` those of the call, None for the model's."""
    two = is_encoder_decoder(pair.target)
    prompt = tuple(ids[:-1] if two else ids)
    return Span(prompt, 1 if two else len(prompt), new_tokens, tuple(end_tokens(pair) if ends is None else ends))


def bound(processors: Sequence[Any], span: Span) -> tuple[Any, ...]:
    """The processors of one text: settings get its span, other processors stay as they are."""
    return tuple(SettingProcessor(p.name, p.value, span) if isinstance(p, SettingProcessor) else p for p in processors)


_told: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # the settings that were named already, by model


def warn_of_settings(model_or_pair: Any, processors: Any = None) -> None:
    """Warn once, in one line, of the settings of a model that `processors` does not apply; `[]` silences it.

    Args:
        processors: what the caller of `generate` gave.
    """
    model, found = model_of(model_or_pair), shaping(model_or_pair)
    if not found or (isinstance(processors, (list, tuple)) and not processors):
        return
    given = processors if isinstance(processors, (list, tuple)) else ()
    applied = {p.name for p in given if isinstance(p, SettingProcessor)}
    told = _told.setdefault(model, set())
    missing = {name: value for name, value in found.items() if name not in applied | told}
    if missing:
        told |= set(missing)
        log.warning(
            "the model's generation config sets %s, which is not applied: processors=sd.processors_of(pair) applies "
            "it, processors=[] says that you know", listed(missing),
        )  # fmt: skip


def listed(settings: dict[str, Any]) -> str:
    """Settings on one line; long values are given by their length.

    >>> listed({"repetition_penalty": 1.1, "suppress_tokens": list(range(99))})
    'repetition_penalty=1.1, suppress_tokens (99 entries)'
    """
    texts = {name: str(value).replace("\n", " ") for name, value in settings.items()}
    return ", ".join(
        f"{name}={text}" if len(text) <= 40 else f"{name} ({len(settings[name])} entries)"
        if isinstance(settings[name], (list, tuple, dict)) else name
        for name, text in texts.items()
    )  # fmt: skip


@contextmanager
def neutral(*models: Any) -> Iterator[None]:
    """Within this context, transformers' `generate` of these models applies only what the call asks for.

    Settings that change the distribution, and those of the search, are set to transformers' own defaults.  Special
    tokens and settings for drafting stay.  A model may be None.
    """
    from transformers import GenerationConfig

    fresh = GenerationConfig()
    kept = {}
    for model in models:
        config = getattr(model, "generation_config", None)
        if config is None or id(model) in kept:
            continue
        kept[id(model)] = (model, config)
        quiet = copy.deepcopy(config)
        for name in (*NEUTRAL, *SEARCH):
            if hasattr(quiet, name):
                setattr(quiet, name, getattr(fresh, name, None))
        model.generation_config = quiet
    try:
        yield
    finally:
        for model, config in kept.values():
            model.generation_config = config
