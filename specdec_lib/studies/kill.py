"""The kill matrix: every mutant of `verify/mutants` against the checks that people use, and against the exact one.

Rows are faults (and a few correct rules, which no check may reject); columns are checks:

| column | what is done | whose check it is |
|---|---|---|
| `exact` | total variation of the whole output law, in fractions, on small context-dependent models | ours |
| `joint` | chi-squared on samples of whole outputs from the same models | ours, where enumeration ends |
| `first_token` | chi-squared on samples of the first token, gamma = 1, fixed p and q | unit tests of several peers |
| `convergence` | distance of a histogram to the target, over that to random laws | vLLM's sampler test |
| `greedy` | at temperature 0 the text equals plain decoding's | transformers, and nearly everybody |

Samples are drawn from the exact law of the rule under test, which is what a faithful simulation of it would draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..distributions import softmax, temper
from ..exact.law import OutputLaw, SequenceLaw, cut_after_end, distance, output_law, round_law, target_law
from ..exact.models import Draft, TabularModel, constant_model, fractions, never, random_pair
from ..verify import VERIFIERS
from ..verify.multidraft import recursive
from ..verify.mutants import MUTANTS, Mutant

if TYPE_CHECKING:
    import pandas as pd

CHECKS = ("exact", "joint", "first_token", "convergence", "greedy")

CONTROLS = {
    m.name: m
    for m in [
        Mutant("correct: token", "", "", rule=VERIFIERS["token"]),
        Mutant("correct: block", "", "", rule=VERIFIERS["block"]),
        Mutant("correct: tree, independent", "", "", rule=recursive(2, "independent")),
        Mutant("correct: tree, without replacement", "", "", rule=recursive(2, "without_replacement")),
    ]
}

GAMMA, LENGTH, END = 2, 4, 0
PAIRS = (("stochastic", 3, 1, None), ("stochastic", 3, 2, END), ("partial", 3, 5, None))
"""Kind, vocabulary, seed and end token of the models that `exact` and `joint` use, with `GAMMA` and `LENGTH`.

Each earns its place: full supports; an end token inside a block; a draft that proposes what the target excludes.
"""

P = fractions("1/4", "1/6", "5/12", "1/6")
Q = fractions("8/31", "8/31", "8/31", "7/31")


def shipped(mutant: Mutant) -> bool:
    """Whether the fault was in code that people used, and changed what it wrote.

    Not so where it was constructed, asked for and refused, or without effect in the decoder in which it was seen.

    >>> sum(map(shipped, MUTANTS.values())), len(MUTANTS)
    (16, 21)
    """
    return not any(word in mutant.reference for word in ("constructed", "refused", "harmless there", "exact there"))


# -- a mutant in the enumerator ------------------------------------------------------------------------


def drafter(mutant: Mutant, draft: TabularModel) -> Draft:
    """The drafter as the mutant makes it: drawn from one law, reported as another, perhaps dropping a token."""
    drops = mutant.drops
    return Draft(draft.mapped(mutant.drawn), draft.mapped(mutant.reported), drops or never, drop=drops is not None)


def mutant_law(mutant: Mutant, target: TabularModel, draft: TabularModel, gamma: int, length: int) -> OutputLaw:
    """The exact output law under the fault.

    >>> p, q = constant_model(P), constant_model(Q)
    >>> wrong = mutant_law(MUTANTS["resampled from p"], p, q, gamma=1, length=1)
    >>> round(float(distance(wrong.sequences, target_law(p, 1))), 4)
    0.0925
    """
    scored = target.mapped(mutant.scored)
    cut = mutant.cut or cut_after_end
    return output_law(mutant.rule, scored, drafter(mutant, draft), gamma, length, cut=cut)


# -- the checks ----------------------------------------------------------------------------------------


def draw_counts(law: dict[Any, Any], samples: int, rng: np.random.Generator) -> dict[Any, int]:
    """How often each outcome comes up in `samples` independent draws from `law`."""
    weights = np.array([float(w) for w in law.values()])
    return dict(zip(law, rng.multinomial(samples, weights / weights.sum()).tolist(), strict=True))


def chi_squared(counts: dict[Any, int], law: SequenceLaw) -> float:
    """p-value of the counts under `law`; outcomes expected fewer than 5 times share one bin, chosen by expectation.

    An outcome that the law excludes refutes it: p-value 0.
    """
    from scipy.stats import chisquare

    samples = sum(counts.values())
    if any(n and law.get(outcome, 0) == 0 for outcome, n in counts.items()):
        return 0.0
    expected = np.array([float(w) * samples for w in law.values()])
    observed = np.array([counts.get(outcome, 0) for outcome in law])
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
    return float(chisquare(observed, expected).pvalue) if len(expected) > 1 else 1.0


def exact_variation(mutant: Mutant, pairs: Sequence[tuple[TabularModel, TabularModel]]) -> list:
    """Total variation from the target's law, a fraction for each pair."""
    return [
        distance(mutant_law(mutant, target, draft, GAMMA, LENGTH).sequences, target_law(target, LENGTH))
        for target, draft in pairs
    ]


