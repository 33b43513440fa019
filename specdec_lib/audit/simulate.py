"""Many rounds of one rule after one context, with arrays instead of a loop.

For rules that decide token by token, as the token rule and most of `verify/mutants` do: whether a draft token is kept
depends on the distributions at its position and on the token, and the token that follows depends on how many were kept.
All probabilities come from the rule's own two functions, called once for each position and token; a round is then only
a look-up in tables.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..distributions import inverse_cdf
from ..errors import SpecdecError
from ..verify import Verifier

SPENT = -1  # fills positions after a round's last token
TRIED = 16  # random drafts on which the tables are compared with the rule


def one_round(rule: Verifier, p: np.ndarray, q: np.ndarray, random: Callable[[], float]) -> list[int]:
    """One round, draw by draw, as in the decoder; `simulate` does the same for many rounds.

    Args:
        rule: any verifier.
        p: target distributions `[g + 1, V]`; the same for every draft.
        q: draft distributions `[g, V]`.
        random: gives uniform numbers in [0, 1).

    Returns:
        1 to `g + 1` tokens: the kept ones, and the one that follows.
    """
    x = [inverse_cdf(probs, random()) for probs in q]
    n = inverse_cdf(np.array(rule.accepted(p, q, x), float), random())
    return [*x[:n], inverse_cdf(rule.correction(p, q, x, n), random())]


def simulate(rule: Verifier, p: np.ndarray, q: np.ndarray, rounds: int, rng: np.random.Generator) -> np.ndarray:
    """`rounds` independent rounds, each with the distribution of `one_round`.

    Args:
        rule: a verifier that decides token by token.
        p, q: as in `one_round`.
        rounds: how many.
        rng: the generator for all draws.

    Returns:
        Tokens `[rounds, g + 1]`, `SPENT` after the last one of a round.

    Raises:
        SpecdecError: the rule does not decide token by token, for example block verification.

    >>> from ..verify import VERIFIERS
    >>> p, q = np.array([[0.0, 1.0], [0.5, 0.5]]), np.array([[1.0, 0.0]])
    >>> simulate(VERIFIERS["token"], p, q, 2, np.random.default_rng(0)).tolist()  # 0 is refused, 1 replaces it
    [[1, -1], [1, -1]]
    """
    keep, follows = tables(rule, p, q, rng)
    tokens = np.full((len(p), rounds), SPENT)
    n = np.zeros(rounds, np.intp)
    going = np.ones(rounds, bool)
    for i, probs in enumerate(q):
        x = draws(probs, rng.random(rounds))
        going &= rng.random(rounds) < keep[i][x]
        np.copyto(tokens[i], x, where=going)
        n += going
    uniforms = rng.random(rounds)
    for kept, probs in enumerate(follows):
        here = np.flatnonzero(n == kept)
        tokens[kept, here] = draws(probs, uniforms[here])
    return tokens.T


def draws(probs: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """`inverse_cdf` of many uniforms.

    >>> draws(np.array([0.0, 0.5, 0.0, 0.5, 0.0]), np.array([0.0, 0.49, 0.5, 0.99])).tolist()
    [1, 1, 3, 3]
    """
    cumulated = np.cumsum(probs)
    found = np.searchsorted(cumulated, uniforms * cumulated[-1], side="right")
    return np.minimum(found, np.flatnonzero(probs)[-1])  # rounding may exceed the last possible token


def tables(
    rule: Verifier, p: np.ndarray, q: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The probability `[g, V]` to keep each token; for each number of kept ones the distribution `[V]` of the next."""
    g, vocabulary = q.shape
    if p.shape != (g + 1, vocabulary):
        raise SpecdecError(
            f"draft distributions of shape {q.shape} need target distributions of shape {(g + 1, vocabulary)}, "
            f"got {p.shape}"
        )
    tokens = range(vocabulary)
    keep = np.array([[rule.accepted(p[i : i + 2], q[i : i + 1], [x])[1] for x in tokens] for i in range(g)], float)
    follows = [np.asarray(rule.correction(p, q, q.argmax(-1).tolist(), n), float) for n in range(g + 1)]
    for _ in range(TRIED):
        x = [inverse_cdf(probs, rng.random()) for probs in q]
        reached = np.cumprod([1.0, *keep[range(g), x]])
        accepted = -np.diff(reached, append=0.0)
        same = np.allclose(accepted, np.array(rule.accepted(p, q, x), float), atol=1e-12)
        if not same or not all(np.allclose(follows[n], rule.correction(p, q, x, n), atol=1e-12) for n in range(g + 1)):
            raise SpecdecError(f"the rule {rule.name!r} does not decide token by token: use one_round for it")
    return keep, follows
