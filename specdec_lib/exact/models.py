"""Language models small enough to be written down: one next-token distribution for each prefix.

The probabilities are fractions, so everything computed from them is a proof, not a measurement.  They depend on the
whole prefix: this exposes a rule that mixes up positions or contexts, which equal distributions everywhere would hide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from ..distributions import Array
from ..errors import SpecdecError

Prefix: TypeAlias = tuple[int, ...]
Block: TypeAlias = tuple[Any, Prefix, Array]
"""Probability of a draft, its `g` tokens, and the `g + 1` distributions reported for them and for the next position."""

KINDS = ("stochastic", "deterministic", "partial", "identical")


def check_probs(probs: Array, vocabulary: int) -> None:
    """Raises `SpecdecError` unless `probs` is `vocabulary` numbers, none negative, that sum to 1 (floats: to 1e-9)."""
    if probs.shape != (vocabulary,):
        raise SpecdecError(f"next-token probabilities must have shape ({vocabulary},), got {probs.shape}")
    if not all(x >= 0 for x in probs.tolist()):  # also false for nan
        raise SpecdecError(f"next-token probabilities must not be negative, got {[str(x) for x in probs]}")
    if abs(probs.sum() - 1) > (0 if probs.dtype == object else 1e-9):
        raise SpecdecError(f"next-token probabilities must sum to 1, got {probs.sum()}: normalise them first")


@dataclass(frozen=True)
class TabularModel:
    """A language model given by a function from prefix to next-token distribution, computed once for each prefix.

    Attributes:
        vocabulary: number of tokens.
        rule: `prefix -> [V]`, the next-token probabilities: fractions (an object array) or floats.
        end: the token that ends a sequence, or None.

    >>> model = TabularModel(2, lambda prefix: fractions("1/4", "3/4") if 0 in prefix else fractions("1/2", "1/2"))
    >>> [str(x) for x in model.law((0, 1))]
    ['1/4', '3/4']
    """

    vocabulary: int
    rule: Callable[[Prefix], Array]
    end: int | None = None
    _table: dict[Prefix, Array] = field(default_factory=dict, repr=False, compare=False)

    def law(self, prefix: Prefix) -> Array:
        """The distribution `[V]` of the token after `prefix`."""
        if prefix not in self._table:
            probs = self.rule(prefix)
            check_probs(probs, self.vocabulary)
            self._table[prefix] = probs
        return self._table[prefix]

    def mapped(self, change: Callable[[Array], Array]) -> TabularModel:
        """The model whose distributions are `change(probs)`: another temperature, a filter, floats."""
        return TabularModel(self.vocabulary, lambda prefix: change(self.law(prefix)), self.end)


def constant_model(probs: Array, end: int | None = None) -> TabularModel:
    """The model that ignores its context.  Fine for single-token facts; some faults do not show with it."""
    return TabularModel(len(probs), lambda prefix: probs, end)


def fractions(*numbers: Any) -> Array:
    """An object array of fractions.

    >>> fractions("1/4", 0.75).tolist()
    [Fraction(1, 4), Fraction(3, 4)]
    """
    return np.array([Fraction(x) for x in numbers], dtype=object)


def random_model(vocabulary: int, seed: int, end: int | None = None, zeros: bool = False) -> TabularModel:
    """A model with random probabilities, fixed by `seed` and the prefix: whole numbers over one total.

    All prefixes share one total, because fractions with one small denominator stay small when many of them are
    multiplied and added; this makes exact sums about ten times as fast.

    Args:
        vocabulary: number of tokens, at least 2.
        seed: the same seed gives the same model.
        end: end token, or None.
        zeros: whether tokens may have probability 0 (about one in four has).
    """
    if vocabulary < 2:
        raise SpecdecError(f"a vocabulary needs at least 2 tokens, got {vocabulary}")
    total = 3 * vocabulary
    least = 0 if zeros else 1

    def rule(prefix: Prefix) -> Array:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        shares = rng.dirichlet(np.full(vocabulary, 0.4 if zeros else 1.0))
        weights = least + rng.multinomial(total - least * vocabulary, shares)
        return np.array([Fraction(w, total) for w in weights.tolist()], dtype=object)

    return TabularModel(vocabulary, rule, end)


def random_pair(kind: str, vocabulary: int, seed: int, end: int | None = None) -> tuple[TabularModel, TabularModel]:
    """A random target and a draft of one of the `KINDS`.

    * `stochastic`: both have full support;
    * `deterministic`: the draft is a point mass (a lookup, an n-gram table) that changes with the prefix;
    * `partial`: both have zeros, so the supports overlap only in part, and at some prefixes not at all;
    * `identical`: the draft is the target.
    """
    if kind not in KINDS:
        raise SpecdecError(f"unknown kind of pair {kind!r}: use one of {', '.join(KINDS)}")
    target = random_model(vocabulary, 2 * seed, end, zeros=kind == "partial")
    if kind == "identical":
        return target, target
    draft = random_model(vocabulary, 2 * seed + 1, end, zeros=kind == "partial")
    if kind == "deterministic":
        draft = draft.mapped(lambda q: (np.arange(vocabulary) == q.argmax()).astype(int) * Fraction(1))
    return target, draft


def never(probs: Array, token: int) -> bool:
    return False


@dataclass(frozen=True)
class Draft:
    """What draft tokens are drawn from, and separately what is reported about it.

    A correct drafter reports the distribution that it draws from.  With the two apart, a drafter's faults can be
    stated: an argmax draft scored as a softmax, or a filter that the report leaves out.

    Attributes:
        sampled_from: the model that tokens are drawn from.
        reported: the model whose distributions the verifier gets as `q`.
        stop: `(reported distribution, token) -> bool`: whether drafting ends with this token (adaptive draft length).
        drop: whether the token that ended the draft is dropped.  Keeping it is lossless; dropping it is not, because
            then the draft's length depends on a token that is never tested.
    """

    sampled_from: TabularModel
    reported: TabularModel
    stop: Callable[[Array, int], bool] = never
    drop: bool = False

    def blocks(self, prefix: Prefix, gamma: int) -> Iterator[Block]:
        """Every draft of up to `gamma` tokens after `prefix`, with its probability and reported distributions.

        Drafting ends after the end token of the model that is sampled from, if it has one.  There is one more row of
        distributions than tokens: the last is the draft's distribution at the next position, which is read only by a
        rule that draws its bonus token from it.
        """
        yield from self._extend(1, prefix, len(prefix), gamma, [])

    def _extend(self, weight: Any, text: Prefix, start: int, gamma: int, rows: list) -> Iterator[Block]:
        reported = self.reported.law(text)
        rows = [*rows, reported]
        if len(text) - start == gamma:
            yield weight, text[start:], stacked(rows)
            return
        ends = self.sampled_from.end
        for token, chance in enumerate(self.sampled_from.law(text).tolist()):
            if chance == 0:
                continue
            longer = (*text, token)
            stops = self.stop(reported, token)
            if stops and self.drop:
                yield weight * chance, text[start:], stacked(rows)
            elif stops or token == ends:
                yield weight * chance, longer[start:], stacked([*rows, self.reported.law(longer)])
            else:
                yield from self._extend(weight * chance, longer, start, gamma, rows)


def stacked(rows: list) -> Array:
    """Distributions as the rows of one numpy array; the loop is faster than `np.stack` on fractions."""
    result = np.empty((len(rows), len(rows[0])), dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        result[i] = row
    return result


def as_draft(draft: TabularModel | Draft) -> Draft:
    """A model as the draft that is drawn from it and reports it truly."""
    return draft if isinstance(draft, Draft) else Draft(draft, draft)
