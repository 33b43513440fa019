"""Many rounds of one rule at once, after one context: arrays instead of a loop.

Made for rules that decide token by token, as the token rule and most of `verify/mutants` do: whether a draft token is
kept depends on the laws at its position and on the token, and the token that follows depends on how many were kept.
All probabilities come from the rule's own two functions, called once for each position and token; what is left for
each round is a look-up in tables.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..distributions import inverse_cdf
from ..errors import SpecdecError
from ..verify import Verifier

SPENT = -1  # where a round has no token any more
TRIED = 16  # drafts at which the tables are compared with the rule


def one_round(rule: Verifier, p: np.ndarray, q: np.ndarray, random: Callable[[], float]) -> list[int]:
    """One round, draw by draw, as the decoder does it; what `simulate` does for many.

    Args:
        rule: any verifier.
        p: target laws `[g + 1, V]`, those of each position whatever is drafted before it.
        q: draft laws `[g, V]`.
        random: gives uniform numbers in [0, 1).

    Returns:
        1 to `g + 1` tokens: those that are kept, and the one that follows.
    """
    x = [inverse_cdf(law, random()) for law in q]
    n = inverse_cdf(np.array(rule.accepted(p, q, x), float), random())
    return [*x[:n], inverse_cdf(rule.correction(p, q, x, n), random())]


def simulate(rule: Verifier, p: np.ndarray, q: np.ndarray, rounds: int, rng: np.random.Generator) -> np.ndarray:
    """`rounds` independent rounds, each distributed as `one_round`.

    Args:
        rule: a verifier that decides token by token.
        p, q: as in `one_round`.
        rounds: how many.
        rng: of all draws.

    Returns:
        Tokens `[rounds, g + 1]`, `SPENT` after the last one of a round.

    Raises:
        SpecdecError: the rule looks at more than one draft token at a time, as block verification does.

    >>> from ..verify import VERIFIERS
    >>> p, q = np.array([[0.0, 1.0], [0.5, 0.5]]), np.array([[1.0, 0.0]])
    >>> simulate(VERIFIERS["token"], p, q, 2, np.random.default_rng(0)).tolist()  # 0 is refused, 1 replaces it
    [[1, -1], [1, -1]]
    """
    keep, follows = tables(rule, p, q, rng)
    tokens = np.full((len(p), rounds), SPENT)
    n = np.zeros(rounds, np.intp)
    going = np.ones(rounds, bool)
    for i, law in enumerate(q):
        x = draws(law, rng.random(rounds))
        going &= rng.random(rounds) < keep[i][x]
        np.copyto(tokens[i], x, where=going)
        n += going
    uniforms = rng.random(rounds)
    for kept, law in enumerate(follows):
        here = np.flatnonzero(n == kept)
        tokens[kept, here] = draws(law, uniforms[here])
    return tokens.T


def draws(law: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """`inverse_cdf` of many uniforms.

    >>> draws(np.array([0.0, 0.5, 0.0, 0.5, 0.0]), np.array([0.0, 0.49, 0.5, 0.99])).tolist()
    [1, 1, 3, 3]
    """
    cumulated = np.cumsum(law)
    found = np.searchsorted(cumulated, uniforms * cumulated[-1], side="right")
    return np.minimum(found, np.flatnonzero(law)[-1])  # only rounding can reach beyond the last possible token


def tables(
    rule: Verifier, p: np.ndarray, q: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Probability `[g, V]` that each token is kept at each position, and the law `[V]` after each number kept."""
    g, vocabulary = q.shape
    if p.shape != (g + 1, vocabulary):
        raise SpecdecError(
            f"draft laws of shape {q.shape} need target laws of shape {(g + 1, vocabulary)}, got {p.shape}"
        )
    tokens = range(vocabulary)
    keep = np.array([[rule.accepted(p[i : i + 2], q[i : i + 1], [x])[1] for x in tokens] for i in range(g)], float)
    follows = [np.asarray(rule.correction(p, q, q.argmax(-1).tolist(), n), float) for n in range(g + 1)]
    for _ in range(TRIED):
        x = [inverse_cdf(law, rng.random()) for law in q]
        reached = np.cumprod([1.0, *keep[range(g), x]])
        accepted = -np.diff(reached, append=0.0)
        same = np.allclose(accepted, np.array(rule.accepted(p, q, x), float), atol=1e-12)
        if not same or not all(np.allclose(follows[n], rule.correction(p, q, x, n), atol=1e-12) for n in range(g + 1)):
            raise SpecdecError(f"the rule {rule.name!r} does not decide token by token: use one_round for it")
    return keep, follows
