"""Several draft tokens at one position: recursive rejection, with three ways of drawing the candidates.

A tree of drafts has `k` children at each node.  At a node the rule keeps one child and goes on in its subtree, or it
keeps none, and one more token ends the round.  So the rule concerns one position, and has its own small interface:

* `p` `[V]`: the target's distribution at the node;
* `candidates`: the tokens of the children, in the order in which they are tried;
* `q` `[k, V]`: the distribution reported for each candidate: what it is said to be drawn from;
* `accepted(p, q, candidates)` -> `[P(first is kept), ..., P(k-th is kept), P(none is kept)]`;
* `correction(p, q, candidates)` -> the distribution `[V]` of the token that ends the round when none is kept.

The third part is `draw(q, k)`, how candidates are drawn: it yields every possible list of candidates with its
probability and its reported distributions, so that `exact/` can sum over them.  A round that keeps a child at each of
its `gamma` levels ends with a bonus token from the target, as a chain does.

Recursive rejection is SpecInfer's multi-step sampling, stated for independent candidates (arXiv 2305.09781, theorem
4.2).  For candidates drawn without replacement it is RSD (Jeon et al., arXiv 2402.14160).  SpecTr (arXiv 2310.15141)
sees the step as optimal transport.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from ..distributions import Array, is_torch, normalise, residual, stacked
from ..errors import SpecdecError
from .token import acceptance_prob, as_numbers

Draw: TypeAlias = tuple[Any, tuple[int, ...], Array]
"""Probability, candidates, the distributions `[k, V]` that they are said to be drawn from."""


@dataclass(frozen=True)
class TreeVerifier:
    """A rule for several candidates at one position; the module's docstring has the shapes.

    Attributes:
        name: the name that users write.
        children: k, the number of candidates at each node.
        draw: `(q, k)` -> every `(probability, candidates, reported distributions)`.
        accepted: `(p, q, candidates)` -> `k + 1` numbers that sum to 1, the last for "none".
        correction: `(p, q, candidates)` -> distribution `[V]`.
        lossless: whether the output distribution is the target's.
        source: the publication that states the rule.
    """

    name: str
    children: int
    draw: Callable[[Array, int], Iterator[Draw]]
    accepted: Callable[[Array, Array, Sequence[int]], list]
    correction: Callable[[Array, Array, Sequence[int]], Array]
    lossless: bool
    source: str


# -- the rule ------------------------------------------------------------------------------------------


def accepted(p: Array, q: Array, candidates: Sequence[int]) -> list:
    """Try the candidates in order: keep one with `min(1, p(x) / q(x))`, else `p <- residual(p, q)` and try the next.

    >>> from fractions import Fraction as F
    >>> p, q = np.array([F(1, 2), F(1, 2), F(0)]), np.array([[F(1, 4), F(1, 4), F(1, 2)]] * 2)
    >>> [str(a) for a in accepted(p, q, (2, 0))]
    ['0', '1', '0']
    """
    chances, reached = [], 1 + 0 * p[0]
    for x, q_i in zip(candidates, q, strict=True):
        a = acceptance_prob(p[x], q_i[x])
        chances.append(reached * a)
        reached = reached * (1 - a)
        p = residual(p, q_i)
    return as_numbers(vector([*chances, reached], p))


def correction(p: Array, q: Array, candidates: Sequence[int]) -> Array:
    """What is left of `p` after all `k` residuals."""
    for q_i in q:
        p = residual(p, q_i)
    return p


def vector(numbers: list, like: Array) -> Array:
    """Numbers as a vector of the kind of `like`."""
    return stacked(numbers) if is_torch(like) else np.array(numbers, like.dtype)


# -- how candidates are drawn --------------------------------------------------------------------------


def independent(q: Array, k: int) -> Iterator[Draw]:
    """`k` draws from `q`, each reported as drawn from `q`; the same token may come twice.

    >>> [(w, x) for w, x, _ in independent(np.array([0.5, 0.5]), 2)]
    [(0.25, (0, 0)), (0.25, (0, 1)), (0.25, (1, 0)), (0.25, (1, 1))]
    """
    reported, chances = np.stack([q] * k), q.tolist()
    for candidates in product(np.flatnonzero(q).tolist(), repeat=k):
        yield math.prod(chances[x] for x in candidates), candidates, reported


def without_replacement(q: Array, k: int) -> Iterator[Draw]:
    """`k` different tokens: each is drawn from `q` without the earlier ones, renormalised, and reported so.

    If `q` has fewer than `k` tokens with positive probability, there are only that many candidates.

    >>> [(w, x, reported[1].tolist()) for w, x, reported in without_replacement(np.array([0.5, 0.5]), 2)]
    [(0.5, (0, 1), [0.0, 1.0]), (0.5, (1, 0), [1.0, 0.0])]
    """

    def extend(weight: Any, candidates: tuple[int, ...], reported: list) -> Iterator[Draw]:
        probs = reported[-1]
        for x, chance in enumerate(probs.tolist()):
            if chance == 0:
                continue
            chosen = (*candidates, x)
            rest = probs.copy()
            rest[x] = 0
            if len(chosen) == k or not rest.any():
                yield weight * chance, chosen, np.stack(reported)
            else:
                yield from extend(weight * chance, chosen, [*reported, normalise(rest)])

    yield from extend(1, (), [q])


def top_k(q: Array, k: int) -> Iterator[Draw]:
    """The `k` most probable tokens, always the same, but reported as drawn from `q`.

    This makes recursive rejection wrong: the candidates were not drawn from the distribution in the ratio.  Reported as
    point masses (`point_masses`), the same candidates are verified exactly.

    >>> [(w, x) for w, x, _ in top_k(np.array([0.2, 0.5, 0.3]), 2)]
    [(1, (1, 2))]
    """
    candidates = tuple(np.argsort(-q, kind="stable")[:k].tolist())
    yield 1, candidates, np.stack([q] * len(candidates))


def point_masses(q: Array, k: int) -> Iterator[Draw]:
    """The `k` most probable tokens, each reported as a point mass."""
    for weight, candidates, reported in top_k(q, k):
        ones = np.zeros_like(reported)
        ones[range(len(candidates)), candidates] = 1
        yield weight, candidates, ones


DRAWS = {"independent": independent, "without_replacement": without_replacement, "point_masses": point_masses}


def recursive(children: int = 2, draw: str = "independent") -> TreeVerifier:
    """Recursive rejection with `children` candidates at each node; lossless for every `draw`.

    Args:
        children: k >= 1; with 1 it is the token rule.
        draw: how candidates are drawn, one of `DRAWS`.

    >>> recursive(2, "without_replacement").lossless
    True
    """
    if children < 1:
        raise SpecdecError(f"a node needs at least one child, got children={children}")
    if draw not in DRAWS:
        raise SpecdecError(f"unknown way to draw candidates {draw!r}: use one of {', '.join(DRAWS)}")
    source = "RSD, arXiv 2402.14160" if draw == "without_replacement" else "SpecInfer, arXiv 2305.09781"
    return TreeVerifier(f"recursive({children}, {draw})", children, DRAWS[draw], accepted, correction, True, source)
