"""Samplers to audit, and the laws (`exact.law`) that their texts should follow.

An adapter turns an engine into a function `sampler(n, seed) -> n token sequences`.  The expected law never comes from
the engine: `exact/` computes it from the target's next-token distributions, one forward pass a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..distributions import inverse_cdf
from ..engines import Engine, OurEngine, TransformersEngine
from ..errors import SpecdecError
from ..exact import TabularModel
from ..exact.law import SequenceLaw
from ..exact.models import stacked
from ..models.pair import Pair, vocabulary_size
from ..models.session import open_session
from ..sampling import SamplingParams
from ..validate import number, whole

Sampler = Callable[[int, int], list[tuple[int, ...]]]

REST = -1  # stands for all tokens at a position that are too improbable to be listed


def tabular(
    model: Any, prompt: Sequence[int], sampling: SamplingParams | None = None, end: int | None = None
) -> TabularModel:
    """The model after `prompt`, in the form of `exact/`: next-token probabilities in float64 for each prefix.

    Args:
        model: a `FastLlama` or a transformers causal model.
        prompt: token ids, at least one.
        sampling: temperature and truncations; None for the model's own distribution (temperature 1).
        end: the id that ends a text, or None.
    """
    how = sampling or SamplingParams(temperature=1.0)

    def rule(prefix: tuple[int, ...]) -> np.ndarray:
        session = open_session(model, capacity=len(prompt) + len(prefix))
        logits = session.feed(torch.tensor([[*prompt, *prefix]], device=session.device))[0, -1]
        return how.probs(logits.double()).cpu().numpy()

    return TabularModel(vocabulary_size(model), rule, end)


class BlockLaw:
    """The law of the first `length` new tokens, with improbable continuations grouped.

    A token that would make a prefix of probability below `floor` is grouped with the others of its position under
    `REST`.  With `floor = 0` nothing is grouped: this is the law of whole sequences, `exact.target_law`.  A floor that
    groups all tokens is refused: an audit would pass any decoder.

    Attributes:
        law: probability of each outcome, a tuple of tokens that may be shorter than `length`: it ends with the end
            token, or with `REST`.
        rest: total probability of the grouped outcomes; a change within a group is not seen.

    >>> from ..exact import constant_model
    >>> block = BlockLaw(constant_model(np.array([0.7, 0.2, 0.1, 0.0])), length=2, floor=0.15)
    >>> {outcome: round(p, 2) for outcome, p in block.law.items()}
    {(0, 0): 0.49, (0, -1): 0.21, (1, -1): 0.2, (-1,): 0.1}
    >>> [block.outcome(tokens) for tokens in [(0, 0), (0, 2), (1, 0), (2, 0), (3, 0)]]
    [(0, 0), (0, -1), (1, -1), (-1,), (3,)]
    """

    def __init__(self, target: TabularModel, length: int, floor: float = 0.0):
        self.target, self.length = target, whole("length", length, 1, "a block needs at least one token")
        self.floor = number("floor", floor, 0, 1, open_high=True, remedy="0 groups nothing")
        self.law: SequenceLaw = {}
        self._grow((), 1.0)
        if set(self.law) == {(REST,)}:
            raise SpecdecError(f"no token reaches the floor of {floor:g}, so nothing is left to test: name a lower one")
        self.rest = sum(p for outcome, p in self.law.items() if outcome[-1] == REST)

    def _grow(self, prefix: tuple[int, ...], mass: float) -> None:
        probs = self.target.law(prefix)
        named = (probs > 0) & (mass * probs >= self.floor)
        for token in np.flatnonzero(named).tolist():
            text, weight = (*prefix, token), mass * float(probs[token])
            if len(text) == self.length or token == self.target.end:
                self.law[text] = weight
            else:
                self._grow(text, weight)
        if (rest := float(probs[~named].sum())) > 0:
            self.law[*prefix, REST] = mass * rest

    def outcome(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The outcome to which a sequence belongs.

        A token of probability 0 ends the outcome and is listed, so the outcome is not in the law.
        """
        mass = 1.0
        text: tuple[int, ...] = ()
        for token in tokens[: self.length]:
            probs = self.target.law(text)
            if not 0 <= token < len(probs) or probs[token] == 0:
                return (*text, token)
            if mass * probs[token] < self.floor:
                return (*text, REST)
            mass *= float(probs[token])
            text = (*text, token)
        return text

    def grouped(self, law: SequenceLaw) -> SequenceLaw:
        """Another law, of sequences of at least this length, as a law of the outcomes."""
        result: SequenceLaw = {}
        for tokens, weight in law.items():
            outcome = self.outcome(tokens)
            result[outcome] = result.get(outcome, 0) + weight
        return result

    def of(self, sampler: Sampler) -> Sampler:
        """The sampler with its sequences replaced by their outcomes."""
        return lambda n, seed: [self.outcome(tokens) for tokens in sampler(n, seed)]


# -- engines -------------------------------------------------------------------------------------------


