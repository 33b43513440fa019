"""Probability vectors: sharpening, truncation, overlap, residual.

Each function is written once and works on torch tensors, numpy arrays and numpy object arrays of
`fractions.Fraction`, along the last axis.  Where a function needs an exponential (`softmax`) it takes floats
only; everything the proofs use is rational.

Letters as in Leviathan, Kalman, Matias (arXiv 2211.17192): `p` is the target's distribution, `q` the draft's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from .errors import SpecdecError

Array: TypeAlias = Any
"""A torch tensor, a numpy array, or a numpy object array of fractions; probabilities along the last axis."""


def is_torch(a: Array) -> bool:
    """Whether `a` is a torch tensor or of a subclass; torch is not imported for this."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(a, torch.Tensor)


def positive_part(a: Array) -> Array:
    """`max(a, 0)`, elementwise."""
    return a.clamp(min=0) if is_torch(a) else np.maximum(a, 0)


def minimum(a: Array, b: Array) -> Array:
    """`min(a, b)`, elementwise."""
    return a.minimum(b) if is_torch(a) else np.minimum(a, b)


def maximum(a: Array) -> Array:
    """The largest entry along the last axis, which stays as an axis of length 1."""
    return a.amax(-1, keepdim=True) if is_torch(a) else a.max(-1, keepdims=True)


def argmax(a: Array) -> Array:
    """The index of the first maximum along the last axis; for a tensor, a tensor on its device.

    >>> int(argmax(np.array([0.2, 0.4, 0.4])))
    1
    """
    if not is_torch(a) or a.device.type != "cpu":
        return a.argmax(-1)
    import torch

    a = a.detach() if a.dtype == torch.float64 else a.detach().float()
    return torch.as_tensor(a.numpy().argmax(-1))  # torch's own takes about twenty times as long on a CPU


def where(condition: Array, a: Array, b: Array) -> Array:
    """`a` where the condition holds, else `b`, elementwise."""
    if not is_torch(a):
        return np.where(condition, a, b)
    if (
        condition.device.type == "cpu" and condition.numel() == 1
    ):  # reading it on a CPU costs no wait, and nothing is copied
        return a if condition else b
    return a.where(condition, b)


def total(a: Array) -> Array:
    """The sum along the last axis, which stays as an axis of length 1."""
    return a.sum(-1, keepdim=True) if is_torch(a) else a.sum(-1, keepdims=True)


def joined(*parts: Array) -> Array:
    """Concatenate vectors of one kind; a plain number counts as a vector of length 1."""
    like = next(a for a in parts if hasattr(a, "shape"))
    if is_torch(like):
        import torch

        return torch.cat([a if is_torch(a) else like.new_full((1,), a) for a in parts])
    return np.concatenate([a if hasattr(a, "shape") else np.array([a], like.dtype) for a in parts])


def products(a: Array) -> Array:
    """`a_1, a_1 a_2, ...`."""
    return a.cumprod(-1) if is_torch(a) else np.multiply.accumulate(a, -1)


def stacked(rows: Sequence[Array]) -> Array:
    """Stack vectors of one kind as the rows of a matrix."""
    if is_torch(rows[0]):
        import torch

        return torch.stack(list(rows))
    return np.stack(list(rows))


def reverse(a: Array) -> Array:
    """A vector from its last entry to its first."""
    return a.flip(-1) if is_torch(a) else a[::-1]


def normalise(weights: Array) -> Array:
    """`w / sum(w)` along the last axis.

    A sum of 0 is an error.  For torch tensors it gives NaN instead: checking would mean waiting for the device.

    >>> from fractions import Fraction as F
    >>> [str(x) for x in normalise(np.array([F(1), F(2), F(1)]))]
    ['1/4', '1/2', '1/4']
    """
    sums = total(weights)
    if not is_torch(weights) and (sums == 0).any():
        raise SpecdecError("cannot normalise a vector whose sum is 0: at least one entry must be positive")
    return weights / sums


def one_hot(index: Array, like: Array) -> Array:
    """Point masses at `index` [...], shaped and typed like `like` [..., V]."""
    if is_torch(like):
        return like.new_zeros(like.shape).scatter_(-1, index[..., None], 1)
    result = np.zeros_like(like)
    np.put_along_axis(result, np.asarray(index)[..., None], like.dtype.type(1) if like.dtype != object else 1, -1)
    return result


# -- from logits to the distribution that is sampled ---------------------------------------------------


def softmax(logits: Array, temperature: float = 1.0) -> Array:
    """`exp(z / T) / sum exp(z / T)`; at `T = 0` the point mass on the first maximum.

    Args:
        logits: floats `[..., V]`; minus infinity means probability 0.
        temperature: T >= 0.

    >>> softmax(np.log([0.5, 0.3, 0.2])).round(3).tolist()
    [0.5, 0.3, 0.2]
    >>> softmax(np.array([1.0, 3.0, 2.0]), temperature=0).tolist()
    [0.0, 1.0, 0.0]
    """
    if temperature == 0:
        return one_hot(argmax(logits), logits)
    if is_torch(logits):
        return (logits / temperature if temperature != 1 else logits).softmax(-1)
    z = (logits - logits.max(-1, keepdims=True)) / temperature
    return normalise(np.exp(z))


def temper(p: Array, temperature: Any) -> Array:
    """The distribution `p` at another temperature: `p^(1/T) / sum p^(1/T)`.

    Under fractions the power `1/T` must be a whole number, so that the result is again rational.

    >>> from fractions import Fraction as F
    >>> [str(x) for x in temper(np.array([F(2, 3), F(1, 3)]), F(1, 2))]
    ['4/5', '1/5']
    """
    if temperature == 0:
        return one_hot(argmax(p), p)
    power = 1 / temperature
    if p.dtype == object:
        if power != int(power):
            raise SpecdecError(
                f"exact arithmetic needs a whole 1/temperature, got 1/{temperature}: use 1, 1/2, 1/3, ..."
            )
        power = int(power)
    return normalise(p**power)


