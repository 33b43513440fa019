"""Language models small enough to be written down: one law of the next token for each prefix.

The laws are fractions, so that everything computed from them is a proof, not a measurement.  They depend on the
whole prefix: a rule that mixes up positions or contexts cannot hide, as it can when every position has the same law.
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
"""Probability of a draft, its `g` tokens, and the `g + 1` laws reported for them and for the position after."""

KINDS = ("stochastic", "deterministic", "partial", "identical")


def check_law(law: Array, vocabulary: int) -> None:
    """Raises `SpecdecError` unless `law` is `vocabulary` numbers, none negative, that sum to 1 (floats: to 1e-9)."""
    if law.shape != (vocabulary,):
        raise SpecdecError(f"a next-token law must have shape ({vocabulary},), got {law.shape}")
    if not all(x >= 0 for x in law.tolist()):  # also false for nan
        raise SpecdecError(f"a next-token law must be non-negative numbers, got {[str(x) for x in law]}")
    if abs(law.sum() - 1) > (0 if law.dtype == object else 1e-9):
        raise SpecdecError(f"a next-token law must sum to 1, got {law.sum()}: normalise it first")


@dataclass(frozen=True)
class TabularModel:
    """A language model given by a function from prefix to law, remembered once computed.

    Attributes:
        vocabulary: number of tokens.
        rule: `prefix -> law [V]`, fractions (an object array) or floats.
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
        """The law `[V]` of the token after `prefix`."""
        if prefix not in self._table:
            law = self.rule(prefix)
            check_law(law, self.vocabulary)
            self._table[prefix] = law
        return self._table[prefix]

    def mapped(self, change: Callable[[Array], Array]) -> TabularModel:
        """The model whose laws are `change(law)`: another temperature, a filter, floats."""
        return TabularModel(self.vocabulary, lambda prefix: change(self.law(prefix)), self.end)


def constant_model(law: Array, end: int | None = None) -> TabularModel:
    """The model that ignores its context.  Fine for single-token facts; several faults cannot be seen with it."""
    return TabularModel(len(law), lambda prefix: law, end)


def fractions(*numbers: Any) -> Array:
    """An object array of fractions.

    >>> fractions("1/4", 0.75).tolist()
    [Fraction(1, 4), Fraction(3, 4)]
    """
    return np.array([Fraction(x) for x in numbers], dtype=object)


def random_model(vocabulary: int, seed: int, end: int | None = None, zeros: bool = False) -> TabularModel:
    """A model whose law at each prefix is drawn from `seed` and the prefix: whole numbers over a common total.

    The total is the same at all prefixes because fractions with one small denominator stay small when many of them
    are multiplied and added; exact sums are an order of magnitude faster for it.

    Args:
        vocabulary: number of tokens, at least 2.
        seed: same seed, same model.
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
    * `partial`: both have zeros, so that supports overlap in part, and at some prefixes not at all;
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


def never(law: Array, token: int) -> bool:
    return False


@dataclass(frozen=True)
class Draft:
    """How draft tokens truly come about, apart from what is reported about it.

    A correct drafter reports the law that it draws from.  Keeping the two apart lets the drafter's faults be stated:
    an argmax draft scored as a softmax, a filter that the report leaves out.

    Attributes:
        sampled_from: the model that tokens are drawn from.
        reported: the model whose laws the verifier is given as `q`.
        stop: `(reported law, token) -> bool`: whether drafting ends with this token (adaptive draft length).
        drop: whether the token that ended it is thrown away.  Keeping it is exact; dropping it is not, because
            what is left was chosen by a look at the token.
    """

    sampled_from: TabularModel
    reported: TabularModel
    stop: Callable[[Array, int], bool] = never
    drop: bool = False

    def blocks(self, prefix: Prefix, gamma: int) -> Iterator[Block]:
        """Every draft of up to `gamma` tokens after `prefix`, with its probability and its reported laws.

        Drafting ends after the end token of the model that is sampled from, if it has one.  The laws have one row
        more than there are tokens; the last is the draft's law at the position after, which only a rule that
        draws its bonus token from it reads.
        """
        yield from self._extend(1, prefix, len(prefix), gamma, [])

    def _extend(self, weight: Any, text: Prefix, start: int, gamma: int, laws: list) -> Iterator[Block]:
        reported = self.reported.law(text)
        laws = [*laws, reported]
        if len(text) - start == gamma:
            yield weight, text[start:], stacked(laws)
            return
        ends = self.sampled_from.end
        for token, chance in enumerate(self.sampled_from.law(text).tolist()):
            if chance == 0:
                continue
            longer = (*text, token)
            stops = self.stop(reported, token)
            if stops and self.drop:
                yield weight * chance, text[start:], stacked(laws)
            elif stops or token == ends:
                yield weight * chance, longer[start:], stacked([*laws, self.reported.law(longer)])
            else:
                yield from self._extend(weight * chance, longer, start, gamma, laws)


def stacked(laws: list) -> Array:
    """Laws as the rows of one array."""
    rows = np.empty((len(laws), len(laws[0])), dtype=laws[0].dtype)
    for i, law in enumerate(laws):
        rows[i] = law
    return rows


def as_draft(draft: TabularModel | Draft) -> Draft:
    """A model as the drafter that draws from it and says so."""
    return draft if isinstance(draft, Draft) else Draft(draft, draft)
