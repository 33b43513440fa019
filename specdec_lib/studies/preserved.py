"""What chapter 03 needs: contexts of real text, the power of a test by simulation, audits with the plan made first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..audit.adapters import BlockLaw, ours, tabular
from ..audit.audit import Verdict, audit
from ..audit.gof import pool
from ..audit.memoize import memoized
from ..decode import generate_plain
from ..exact import distance, output_law
from ..models import Pair
from ..sampling import SamplingParams
from ..verify import Verifier
from .handwritten import questions


def real_contexts(pair: Pair, n: int, seed: int = 0) -> list[list[int]]:
    """Token ids of `n` packaged prompts, each with some tokens of the target's own answer."""
    starts = questions(pair, n, seed)
    answers = generate_plain(pair, starts, max_new_tokens=24, temperature=1.0, seed=seed, eos=[]).tokens
    return [ids + answer[: 4 + 5 * (i % 4)] for i, (ids, answer) in enumerate(zip(starts, answers, strict=True))]


def worst_shift(probs: np.ndarray, effect: float) -> np.ndarray:
    """Probabilities at total variation `effect` that chi-squared sees worst: mass moves evenly between two halves.

    The halves are chosen greedily, so that each has about half of the probability.

    >>> worst_shift(np.array([0.25, 0.25, 0.5]), 0.1).round(2).tolist()
    [0.2, 0.2, 0.6]
    """
    gains, mass = np.zeros(len(probs), bool), 0.0
    for i in np.argsort(-probs, kind="stable"):
        if mass + probs[i] <= 0.5 + 1e-12:
            gains[i] = True
            mass += probs[i]
    if not mass:  # one outcome is certain: nothing can move
        return probs
    return np.where(gains, probs * (1 + effect / mass), probs * (1 - effect / (1 - mass)))


def simulated_power(
    probs: np.ndarray, effect: float, samples: int, level: float, repeats: int = 400, seed: int = 0
) -> float:
    """How often chi-squared on pooled bins rejects, of `repeats` runs of a sampler that is off by `worst_shift`.

    Args:
        probs: of the outcomes, under the hypothesis.
        effect: total variation of the sampler that is drawn from, over the bins; 0 draws from `probs`.
    """
    from scipy.stats import chisquare

    bins = pool(probs, samples)
    wrong = worst_shift(bins.law, effect)
    counts = np.random.default_rng(seed).multinomial(samples, wrong / wrong.sum(), repeats)
    return float((chisquare(counts, bins.law * samples, axis=1).pvalue < level).mean())


@dataclass(frozen=True)
class RealAudit:
    """Three tokens of the library's decoder against the target's exact distribution of them, in several contexts.

    Attributes:
        pair: a real target and its draft.
        contexts: token ids.
        length, gamma, top_k: tokens tested, draft length, tokens that are possible at each position.
    """

    pair: Pair
    contexts: Sequence[Sequence[int]]
    length: int = 3
    gamma: int = 2
    top_k: int = 4

    @cached_property
    def blocks(self) -> list[BlockLaw]:
        """Exact probabilities of all texts that are possible, by context; nothing is grouped."""
        return [BlockLaw(self._tabular(self.pair.target, ids), self.length) for ids in self.contexts]

    @cached_property
    def quick(self) -> Pair:
        return memoized(self.pair)

    def _tabular(self, model: Any, ids: Sequence[int]) -> Any:
        return tabular(model, ids, SamplingParams(temperature=1.0, top_k=self.top_k))

    def probs(self, context: int) -> np.ndarray:
        """The probabilities of the outcomes in one context, as an array."""
        return np.array(list(self.blocks[context].law.values()), float)

    def run(self, verifier: str | Verifier = "token", **plan: Any) -> Verdict:
        """Audit the decoder with this rule; `plan` is level, effect, power and seed."""
        samplers = [
            ours(self.quick, ids, self.length, self.gamma, top_k=self.top_k, verifier=verifier) for ids in self.contexts
        ]
        return audit(
            lambda n, seed, i: samplers[i](n, seed),
            lambda i: self.blocks[i].law,
            contexts=list(range(len(self.contexts))),
            **plan,
        )

    def size(self, rule: Verifier) -> float:
        """The largest total variation that a wrong rule causes in these contexts, by enumeration."""
        sizes = [
            distance(
                output_law(
                    rule, block.target, self._tabular(self.pair.draft, ids), self.gamma, self.length, cap=True
                ).sequences,
                block.law,
            )
            for ids, block in zip(self.contexts, self.blocks, strict=True)
        ]
        return float(max(sizes))