def ours(
    pair: Pair, prompt: Sequence[int], length: int, gamma: int = 3, end: int | None = None, **settings: Any
) -> Sampler:
    """Our decoder: the first `length` new tokens after `prompt`, or fewer where `end` comes.

    The last token of a text is never drafted, so at least two tokens are decoded, even if one is tested.  Full drafts
    and their bonus token are tested only if `length` exceeds `gamma`.

    Args:
        pair: target and draft; without a draft it decodes plainly.  `memoize.memoized(pair)` saves most passes.
        settings: other arguments of `generate`; the temperature is 1 unless given.
    """
    params, options = sampled(settings)
    decoded = length if pair.draft is None else max(length, 2)
    return of_engine(
        OurEngine(pair, None if pair.draft is None else gamma, **options), prompt, length, decoded, params, end
    )


def transformers(
    model: Any,
    prompt: Sequence[int],
    length: int,
    assistant: Any = None,
    gamma: int = 3,
    threshold: float | None = 0.0,
    end: int | None = None,
    **settings: Any,
) -> Sampler:
    """`transformers`' own `generate`, as a black box: sampling at temperature 1 unless given.

    Plain sampling runs as one batch.  Assisted decoding takes one text at a time, about 12 ms each on tiny models, and
    decodes at least two tokens, as `ours` does.

    Args:
        model: a transformers causal model.
        assistant: a smaller model, for `assistant_model`.
        gamma: tokens that the assistant proposes (`num_assistant_tokens`, schedule constant).
        threshold: `assistant_confidence_threshold`, below which it stops; None keeps the library's default.
        settings: other arguments of `generate`, such as `prompt_lookup_num_tokens` or `assistant_ensemble_weight`.  The
            models' own generation settings are off, since the expected law is the model's own.
    """
    params, options = sampled(settings)
    one_by_one = assistant is not None or "prompt_lookup_num_tokens" in options
    engine = TransformersEngine(model, assistant, gamma if one_by_one else None, None, threshold, **options)
    return of_engine(engine, prompt, length, max(length, 2) if one_by_one else length, params, end)


def sampled(settings: dict[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
    """The sampling parameters, at temperature 1 unless given, and the other settings."""
    names = ("temperature", "top_k", "top_p", "min_p")
    params = {"temperature": 1.0} | {name: value for name, value in settings.items() if name in names}
    return SamplingParams(**params), {name: value for name, value in settings.items() if name not in names}


def of_engine(
    engine: Engine, prompt: Sequence[int], length: int, decoded: int, params: SamplingParams, end: int | None
) -> Sampler:
    """An engine as a sampler of the first `length` of `decoded` new tokens after `prompt`."""
    ends = [] if end is None else [end]

    def sampler(n: int, seed: int) -> list[tuple[int, ...]]:
        replies = engine.run([list(prompt)] * n, decoded, params, seed, ends)
        return [tuple(reply.tokens[:length]) for reply in replies]

    return sampler


# -- a rule of your own --------------------------------------------------------------------------------


def of_rule(rule: Callable[..., Any], target: TabularModel, draft: TabularModel, gamma: int, length: int) -> Sampler:
    """Decoding with a user's rule on tabular models: as many rounds as `length` tokens take.

    Args:
        rule: `rule(p, q, draft, rng) -> tokens`: target distributions `[gamma + 1, V]`, draft distributions
            `[gamma, V]`, the drafted tokens, a numpy generator for all its draws; returns the 1 to `gamma + 1` tokens
            of the round.
    """
    target, draft = (model.mapped(lambda probs: probs.astype(float)) for model in (target, draft))

    def one(rng: np.random.Generator) -> tuple[int, ...]:
        text: tuple[int, ...] = ()
        while len(text) < length:
            x: list[int] = []
            for _ in range(gamma):
                x.append(inverse_cdf(draft.law((*text, *x)), rng.random()))
            p = stacked([target.law((*text, *x[:i])) for i in range(gamma + 1)])
            q = stacked([draft.law((*text, *x[:i])) for i in range(gamma)])
            try:
                emitted = rule(p, q, list(x), rng)
            except Exception as error:
                raise SpecdecError(
                    f"the rule raised {type(error).__name__}: {error} (drafted {x} after {text})"
                ) from error
            text += checked_round(emitted, gamma, target.vocabulary)
        return text[:length]

    def sampler(n: int, seed: int) -> list[tuple[int, ...]]:
        rng = np.random.default_rng(seed)
        return [one(rng) for _ in range(n)]

    return sampler


def checked_round(emitted: Any, gamma: int, vocabulary: int) -> tuple[int, ...]:
    """The tokens of a round as a tuple of ints; raises `SpecdecError` for anything else."""
    try:
        tokens = tuple(int(token) for token in emitted)
    except (TypeError, ValueError):
        tokens = ()
    if not 1 <= len(tokens) <= gamma + 1 or not all(0 <= token < vocabulary for token in tokens):
        raise SpecdecError(f"the rule must return 1 to {gamma + 1} token ids from 0 to {vocabulary - 1}, the accepted "
                           f"ones and one more; it returned {emitted!r}")  # fmt: skip
    return tokens
