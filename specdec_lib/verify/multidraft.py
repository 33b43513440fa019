"""Several draft tokens at one position: recursive rejection, with three ways of drawing the candidates.

A tree of drafts has `k` children at each node.  At a node the rule keeps one child, whose subtree goes on, or
none, and then one more token ends the round.  That is a rule of one position, and it has its own small interface:

* `p` `[V]`: the target's law at the node;
* `candidates`: the tokens of the children, in the order in which they are tried;
* `q` `[k, V]`: the law that each candidate is said to have been drawn from;
* `accepted(p, q, candidates)` -> `[P(first is kept), ..., P(k-th is kept), P(none is kept)]`;
* `correction(p, q, candidates)` -> the law `[V]` of the token that ends the round when none is kept.

How the candidates come about is the third part, `draw(q, k)`: every possible list of candidates with its
probability and its reported laws, so that the exact room can sum over them.  A round that keeps a child at each of
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
"""Probability, candidates, the laws `[k, V]` that they are said to be drawn from."""


@dataclass(frozen=True)
class TreeVerifier:
    """A rule for several candidates at one position; see the module's text for the shapes.

    Attributes:
        name: as users write it.
        children: k, the number of candidates at each node.
        draw: `(q, k)` -> every `(probability, candidates, reported laws)`.
        accepted: `(p, q, candidates)` -> `k + 1` numbers that sum to 1, the last for "none".
        correction: `(p, q, candidates)` -> law `[V]`.
        lossless: whether the output law is the target's.
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
    """Try the candidates in order: keep with `min(1, p(x) / q(x))`, else `p <- residual(p, q)` and go on.

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
    laws, chances = np.stack([q] * k), q.tolist()
    for candidates in product(np.flatnonzero(q).tolist(), repeat=k):
        yield math.prod(chances[x] for x in candidates), candidates, laws


def without_replacement(q: Array, k: int) -> Iterator[Draw]:
    """`k` different tokens: after each draw its token is struck out and the law renormalised, and so reported.

    Where `q` has fewer than `k` tokens with positive probability, there are that many candidates.

    >>> [(w, x, laws[1].tolist()) for w, x, laws in without_replacement(np.array([0.5, 0.5]), 2)]
    [(0.5, (0, 1), [0.0, 1.0]), (0.5, (1, 0), [1.0, 0.0])]
    """

    def extend(weight: Any, candidates: tuple[int, ...], laws: list) -> Iterator[Draw]:
        law = laws[-1]
        for x, chance in enumerate(law.tolist()):
            if chance == 0:
                continue
            chosen = (*candidates, x)
            rest = law.copy()
            rest[x] = 0
            if len(chosen) == k or not rest.any():
                yield weight * chance, chosen, np.stack(laws)
            else:
                yield from extend(weight * chance, chosen, [*laws, normalise(rest)])

    yield from extend(1, (), [q])


def top_k(q: Array, k: int) -> Iterator[Draw]:
    """The `k` most probable tokens, always the same, yet reported as drawn from `q`.

    This is what makes recursive rejection wrong: nothing was drawn from the law that the ratio uses.  Reported as
    the point masses that they are (`point_masses`), the same candidates are verified exactly.

    >>> [(w, x) for w, x, _ in top_k(np.array([0.2, 0.5, 0.3]), 2)]
    [(1, (1, 2))]
    """
    candidates = tuple(np.argsort(-q, kind="stable")[:k].tolist())
    yield 1, candidates, np.stack([q] * len(candidates))


def point_masses(q: Array, k: int) -> Iterator[Draw]:
    """The `k` most probable tokens, each reported as the point mass that it is."""
    for weight, candidates, laws in top_k(q, k):
        ones = np.zeros_like(laws)
        ones[range(len(candidates)), candidates] = 1
        yield weight, candidates, ones


DRAWS = {"independent": independent, "without_replacement": without_replacement, "point_masses": point_masses}


def recursive(children: int = 2, draw: str = "independent") -> TreeVerifier:
    """Recursive rejection with `children` candidates at each node, drawn as `draw` says; exact for all of them.

    Args:
        children: k >= 1; with 1 it is the token rule.
        draw: one of `DRAWS`.

    >>> recursive(2, "without_replacement").lossless
    True
    """
    if children < 1:
        raise SpecdecError(f"a node needs at least one child, got children={children}")
    if draw not in DRAWS:
        raise SpecdecError(f"unknown way to draw candidates {draw!r}: use one of {', '.join(DRAWS)}")
    source = "RSD, arXiv 2402.14160" if draw == "without_replacement" else "SpecInfer, arXiv 2305.09781"
    return TreeVerifier(f"recursive({children}, {draw})", children, DRAWS[draw], accepted, correction, True, source)