def keep_top_k(p: Array, k: int) -> Array:
    """Keep the `k` most probable tokens (and those that tie with the last of them); renormalise.

    >>> keep_top_k(np.array([0.5, 0.3, 0.2]), 2).round(3).tolist()
    [0.625, 0.375, 0.0]
    """
    if k >= p.shape[-1]:
        return p
    ordered = p.topk(k, -1).values if is_torch(p) else -np.sort(-p, -1)
    threshold = ordered[..., k - 1 : k]
    return normalise(p * (p >= threshold))


def keep_top_p(p: Array, mass: Any) -> Array:
    """Keep the smallest set of most probable tokens whose mass reaches `mass` (nucleus); renormalise.

    The token that crosses the boundary is kept.  Among equally probable tokens the lower index goes first.

    >>> keep_top_p(np.array([0.5, 0.3, 0.2]), 0.6).round(3).tolist()
    [0.625, 0.375, 0.0]
    """
    if mass >= 1:
        return p
    if is_torch(p):
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        keep = (ordered.cumsum(-1) - ordered) < mass
        return normalise(p * keep.new_zeros(p.shape).scatter(-1, order, keep))
    order = np.argsort(-p, axis=-1, kind="stable")
    ordered = np.take_along_axis(p, order, -1)
    kept = np.zeros(p.shape, bool)
    np.put_along_axis(kept, order, (ordered.cumsum(-1) - ordered) < mass, -1)
    return normalise(p * kept)


def keep_min_p(p: Array, share: Any) -> Array:
    """Keep the tokens whose probability is at least `share` times the largest one; renormalise.

    >>> keep_min_p(np.array([0.5, 0.3, 0.2]), 0.5).round(3).tolist()
    [0.625, 0.375, 0.0]
    """
    return normalise(p * (p >= share * maximum(p)))


def warp(
    logits: Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Array:
    """The distribution that is sampled: temperature, then top-k, top-p and min-p, in the order of `transformers`.

    Args:
        logits: floats `[..., V]`.
        temperature: T >= 0; 0 is the point mass on the maximum.
        top_k: keep that many tokens (>= 1), None keeps all.
        top_p: nucleus mass in (0, 1], None keeps all.
        min_p: share of the largest probability in [0, 1], None keeps all.

    >>> warp(np.log([0.5, 0.3, 0.2]), temperature=0.5, top_k=2).round(3).tolist()
    [0.735, 0.265, 0.0]
    """
    p = softmax(logits, temperature)
    if temperature == 0:
        return p
    if top_k is not None:
        p = keep_top_k(p, top_k)
    if top_p is not None:
        p = keep_top_p(p, top_p)
    if min_p is not None:
        p = keep_min_p(p, min_p)
    return p


# -- two distributions ---------------------------------------------------------------------------------


def overlap(p: Array, q: Array) -> Array:
    """`sum_x min(p(x), q(x))`: the probability that a token drawn from q is kept (Theorem 3.5).

    >>> from fractions import Fraction as F
    >>> str(overlap(np.array([F(1, 3), F(2, 3)]), np.array([F(2, 3), F(1, 3)])))
    '2/3'
    """
    return minimum(p, q).sum(-1)


def total_variation(p: Array, q: Array) -> Array:
    """`1/2 sum_x |p(x) - q(x)|`, which is `1 - overlap` for two distributions (Lemma 3.3).

    >>> round(float(total_variation(np.array([0.5, 0.5]), np.array([0.9, 0.1]))), 3)
    0.4
    """
    return abs(p - q).sum(-1) / 2


def residual(p: Array, q: Array) -> Array:
    """`max(p - q, 0) / sum max(p - q, 0)`: the distribution of the token that replaces a rejected one.

    If p and q are equal, nothing is ever rejected, and p is returned.

    >>> residual(np.array([0.5, 0.3, 0.2]), np.array([0.7, 0.1, 0.2])).tolist()
    [0.0, 1.0, 0.0]
    """
    excess = positive_part(p - q)
    left = total(excess)
    return where(left > 0, excess / (left + (left == 0)), p)


# -- drawing -------------------------------------------------------------------------------------------


def inverse_cdf(probs: Array, uniform: Any) -> Any:
    """The token that `uniform` in [0, 1) selects: the first whose cumulated probability exceeds it.

    Sums in float64.  A token of probability 0 is never returned, not even for a uniform of 0.

    Args:
        probs: `[V]`, with any sum above 0.
        uniform: a float.

    Returns:
        An int; for a torch tensor, a tensor `[]` on its device, so that the host does not wait.

    >>> [inverse_cdf(np.array([0.0, 0.5, 0.0, 0.5]), u) for u in (0.0, 0.49, 0.5, 0.99)]
    [1, 1, 3, 3]
    """
    # rounding can make `uniform * sum` equal to the sum: then take the last token with a positive probability
    if is_torch(probs):
        import torch

        cumulated = probs.cumsum(-1, dtype=torch.float64)
        last = torch.searchsorted(cumulated, cumulated[-1:])
        index = torch.searchsorted(cumulated, cumulated[-1:] * uniform, right=True)
        return index.minimum(last).clamp(max=len(probs) - 1)[0]  # with NaN the search ends past the vector: cut
    cumulated = np.cumsum(np.asarray(probs, float))
    index = np.searchsorted(cumulated, uniform * cumulated[-1], side="right")
    return int(min(index, np.searchsorted(cumulated, cumulated[-1])))
