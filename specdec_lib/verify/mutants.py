"""Wrong rules, kept as negative controls: each is a fault that was shipped, reported or asked for somewhere.

A check that passes a mutant does not check that part of the rule.  `studies/kill.py` runs every check on every mutant.

A fault sits in one of four places, and a `Mutant` says which by the field it fills; all others stay correct:

* `rule`: what is accepted, and what follows (a `Verifier`, or a `TreeVerifier` for several candidates);
* `scored`: the distribution that the verifier takes for the target's;
* `drawn`, `reported`, `drops`: what the draft is truly drawn from, the distribution reported for it, and which token is
  dropped;
* `cut`: what is kept of a block that holds an end token.

Each is a function of probabilities and tokens alone, so a mutant fits into a decoder as well as into `exact/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ..distributions import (
    Array,
    joined,
    keep_top_k,
    normalise,
    one_hot,
    positive_part,
    residual,
    softmax,
    temper,
    where,
)
from . import VERIFIERS, Verifier, block, multidraft, token
from .multidraft import TreeVerifier
from .token import acceptance_prob, count_probs, gather_probs, to_scalar


def unchanged(probs: Array) -> Array:
    return probs


@dataclass(frozen=True)
class Mutant:
    """A fault, where it was seen, and which part of the decoder it changes.

    Attributes:
        name: short, for tables.
        fault: what is done wrong, in one line.
        reference: the public report.
        rule: the rule with the fault, or the correct token rule.
        scored: from the target's distribution to the one that the verifier sees.
        drawn: from the draft's distribution to the one that tokens are drawn from.
        reported: from the draft's distribution to the one that is reported to the verifier.
        drops: `(reported distribution, token) -> bool`: whether drafting ends at this token and drops it.
        cut: `(tokens of a round, end token) -> tokens that are kept`, or None for the correct cut.
    """

    name: str
    fault: str
    reference: str
    rule: Verifier | TreeVerifier = VERIFIERS["token"]
    scored: Callable[[Array], Array] = unchanged
    drawn: Callable[[Array], Array] = unchanged
    reported: Callable[[Array], Array] = unchanged
    drops: Callable[[Array, int], bool] | None = None
    cut: Callable[[tuple[int, ...], int | None], tuple[int, ...]] | None = None


def wrong(
    accepted: Callable[[Array, Array, Sequence[int]], list] = token.accepted,
    correction: Callable[[Array, Array, Sequence[int], int], Array] = token.correction,
) -> Verifier:
    """The token rule with one of its two functions replaced."""
    return Verifier("mutant", accepted, correction, False, "")


# -- acceptance ----------------------------------------------------------------------------------------


def accept_all(p: Array, q: Array, x: Sequence[int]) -> list:
    return [0] * len(x) + [1]


def accept_if_sampled(p: Array, q: Array, x: Sequence[int]) -> Any:
    """`a = p(x)`: the probability that a token sampled from the target equals the draft token."""
    return count_probs(gather_probs(p, x))


def accept_if_sampled_or_ratio(p: Array, q: Array, x: Sequence[int]) -> Any:
    p_x = gather_probs(p, x)
    return count_probs(p_x + (1 - p_x) * acceptance_prob(p_x, gather_probs(q, x)))


def accept_late(p: Array, q: Array, x: Sequence[int]) -> Any:
    """The ratio of each draft token read from the target's distribution one position later."""
    return token.accepted(p[1:], q, x)


def accept_first(p: Array, q: Array, x: Sequence[int]) -> Any:
    a = acceptance_prob(gather_probs(p, x), gather_probs(q, x))
    return count_probs(joined(1, a[1:]) if len(x) else a)


def accept_swapped(p: Array, q: Array, x: Sequence[int]) -> Any:
    return count_probs(acceptance_prob(gather_probs(q, x), gather_probs(p, x)))


SMALLEST_UNIFORM_STEP = Fraction(1, 2**24)
"""float32 uniforms are multiples of this, and 0 is one of them."""


def accept_zero(p: Array, q: Array, x: Sequence[int]) -> Any:
    """`u <= a` with a float32 uniform, which can be 0: then a ratio of 0 passes.

    Other ratios stay exact: rounding them to the grid of uniforms is not part of this fault.
    """
    step = SMALLEST_UNIFORM_STEP if p.dtype == object else float(SMALLEST_UNIFORM_STEP)
    a = acceptance_prob(gather_probs(p, x), gather_probs(q, x))
    return count_probs(where(a < step, 0 * a + step, a))


