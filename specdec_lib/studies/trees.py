"""What a token tree could give: several continuations checked in one target pass, judged on text that is there.

A tree has at each node up to `k` children, tried in order; a *path* is a tuple of child numbers, `(0, 2)` being the
third child of the first child.  The tree is a set of paths that holds every path's parent; the chain of `n` draft
tokens is the tree `(0,), (0, 0), ...`.  What a decoder with a tree mask would write can be told without one, because
of a lossless rule the text is known: it is the target's own.  At token `i` of such a text let

    w[i, j] = P(the j-th child is kept | the token written is the text's)

for a node that stands before token `i` on the path of kept tokens, where the text's own prefix is the context.  Then
the path `(j_1, ..., j_d)` from token `i` on is kept with probability `w[i, j_1] w[i + 1, j_2] ... w[i + d - 1, j_d]`,
and a recursion over the text gives the number of rounds exactly (`rounds`).

* Greedy, or with the `k` most probable tokens as children (point masses): `w` is 0 or 1, the rank of the text's token
  (`by_rank`).
* Recursive rejection with children drawn without replacement, the law of which is in `verify/multidraft`:
  `without_replacement`.
* Drafts that are chains drawn independently, as `generate(drafts=k)` has them: how many of them go on is a number that
  the text's own tokens lead from one value to the next (`independent_chains`).

Used by `notebooks/12_beyond_the_paper`; `tests/test_trees.py` and `tests/test_several.py` compare it with `exact/` and
with the decoder.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import comb
from random import Random
from typing import TypeAlias

import numpy as np
import torch

from ..distributions import Array, inverse_cdf, normalise, overlap, residual
from ..errors import SpecdecError
from ..models.session import Session
from ..verify.token import to_scalar

Path: TypeAlias = tuple[int, ...]


# -- one position --------------------------------------------------------------------------------------


def by_rank(scores: np.ndarray, tokens: Sequence[int], k: int) -> np.ndarray:
    """`w` `[n, k]` for children that are the draft's `k` most probable tokens, each a point mass.

    Args:
        scores: the draft's logits or probabilities `[n, V]` at each token of the text.
        tokens: the text `[n]`.

    >>> by_rank(np.array([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3]]), [2, 0], k=2).tolist()
    [[0.0, 1.0], [0.0, 0.0]]
    """
    order = np.argsort(-np.asarray(scores), axis=-1, kind="stable")[:, :k]
    return (order == np.asarray(tokens)[:, None]).astype(float)


def kept_as(p: Array, q: Array, token: int, rejected: Sequence[int]) -> list:
    """`P(child j + 1 is kept and is `token` | the children before it are the first j of `rejected`)`, `j = 0, 1, ...`.

    Children are drawn from `q` without replacement and tried by recursive rejection.  The chance that those before
    are rejected is a factor; the draw of the child itself is summed, not drawn.

    Args:
        p, q: laws `[V]` of target and draft, numpy.
        rejected: `k - 1` different tokens.

    Returns:
        `k` numbers.

    >>> from fractions import Fraction as F
    >>> p, q = np.array([F(1, 2), F(1, 2), F(0)]), np.array([F(1, 4), F(1, 4), F(1, 2)])
    >>> [str(a) for a in kept_as(p, q, 0, [2])]  # 2 is always rejected; then p = q = (1/2, 1/2)
    ['1/4', '1/2']
    """
    chances, reached = [min(to_scalar(p[token]), to_scalar(q[token]))], 1
    for x in rejected:
        p_x, q_x = to_scalar(p[x]), to_scalar(q[x])
        reached = reached * (1 - min(1, p_x / q_x)) if q_x else 0
        rest = q.copy()
        rest[x] = 0
        if not reached or not rest.any():
            return chances + [0] * (len(rejected) + 1 - len(chances))
        p, q = residual(p, q), normalise(rest)
        chances.append(reached * min(to_scalar(p[token]), to_scalar(q[token])))
    return chances


def without_replacement(
    p: np.ndarray, q: np.ndarray, tokens: Sequence[int], k: int, random: Random, draws: int = 8
) -> np.ndarray:
    """`w` `[n, k]` for recursive rejection with children drawn from `q` without replacement.

    The first column is exact, `min(1, q / p)`; in the others the children that are rejected before are drawn, and
    the rest is summed: unbiased, and independent from token to token, so that products along a path are unbiased.

    Args:
        p, q: laws `[n, V]` at each token of the text.
        tokens: the text `[n]`, drawn from `p`.
        draws: how many sequences of rejected children are averaged.
    """
    w = np.zeros((len(tokens), k))
    draws = draws if k > 1 else 1
    for i, token in enumerate(tokens):
        for _ in range(draws):
            chances = kept_as(p[i], q[i], token, drawn(q[i], k - 1, random))
            w[i, : len(chances)] += chances
        w[i] /= draws * p[i, token]
    return w


def drawn(q: np.ndarray, k: int, random: Random) -> list[int]:
    """`k` different tokens from `q`, one after the other, or as many as `q` has."""
    q, tokens = q.copy(), []
    for _ in range(min(k, int(np.count_nonzero(q)))):
        tokens.append(inverse_cdf(q, random.random()))
        q[tokens[-1]] = 0
    return tokens


# -- a whole text --------------------------------------------------------------------------------------


def joined(texts: Sequence[np.ndarray]) -> np.ndarray:
    """The `w` of several texts in one array, `[tokens, k]`.

    The last token of a text is always the target's own, since a round ends with one; so nothing is kept there, and
    no path runs from one text into the next.
    """
    ended = [np.vstack([w[:-1], np.zeros_like(w[-1:])]) for w in texts]
    if not ended:
        raise SpecdecError("no text to judge a tree on: give at least one")
    return np.concatenate(ended)


def along(w: np.ndarray, path: Path) -> np.ndarray:
    """`P(path is kept)` for a round that starts at each token, `[tokens]`."""
    kept = np.ones(len(w))
    for depth, child in enumerate(path):
        kept[: len(w) - depth] *= w[depth:, child]
        kept[len(w) - depth :] = 0
    return kept


def reach(w: np.ndarray, tree: Sequence[Path]) -> np.ndarray:
    """`P(at least d tokens are kept)` for a round that starts at each token and `d = 1, 2, ...`: `[tokens, depth]`."""
    result = np.zeros((len(w), max(map(len, tree), default=0)))
    for path in tree:
        result[:, len(path) - 1] += along(w, path)
    return result


def independent_chains(p: np.ndarray, q: np.ndarray, tokens: Sequence[int], k: int, depth: int) -> np.ndarray:
    """`reach` `[n, depth]` of `k` drafts of `depth` tokens, each a chain drawn from `q` by itself: exact.

    Where `m` chains go on, the text's token is kept as the `j`-th of them if those before were refused; then none of
    those had it, and of the `m - j` behind it each has it with probability `q`.  With `k = 1` it is the token rule.

    Args:
        p, q: laws `[n, V]` at each token of one text.
        tokens: the text `[n]`, drawn from `p`.

    >>> p, q = np.array([[0.5, 0.5]] * 2), np.array([[0.75, 0.25]] * 2)
    >>> independent_chains(p, q, [1, 1], k=1, depth=1).tolist()  # q / p; a text's last token is never kept
    [[0.5], [0.0]]
    >>> independent_chains(p, q, [1, 1], k=2, depth=1).tolist()  # refused as 0, what is left of p is 1
    [[0.625], [0.0]]
    """
    result = np.zeros((len(tokens), depth))
    kept = np.zeros((depth + 1, k))  # kept[d, m - 1]: m chains that go on from here keep at least d tokens
    kept[0] = 1
    for i in reversed(range(len(tokens) - 1)):
        kept[1:] = kept[:-1] @ going_on(p[i], q[i], tokens[i], k).T
        result[i] = kept[1:, -1]
    return result


def going_on(p: np.ndarray, q: np.ndarray, token: int, k: int) -> np.ndarray:
    """P(`token` is kept and `others` more chains go on | `m` came here and `token` is written) at `[m - 1, others]`."""
    written, chance, reached = float(p[token]), float(q[token]), 1.0
    found = np.zeros((k, k))
    for tried in range(k):
        first = reached * min(float(p[token]), chance) / written
        for behind in range(k - tried):
            for others in range(behind + 1):
                binomial = comb(behind, others) * chance**others * (1 - chance) ** (behind - others)
                found[tried + behind, others] += first * binomial
        reached *= 1 - float(overlap(p, q))
        p = residual(p, q)
    return found


def rounds(reach: np.ndarray) -> np.ndarray:
    """The probability that a round starts at each token, `[tokens]`; their sum is the expected number of rounds.

    A round that starts at token `i` and keeps `n` writes `n + 1` tokens, so the next one starts at `i + n + 1`.

    >>> rounds(np.array([[1.0], [0.0], [0.5], [0.0]])).tolist()  # both of the first two; then 1 or 2
    [1.0, 0.0, 1.0, 0.5]
    """
    tokens, depth = reach.shape
    law = np.hstack([np.ones((tokens, 1)), reach, np.zeros((tokens, 1))])
    law = law[:, :-1] - law[:, 1:]
    starts = np.zeros(tokens + depth + 1)
    starts[0] = 1
    for i in range(tokens):
        starts[i + 1 : i + depth + 2] += starts[i] * law[i]
    return starts[:tokens]


def chain(length: int) -> list[Path]:
    """The tree of one branch.

    >>> chain(3)
    [(0,), (0, 0), (0, 0, 0)]
    """
    return [(0,) * depth for depth in range(1, length + 1)]


def best_tree(w: np.ndarray, nodes: int, depth: int | None = None) -> list[Path]:
    """The tree of `nodes` nodes that keeps most tokens on average over all tokens as starts, best node first.

    It is chosen on the text that it is judged on, and for starts anywhere: an optimistic choice of a fixed tree.
    A node never keeps more than its parent, so the best nodes are found by always adding the best one in reach.

    Args:
        depth: the deepest node, None for any.

    >>> w = np.array([[0.5, 0.4], [0.5, 0.4], [0.0, 0.0]])
    >>> best_tree(w, 3)
    [(0,), (1,), (0, 0)]
    """
    deepest = len(w) if depth is None else min(depth, len(w))
    tree: list[Path] = []
    queue: list[tuple[float, Path]] = []

    def offer_children(path: Path) -> None:
        if len(path) < deepest:
            for child in range(w.shape[1]):
                heapq.heappush(queue, (-float(along(w, (*path, child)).mean()), (*path, child)))

    offer_children(())
    while queue and len(tree) < nodes:
        tree.append(heapq.heappop(queue)[1])
        offer_children(tree[-1])
    return tree


# -- trees that the draft shapes -----------------------------------------------------------------------


def confident(session: Session, prefix: list[int], text: Sequence[int], nodes: int) -> tuple[list[int], list[int]]:
    """When the nodes on the path of `text` join the tree that the draft would grow after `prefix`.

    The tree grows as in EAGLE-2 (arXiv 2406.16858): always by the node that is most probable by the draft's own laws.

    Args:
        session: of the draft; holds any prefix of `prefix`, and is left holding all of it.
        text: the tokens that truly follow.
        nodes: how far the tree grows.

    Returns:
        `joins`: for each depth that is kept the number, from 1, of its node in the order of joining; `[3, 7]` says
        that a tree of 3 to 6 nodes keeps one token, and one of 7 or more keeps two.  `depths`: how deep the tree is
        with 1, 2, ..., `nodes` nodes, which is how often a draft must run one after the other.
    """
    session.rollback(min(session.length, len(prefix) - 1))
    joins: list[int] = []
    depths = [0]
    queue: list[tuple[float, Path]] = [(0.0, ())]
    for size in range(nodes + 1):  # the root comes first and is no draft token
        cost, path = heapq.heappop(queue)
        if path:
            depths.append(max(depths[-1], len(path)))
            if path == tuple(text[: len(path)]):
                joins.append(size)
        if size == nodes:
            break
        session.rollback(min(session.length, len(prefix)))
        fresh = torch.tensor([[*prefix[session.length :], *path]], device=session.device)
        scores = session.feed(fresh)[0, -1].float().log_softmax(-1)
        best = scores.topk(min(nodes, len(scores)))
        for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            heapq.heappush(queue, (cost - score, (*path, token)))
    session.rollback(len(prefix))
    return joins, depths[1:]


def reach_of_joins(joins: Sequence[Sequence[int]], nodes: int) -> np.ndarray:
    """What trees grown by `confident` to `nodes` nodes keep, in the form of `reach`: `[tokens, depth]` of 0 and 1.

    >>> reach_of_joins([[3, 7], [], [1]], nodes=5).tolist()
    [[1.0], [0.0], [1.0]]
    """
    kept = [sum(join <= nodes for join in one) for one in joins]
    return (np.arange(1, max(kept, default=0) + 1) <= np.array(kept)[:, None]).astype(float)
