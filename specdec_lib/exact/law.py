"""The exact law of what speculative decoding writes: no sampling, every branch summed.

A *law* is the exact probability distribution of a whole output: of all tokens that decoding writes, or that one round
writes.  The word is kept for this; for a single token the library says distribution, or probabilities.

A round is a sum over drafts, accepted lengths and correction tokens; decoding is a sum over rounds.  Prefixes are
visited from short to long, each once with all the probability that reaches it, so the work is the number of prefixes
times the number of drafts.  With fractions the result is a proof for the given models: a total variation of 0 is
exactly 0.  The functions of `verify/` are called unchanged: what is proved here is what the decoder runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from ..errors import SpecdecError
from ..validate import whole
from ..verify import Verifier, get_verifier
from ..verify.multidraft import TreeVerifier
from .models import Draft, Prefix, TabularModel, as_draft, stacked

SequenceLaw: TypeAlias = dict[Prefix, Any]
"""A law: the probability of each sequence.  Sequences of probability 0 are left out."""

Rule: TypeAlias = str | Verifier | TreeVerifier
Branch: TypeAlias = tuple[int, Prefix, Any]
"""Accepted length, emitted tokens, probability."""


# -- one round -----------------------------------------------------------------------------------------


def rounds_of(
    rule: Rule, target: TabularModel, draft: TabularModel | Draft
) -> Callable[[Prefix, int], Iterator[Branch]]:
    """The function `(prefix, gamma) -> every branch of one round`, for a chain or a tree of drafts."""
    drafter = as_draft(draft)
    if target.vocabulary != drafter.sampled_from.vocabulary:
        raise SpecdecError(
            f"target and draft must share a vocabulary, got {target.vocabulary} and {drafter.sampled_from.vocabulary}"
        )
    if isinstance(rule, TreeVerifier):
        return tree_rounds(rule, target, drafter)
    return chain_rounds(get_verifier(rule), target, drafter)


def chain_rounds(rule: Verifier, target: TabularModel, draft: Draft) -> Callable[[Prefix, int], Iterator[Branch]]:
    def branches(prefix: Prefix, gamma: int) -> Iterator[Branch]:
        for weight, x, q in draft.blocks(prefix, gamma):
            p = stacked([target.law(prefix + x[:i]) for i in range(len(x) + 1)])
            for n, chance in enumerate(rule.accepted(p, q, x)):
                if chance == 0:
                    continue
                for token, follows in enumerate(rule.correction(p, q, x, n).tolist()):
                    if follows != 0:
                        yield n, (*x[:n], token), weight * chance * follows

    return branches


def tree_rounds(rule: TreeVerifier, target: TabularModel, draft: Draft) -> Callable[[Prefix, int], Iterator[Branch]]:
    """A tree is a walk along the kept path, which draws children as it goes: those off the path never matter."""

    @cache
    def node(text: Prefix) -> tuple[dict[int, Any], dict[int, Any]]:
        """Probability of each token as the child that is kept, and as the token that ends the round."""
        p = target.law(text)
        kept: dict[int, Any] = {}
        ending: dict[int, Any] = {}
        for weight, candidates, q in rule.draw(draft.sampled_from.law(text), rule.children):
            *chances, none = rule.accepted(p, q, candidates)
            for token, chance in zip(candidates, chances, strict=True):
                kept[token] = kept.get(token, 0) + weight * chance
            if none != 0:
                for token, follows in enumerate(rule.correction(p, q, candidates).tolist()):
                    ending[token] = ending.get(token, 0) + weight * none * follows
        return kept, ending

    def branches(prefix: Prefix, gamma: int) -> Iterator[Branch]:
        def walk(n: int, text: Prefix, weight: Any) -> Iterator[Branch]:
            if n == gamma or (n > 0 and text[-1] == draft.sampled_from.end):
                kept: dict[int, Any] = {}
                ending = dict(enumerate(target.law(text).tolist()))
            else:
                kept, ending = node(text)
            for token, chance in ending.items():
                if chance != 0:
                    yield n, (*text[len(prefix) :], token), weight * chance
            for token, chance in kept.items():
                if chance != 0:
                    yield from walk(n + 1, (*text, token), weight * chance)

        yield from walk(0, prefix, 1)

    return branches


def merged(branches: Iterable[Branch]) -> dict[tuple[int, Prefix], Any]:
    law: dict[tuple[int, Prefix], Any] = {}
    for n, tokens, weight in branches:
        law[n, tokens] = law.get((n, tokens), 0) + weight
    return law


def round_law(
    verifier: Rule, target: TabularModel, draft: TabularModel | Draft, gamma: int, prefix: Prefix = ()
) -> dict[tuple[int, Prefix], Any]:
    """The law of one round after `prefix`: probability of each (accepted length, emitted tokens); nothing is cut.

    >>> from .models import constant_model, fractions
    >>> p, q = constant_model(fractions("1/3", "2/3")), constant_model(fractions("2/3", "1/3"))
    >>> {key: str(weight) for key, weight in round_law("token", p, q, gamma=1).items()}
    {(0, (1,)): '1/3', (1, (0, 0)): '1/9', (1, (0, 1)): '2/9', (1, (1, 0)): '1/9', (1, (1, 1)): '2/9'}
    """
    return merged(rounds_of(verifier, target, draft)(prefix, whole("gamma", gamma, remedy="0 is plain decoding")))


def accepted_law(
    verifier: Rule, target: TabularModel, draft: TabularModel | Draft, gamma: int, prefix: Prefix = ()
) -> list:
    """The exact distribution of the accepted length of one round after `prefix`: `gamma + 1` numbers.

    >>> from .models import constant_model, fractions
    >>> p, q = constant_model(fractions("1/3", "2/3")), constant_model(fractions("2/3", "1/3"))
    >>> for rule in ("token", "block"):
    ...     print(rule, sum(n * chance for n, chance in enumerate(accepted_law(rule, p, q, gamma=2))))
    token 10/9
    block 11/9
    """
    law = [0] * (gamma + 1)
    for (n, _), weight in round_law(verifier, target, draft, gamma, prefix).items():
        law[n] += weight
    return law


# -- many rounds ---------------------------------------------------------------------------------------


def cut_after_end(tokens: Prefix, end: int | None) -> Prefix:
    """The tokens up to the first end token, which is included.

    >>> cut_after_end((3, 1, 0, 2), end=1)
    (3, 1)
    """
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@dataclass(frozen=True)
class OutputLaw:
    """The law of the output of decoding, and the expected number of rounds.

    Attributes:
        sequences: probability of each output; an output is shorter than asked for only if it ends in the end token.
        rounds: expected number of rounds, one target pass each.
        histogram: expected number of rounds with `n` accepted tokens, `n = 0..gamma`, before anything is cut.
    """

    sequences: SequenceLaw
    rounds: Any
    histogram: list

    @property
    def tokens(self) -> Any:
        """Expected number of tokens in the output."""
        return sum(len(sequence) * weight for sequence, weight in self.sequences.items())

    @property
    def tokens_per_pass(self) -> Any:
        """Expected tokens over expected target passes: the limit of the block efficiency over many runs."""
        return self.tokens / self.rounds

    @property
    def accepted(self) -> list:
        """The distribution of the accepted length of a round that is picked at random from all rounds of many runs."""
        return [count / self.rounds for count in self.histogram]


def output_law(
    verifier: Rule,
    target: TabularModel,
    draft: TabularModel | Draft,
    gamma: int,
    length: int,
    *,
    cap: bool = False,
    cut: Callable[[Prefix, int | None], Prefix] = cut_after_end,
) -> OutputLaw:
    """The exact law of a whole output: as many rounds as it takes, end token and trimming included.

    Args:
        verifier: name of a verifier, a `Verifier`, or a `TreeVerifier` (then `gamma` is the depth of the tree).
        target: the model whose law is expected.
        draft: a model, or a `Draft` if the reported distributions differ from those that are drawn from.
        gamma: draft length, at least 0.
        length: number of tokens asked for; an end token ends a sequence earlier.
        cap: whether the last rounds draft no more than can be used, as in `transformers`; else each round drafts
            `gamma` tokens and tokens past `length` are trimmed.  The rounds differ, the law is the same.
        cut: `(tokens of a round, end token) -> ` the tokens that are kept.

    Returns:
        An `OutputLaw`; its numbers are fractions when the models' are.

    Raises:
        SpecdecError: a rule whose probabilities do not sum to 1; arguments out of range.

    >>> from .models import random_pair
    >>> target, draft = random_pair("stochastic", vocabulary=3, seed=0)
    >>> law = output_law("block", target, draft, gamma=2, length=4)
    >>> str(distance(law.sequences, target_law(target, 4)))
    '0'
    """
    if length < 1:
        raise SpecdecError(f"the length must be at least 1, got {length}")
    branches = rounds_of(verifier, target, draft)
    reached: list[SequenceLaw] = [{} for _ in range(length)]
    reached[0][()] = 1
    done: SequenceLaw = {}
    rounds: Any = 0
    histogram: list[Any] = [0] * (whole("gamma", gamma, remedy="0 is plain decoding") + 1)
    for size in range(length):
        remaining = length - size
        for prefix, mass in reached[size].items():
            rounds = rounds + mass
            drafted = min(gamma, remaining - 1) if cap else gamma
            for (n, tokens), weight in merged(branches(prefix, drafted)).items():
                histogram[n] = histogram[n] + mass * weight
                text = prefix + cut(tokens, target.end)[:remaining]
                finished = len(text) == length or text[-1] == target.end
                place = done if finished else reached[len(text)]
                place[text] = place.get(text, 0) + mass * weight
        reached[size].clear()
    total = sum(done.values())
    if abs(total - 1) > (1e-9 if isinstance(total, float) else 0):
        name = verifier if isinstance(verifier, str) else verifier.name
        raise SpecdecError(f"the rule {name!r} gives probabilities that sum to {total}: `accepted` and `correction` "
                           "must each sum to 1")  # fmt: skip
    return OutputLaw(done, rounds, histogram)


def target_law(target: TabularModel, length: int) -> SequenceLaw:
    """The law of plain decoding: products of the target's next-token probabilities, up to `length` or the end token."""
    law: SequenceLaw = {(): 1}
    for _ in range(length):
        longer: SequenceLaw = {}
        for text, weight in law.items():
            if text and text[-1] == target.end:
                longer[text] = weight
                continue
            for token, chance in enumerate(target.law(text).tolist()):
                if chance != 0:
                    longer[*text, token] = weight * chance
        law = longer
    return law


def distance(a: SequenceLaw, b: SequenceLaw) -> Any:
    """Total variation, `1/2 sum |a - b|` over all sequences.

    >>> distance({(0,): 0.5, (1,): 0.5}, {(0,): 1.0})
    0.5
    """
    return sum((abs(a.get(s, 0) - b.get(s, 0)) for s in a.keys() | b.keys()), start=0) / 2