# -- the token that follows ----------------------------------------------------------------------------


def from_target(p: Array, q: Array, x: Sequence[int], n: int) -> Array:
    return p[n]


def from_softmax_of_residual(p: Array, q: Array, x: Sequence[int], n: int) -> Array:
    """`softmax(max(p - q, 0))`.  Under fractions each exponential is rounded to a fraction, then normalised."""
    if n == len(x):
        return p[n]
    excess = positive_part(p[n] - q[n])
    if excess.dtype != object:
        return softmax(excess)
    return normalise(np.array([Fraction(math.exp(e)) for e in excess.tolist()], dtype=object))


def from_unnormalised_residual(p: Array, q: Array, x: Sequence[int], n: int) -> Array:
    """The residual's cumulated sum is searched as if it reached 1: the missing mass goes to the last token."""
    if n == len(x):
        return p[n]
    probs = positive_part(p[n] - q[n])
    probs[-1] = probs[-1] + 1 - probs.sum()
    return probs


def from_swapped_residual(p: Array, q: Array, x: Sequence[int], n: int) -> Array:
    return p[n] if n == len(x) else residual(q[n], p[n])


def bonus_from_draft(p: Array, q: Array, x: Sequence[int], n: int) -> Array:
    """After a full acceptance, the last distribution that the draft reported (the next one if it reports `g + 1`)."""
    return q[-1] if n == len(x) else residual(p[n], q[n])


# -- several candidates --------------------------------------------------------------------------------


def accept_any_match(p: Array, q: Array, candidates: Sequence[int]) -> list:
    """Each candidate is compared with its own sample: `k` chances to match instead of one."""
    chances, reached = [], 1
    for x in candidates:
        a = to_scalar(p[x])
        chances.append(reached * a)
        reached = reached * (1 - a)
    return [*chances, reached]


def without_first(p: Array, q: Array, candidates: Sequence[int]) -> Array:
    """The target's distribution without the first candidate: its sample, given that it is not the candidate."""
    rest = positive_part(p)
    rest[candidates[0]] = 0
    return normalise(rest) if bool(rest.sum() > 0) else p


# -- around the rule -----------------------------------------------------------------------------------


def as_argmax(q: Array) -> Array:
    return one_hot(q.argmax(-1), q)


def as_top_two(q: Array) -> Array:
    return keep_top_k(q, 2)


def at_half_temperature(probs: Array) -> Array:
    return temper(probs, Fraction(1, 2) if probs.dtype == object else 0.5)


def not_the_argmax(q: Array, x: int) -> bool:
    """Low confidence: another token was more probable."""
    return bool(q[x] < q.max())


def cut_if_last(tokens: tuple[int, ...], end: int | None) -> tuple[int, ...]:
    """Nothing is cut: only the last token of the round is compared with the end token."""
    return tokens


def tree(
    draw: Callable[[Array, int], Any],
    accepted: Callable[[Array, Array, Sequence[int]], list] = multidraft.accepted,
    correction: Callable[[Array, Array, Sequence[int]], Array] = multidraft.correction,
) -> TreeVerifier:
    return TreeVerifier("mutant", 2, draw, accepted, correction, False, "")


