"""The exhaustive run behind the claim "the output law is the target's": how many cases, and which of them failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ..distributions import Array, temper
from ..exact.law import Rule, distance, output_law, target_law
from ..exact.models import KINDS, Draft, TabularModel, random_pair
from ..verify.multidraft import recursive

LOSSLESS: dict[str, Rule] = {
    "token": "token",
    "block": "block",
    "greedy": "greedy",
    "tree, 2 independent": recursive(2, "independent"),
    "tree, 2 without replacement": recursive(2, "without_replacement"),
    "tree, 3 without replacement": recursive(3, "without_replacement"),
    "tree, 2 point masses": recursive(2, "point_masses"),
}
CHAINS = ("token", "block", "greedy")


def unlikely(law: Array, token: int) -> bool:
    """A confidence threshold: less than a third."""
    return bool(3 * law[token] < 1)


def drafters(target: TabularModel, draft: TabularModel) -> Iterator[tuple[str, TabularModel | Draft]]:
    """The draft as it is; stopping after an unlikely token; and, where there is an end token, drafting past it."""
    yield "fixed length", draft
    yield "adaptive length", Draft(draft, draft, stop=unlikely)
    if target.end is not None:
        yield "past the end", TabularModel(draft.vocabulary, draft.rule)


@dataclass(frozen=True)
class Proof:
    """What was computed.

    Attributes:
        cases: exact output laws compared with the target's.
        sequences: probabilities compared, over all cases.
        failures: the cases whose total variation is not the number 0.
    """

    cases: int
    sequences: int
    failures: list[str]


def prove(
    vocabularies: Sequence[int] = (2, 3, 4),
    gammas: Sequence[int] = (1, 2, 3, 4),
    seeds: Sequence[int] = (0,),
    rules: Sequence[str] = tuple(LOSSLESS),
    limit: int = 100_000,
) -> Proof:
    """Compares output laws in fractions, for every rule, vocabulary, gamma, kind of pair, end token and drafter.

    Each combination is decoded to every length up to `gamma + 3` with the last rounds capped, and once with trimming,
    to `gamma + 3` tokens or as many as `limit` allows.

    Args:
        vocabularies, gammas, seeds: the grid; each seed is another random context-dependent pair of models.
        rules: names from `LOSSLESS`.
        limit: largest number of drafts that a trimmed case may sum over.  It binds at vocabulary 4 and gamma 4 alone,
            where 7 tokens would take 1.4 million and 5 are decoded instead.

    >>> proof = prove(vocabularies=[2], gammas=[1], rules=["block"])
    >>> proof.cases, proof.failures
    (100, [])
    """
    cases = sequences = 0
    failures = []
    for vocabulary, gamma, seed, kind in product(vocabularies, gammas, seeds, KINDS):
        for end in (None, 0):
            target, draft = random_pair(kind, vocabulary, seed, end)
            coldest = target.mapped(lambda p: temper(p, 0))
            lengths = range(1, gamma + 4)
            affordable = [n for n in lengths if sum(vocabulary**s for s in range(n)) * vocabulary**gamma <= limit]
            settings = [(length, True) for length in lengths] + [(max(affordable, default=1), False)]
            expected = {
                (cold, length): target_law(coldest if cold else target, length)
                for cold, (length, _) in product((False, True), settings)
            }
            for name, (length, cap) in product(rules, settings):
                plain = expected[name == "greedy", length]
                for manner, drafter in drafters(target, draft):
                    if manner == "adaptive length" and name not in CHAINS:
                        continue
                    law = output_law(LOSSLESS[name], target, drafter, gamma, length, cap=cap).sequences
                    cases += 1
                    sequences += len(plain)
                    if distance(law, plain) != 0:
                        where = f"vocabulary {vocabulary}, gamma {gamma}, {length} tokens, cap {cap}, end {end}"
                        failures.append(f"{name}: {kind} pair, seed {seed}, {manner}, {where}")
    return Proof(cases, sequences, failures)