def joint_p_value(
    mutant: Mutant, pairs: Sequence[tuple[TabularModel, TabularModel]], samples: int, rng: np.random.Generator
) -> float:
    """Smallest p-value over the pairs, times their number (Bonferroni)."""
    values = []
    for target, draft in pairs:
        law = mutant_law(mutant, target, draft, GAMMA, LENGTH).sequences
        values.append(chi_squared(draw_counts(law, samples, rng), target_law(target, LENGTH)))
    return min(1.0, len(pairs) * min(values))


def first_token_p_value(mutant: Mutant, samples: int, rng: np.random.Generator) -> float:
    target, draft = constant_model(P), constant_model(Q)
    law = mutant_law(mutant, target, draft, gamma=1, length=1).sequences
    return chi_squared(draw_counts(law, samples, rng), target_law(target, 1))


def convergence_ratio(mutant: Mutant, rng: np.random.Generator) -> float:
    """How much more a histogram approaches the target than it approaches random laws; the test asks for 20.

    After vLLM's description: vocabulary 10, two draft tokens, laws that are a softmax of uniforms, the tokens of
    all drafted positions pooled and the bonus token left out, 10 to 100,000 rounds, L2 distance, and the ratio of
    the first distance to the last, for the target over 100 reference laws.
    """
    vocabulary, gamma, sizes = 10, 2, (10, 100_000)
    q, p, *_ = laws = softmax(rng.random((102, vocabulary)))
    reference = laws[2:]
    target, draft = constant_model(p).mapped(mutant.scored), drafter(mutant, constant_model(q))
    law = round_law(mutant.rule, target, draft, gamma)
    distances = []
    for rounds in sizes:
        histogram = np.zeros(vocabulary)
        for (_, tokens), count in draw_counts(law, rounds, rng).items():
            for token in tokens[:gamma]:
                histogram[token] += count
        histogram /= histogram.sum()
        distances.append((np.linalg.norm(histogram - p), np.linalg.norm(histogram - reference)))
    (first, first_reference), (last, last_reference) = distances
    return float(first / last / (first_reference / last_reference))


def greedy_matches(mutant: Mutant, prompts: int, rng: np.random.Generator) -> int:
    """How many of `prompts` random models give plain greedy text at temperature 0, with an end token among them."""
    matches = 0
    for seed in range(prompts):
        target, draft = random_pair("stochastic", 3, 100 + seed, END)
        target, draft = target.mapped(lambda p: temper(p, 0)), draft.mapped(lambda q: temper(q, 0))
        (text,) = target_law(target, LENGTH)
        law = mutant_law(mutant, target, draft, GAMMA, LENGTH).sequences
        matches += bool(rng.random() < law.get(text, 0))
    return matches


# -- the matrix ----------------------------------------------------------------------------------------


def kill_matrix(samples: int = 30_000, level: float = 1e-3, prompts: int = 8, seed: int = 0) -> pd.DataFrame:
    """Which check rejects which fault.

    Args:
        samples: outputs drawn for `joint` (for each pair of models) and first tokens for `first_token`.
        level: significance level of both chi-squared tests.
        prompts: texts that `greedy` compares.
        seed: of all draws.

    Returns:
        A frame with one row a fault, correct rules first.  Columns: `fault`, `reference`; a boolean `True` =
        rejected for each of `CHECKS`; and what the verdicts rest on: `variation` (the largest exact total
        variation, as a float), `joint_p`, `first_token_p`, `convergence_ratio` (rejected up to 20),
        `greedy_matches` (rejected below `prompts`).
    """
    import pandas as pd

    pairs = [random_pair(*pair) for pair in PAIRS]
    rows = {}
    for i, mutant in enumerate([*CONTROLS.values(), *MUTANTS.values()]):
        rng = np.random.default_rng([seed, i])
        variation = exact_variation(mutant, pairs)
        joint = joint_p_value(mutant, pairs, samples, rng)
        first = first_token_p_value(mutant, samples, rng)
        ratio = convergence_ratio(mutant, rng)
        matches = greedy_matches(mutant, prompts, rng)
        rows[mutant.name] = {
            "fault": mutant.fault,
            "reference": mutant.reference,
            "exact": any(v != 0 for v in variation),
            "joint": joint < level,
            "first_token": first < level,
            "convergence": ratio <= 20,
            "greedy": matches < prompts,
            "variation": float(max(variation)),
            "joint_p": joint,
            "first_token_p": first,
            "convergence_ratio": ratio,
            "greedy_matches": matches,
        }
    return pd.DataFrame.from_dict(rows, orient="index")