MUTANTS = {
    m.name: m
    for m in [
        Mutant(
            "argmax draft, softmax q",
            "the draft takes its most probable token, the ratio uses a distribution it was not sampled from",
            "transformers#32867, fixed by PR 33534; jaymody/speculative-sampling#3",
            drawn=as_argmax,
        ),
        Mutant(
            "top-k draft, raw q",
            "tokens are drawn from the filtered distribution, the raw one is reported",
            "transformers#47932, PR 47961",
            drawn=as_top_two,
        ),
        Mutant(
            "draft temperature unreported",
            "the draft samples at another temperature than its reported distribution has",
            "transformers#47932 (processed against raw logits); deepseek-ai/DeepSpec#31 (another precision)",
            drawn=at_half_temperature,
        ),
        Mutant(
            "target temperature ignored",
            "the verifier scores the target without the sampling parameters of the request",
            "vllm#9834, fixed by PR 10198",
            scored=at_half_temperature,
        ),
        Mutant(
            "low-confidence token dropped",
            "drafting stops at an unlikely token and throws it away, which looks at the token before it is tested",
            "llama.cpp PR 22506, ik_llama.cpp PR 1820 (harmless there: those drafts are greedy and matched exactly)",
            drops=not_the_argmax,
        ),
        Mutant(
            "everything accepted",
            "the test that counts matches is always true, so the whole draft is kept",
            "transformers PR 28508",
            rule=wrong(accepted=accept_all),
        ),
        Mutant(
            "first token unchecked",
            "the first draft token is committed before anything is compared",
            "ohdearquant/lattice#243",
            rule=wrong(accepted=accept_first),
        ),
        Mutant(
            "index shifted",
            "a draft token's ratio takes the target's distribution at the next position",
            "transformers PR 28166",
            rule=wrong(accepted=accept_late),
        ),
        Mutant(
            "p and q swapped",
            "the letters of Chen et al. read as Leviathan's: ratio q/p, residual max(q - p, 0)",
            "asked for in feifeibear/LLMSpeculativeSampling#36, and refused",
            rule=wrong(accept_swapped, from_swapped_residual),
        ),
        Mutant(
            "zero ratio accepted",
            "u <= p/q with a float32 uniform that can be 0, so a token with p = 0 can pass",
            "sglang#35771; transformers 5.24",
            rule=wrong(accepted=accept_zero),
        ),
        Mutant(
            "equality, fresh redraw",
            "keep the draft token if it equals a sample of the target's, else sample again instead of emitting it",
            "romsto/Speculative-Decoding (n-gram path); ml-explore/mlx-swift-lm PR 459",
            rule=wrong(accept_if_sampled, from_target),
        ),
        Mutant(
            "equality or ratio",
            "a draft token has two chances: it equals a sample of the target's, or it passes the ratio",
            "alibaba/rtp-llm PR 1295",
            rule=wrong(accepted=accept_if_sampled_or_ratio),
        ),
        Mutant(
            "q taken as one",
            "accept with p(x)/1, as for a point mass, yet replace from the residual of the softmax q",
            "sglang#9877 and SafeAILab/EAGLE#329 (q = 1; exact there, since the replacement leaves x out)",
            rule=wrong(accepted=accept_if_sampled),
        ),
        Mutant(
            "resampled from p",
            "a rejected token is replaced from the target's distribution, not from the residual",
            "ShopeeLLM/Spec-RL#14",
            rule=wrong(correction=from_target),
        ),
        Mutant(
            "softmax of the residual",
            "max(p - q, 0) goes through a softmax instead of being divided by its sum",
            "transformers PR 28508",
            rule=wrong(correction=from_softmax_of_residual),
        ),
        Mutant(
            "residual not normalised",
            "max(p - q, 0) is searched with a uniform in [0, 1): the missing mass goes to the last token",
            "constructed; the fallback to the last token as in iree-org/iree-turbine PR 890",
            rule=wrong(correction=from_unnormalised_residual),
        ),
        Mutant(
            "bonus from q",
            "after a full acceptance the extra token comes from the draft",
            "constructed; its mirror, a bonus from p where the mixture is meant, is transformers#45865",
            rule=wrong(correction=bonus_from_draft),
        ),
        Mutant(
            "block rule, token residual",
            "block verification replaces from max(p - q, 0) instead of max(c p - q, 0)",
            "vllm-project/vllm-ascend#7807",
            rule=wrong(block.accepted, token.correction),
        ),
        Mutant(
            "candidates, a sample each",
            "each of several candidates is compared with its own sample of the target: several chances for one token",
            "foundation-model-stack/fms-extras#12",
            rule=tree(multidraft.independent, accept_any_match, without_first),
        ),
        Mutant(
            "top-k children, softmax q",
            "the children are the k most probable tokens, the ratio uses a distribution they were not drawn from",
            "SafeAILab/EAGLE#183; apple/ml-recurrent-drafter#6 (beams)",
            rule=tree(multidraft.top_k),
        ),
        Mutant(
            "end token missed in the block",
            "only the last token of a round is compared with the end token",
            "transformers#47912, PR 31301",
            cut=cut_if_last,
        ),
    ]
}
