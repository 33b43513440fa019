"""Goodness of fit with everything fixed before the first sample: bins, level, power, sample size.

A law over finitely many outcomes is an array of probabilities; samples are counts of the same outcomes.  Bins depend
on *expected* counts only: bins chosen by what was observed would change the level of the test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from ..errors import SpecdecError
from ..validate import share

LEAST = 10  # expected count of a bin; the usual rule of 5 is made for level 0.05, ours go far below
FEWEST = 13  # samples that chi-squared needs at least, from scipy's documentation
ENUMERATED = 20_000  # outcomes of a multinomial that are summed one by one; beyond that they are drawn
DRAWS = 20_000  # of the Monte-Carlo test, whose p-value is never below 1 / (DRAWS + 1)
LARGEST = 10**9  # samples; what needs more is refused as unseeable


def checked_law(law: Sequence[float] | np.ndarray) -> np.ndarray:
    """The law as floats that sum to 1.

    Raises `SpecdecError` for what is no law; a sum within 1e-6 of 1 (float32 sums) is scaled.
    """
    try:
        p = np.asarray(law.detach().cpu() if hasattr(law, "detach") else law, float)
    except (TypeError, ValueError):
        raise SpecdecError("an expected law must be a list of numbers, one for each outcome, or a dict from outcome to "
                           "probability") from None  # fmt: skip
    if p.ndim != 1 or len(p) == 0:
        raise SpecdecError(f"an expected law must be a list of probabilities, got shape {p.shape}")
    if np.isnan(p).any():
        raise SpecdecError("the expected law has a NaN among its probabilities: check the logits that it came from")
    if (p < 0).any():
        raise SpecdecError(f"the expected law has a negative probability ({p.min():g}): give a law, not logits")
    total = p.sum()
    if not abs(total - 1) <= 1e-6:
        raise SpecdecError(f"the expected law sums to {total:g}, not to 1: normalise it, or add the missing outcomes")
    return p / total


# -- bins ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bins:
    """Which outcomes share a bin.

    Attributes:
        label: the bin of each outcome `[outcomes]`; -1 where the law has probability 0.
        law: probability of each bin.
        hidden: probability of the bin that several outcomes share, 0 if there is none: mass may move among them
            unseen, so a deviation of total variation `d` shows in the bins with at least `d - hidden`.
    """

    label: np.ndarray
    law: np.ndarray
    hidden: float

    def count(self, counts: np.ndarray) -> np.ndarray:
        """Counts of the bins; outcomes of probability 0 are left out."""
        seen = self.label >= 0
        return np.bincount(self.label[seen], counts[seen], len(self.law)).astype(np.int64)


def pool(law: np.ndarray, samples: int) -> Bins:
    """One bin for all outcomes expected fewer than `LEAST` times (and for more, until that bin reaches it too).

    >>> bins = pool(np.array([0.5, 0.4, 0.06, 0.04, 0.0]), samples=160)
    >>> bins.label.tolist(), bins.law.round(2).tolist(), round(bins.hidden, 2)
    ([1, 2, 0, 0, -1], [0.1, 0.5, 0.4], 0.1)
    """
    order = np.argsort(law, kind="stable")
    order = order[law[order] > 0]
    rare = int(np.searchsorted(law[order] * samples, LEAST))
    if rare:
        # all of these outcomes together must reach LEAST; rarer ones come first
        reached = int(np.searchsorted(np.cumsum(law[order]) * samples, LEAST)) + 1
        rare = min(max(rare, reached), len(order))
    label = np.full(len(law), -1)
    label[order[:rare]] = 0
    alone = np.flatnonzero((law > 0) & (label < 0))
    label[alone] = np.arange(len(alone)) + bool(rare)
    used = label >= 0
    masses = np.bincount(label[used], law[used])
    return Bins(label, masses, float(masses[0]) if rare > 1 else 0.0)


# -- the test ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """Counts against a law.

    Attributes:
        p_value: of the test; 0 where an outcome occurred that the law excludes.
        method: `chi-squared`, `exact multinomial`, `Monte-Carlo multinomial`, or `excluded outcome`.
        samples, bins: how many.
        variation: total variation between the observed frequencies and the law, over the bins.
        hidden: see `Bins`.
    """

    p_value: float
    method: str
    samples: int
    bins: int
    variation: float
    hidden: float

    def bound(self, level: float) -> float:
        """What the true total variation does not exceed, with confidence `1 - level`.

        `variation + sqrt(log(1 / level) / (2 N)) + hidden`.  The observed variation is on average at least the true
        one (it is convex in the frequencies) and one sample moves it by at most `1 / N`, so McDiarmid's inequality
        holds it from below; no approximation is made.
        """
        return min(1.0, self.variation + math.sqrt(math.log(1 / level) / (2 * self.samples)) + self.hidden)


def goodness_of_fit(counts: Sequence[int] | np.ndarray, law: Sequence[float] | np.ndarray, seed: int = 0) -> Fit:
    """Do the counts come from the law?

    Pearson's statistic on pooled bins, or on all outcomes where there are too few samples to make two bins.  Its law is
    summed over all tables of counts where those are few (exact), else taken from `scipy.stats.chisquare` where its
    conditions hold (pooled, more than 13 samples), else drawn.

    Args:
        counts: how often each outcome came up.
        law: probability of each outcome.
        seed: of the Monte-Carlo draws.

    >>> fit = goodness_of_fit([240, 260, 250, 250], [0.25] * 4)  # (10^2 + 10^2) / 250 = 0.8, three degrees of freedom
    >>> fit.method, round(fit.p_value, 3), round(fit.variation, 3)
    ('chi-squared', 0.849, 0.01)
    >>> fit = goodness_of_fit([3, 0], [0.5, 0.5])  # 8 equally likely triples, 2 of them as extreme
    >>> fit.method, round(fit.p_value, 3)
    ('exact multinomial', 0.25)
    """
    p, n = checked_law(law), np.asarray(counts)
    if n.shape != p.shape:
        raise SpecdecError(f"counts of shape {n.shape} do not fit a law of {len(p)} outcomes: count every outcome once")
    if not np.issubdtype(n.dtype, np.integer) or (n < 0).any() or n.sum() == 0:
        raise SpecdecError("counts must be whole numbers, none negative and not all 0")
    samples = int(n.sum())
    bins = pool(p, samples)
    outside = int(n[p == 0].sum())
    pooled = len(bins.law) >= 2 and samples > FEWEST
    if not pooled:
        keep = p > 0
        bins = Bins(np.where(keep, np.cumsum(keep) - 1, -1), p[keep], 0.0)
    observed = bins.count(n)
    variation = (float(abs(observed / samples - bins.law).sum()) + outside / samples) / 2
    if outside:
        p_value, method = 0.0, "excluded outcome"
    elif pooled and tables_of(samples, len(bins.law)) > ENUMERATED:
        from scipy.stats import chisquare

        p_value, method = float(chisquare(observed, bins.law * samples).pvalue), "chi-squared"
    else:
        p_value, method = small_sample(observed, bins.law, seed)
    return Fit(p_value, method, samples, len(bins.law), variation, bins.hidden)


def tables_of(samples: int, bins: int) -> int:
    """How many tables of counts there are.

    >>> tables_of(samples=2, bins=2)
    3
    """
    return math.comb(samples + bins - 1, bins - 1)


def small_sample(observed: np.ndarray, law: np.ndarray, seed: int) -> tuple[float, str]:
    """The chance of a chi-squared statistic at least as large, without its approximation."""
    samples, size = int(observed.sum()), len(law)
    expected = law * samples

    def at_least(tables: np.ndarray) -> np.ndarray:
        statistic = lambda table: ((table - expected) ** 2 / expected).sum(-1)  # noqa: E731
        return statistic(tables) >= statistic(observed) * (1 - 1e-12)  # equal tables may differ by rounding

    if tables_of(samples, size) <= ENUMERATED:
        from scipy.stats import multinomial

        tables = compositions(samples, size)
        weights = multinomial.pmf(tables, samples, law)
        return float(min(1.0, weights[at_least(tables)].sum())), "exact multinomial"
    draws = np.random.default_rng(seed).multinomial(samples, law, DRAWS)
    return (1 + int(at_least(draws).sum())) / (1 + DRAWS), "Monte-Carlo multinomial"


@lru_cache(maxsize=8)
def compositions(total: int, parts: int) -> np.ndarray:
    """Every way to write `total` as `parts` numbers >= 0, one a row.

    >>> compositions(2, 2).tolist()
    [[0, 2], [1, 1], [2, 0]]
    """
    places = total + parts - 1
    bars = np.array(list(combinations(range(places), parts - 1)), int)  # parts - 1 of the places part the others
    edges = np.pad(bars, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, places)))
    return np.diff(edges, axis=1) - 1


# -- power ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def noncentrality(bins: int, level: float, power: float) -> float:
    """What `N sum (p' - p)^2 / p` must be for chi-squared on so many bins to reject with probability `power`.

    >>> round(noncentrality(10, 1e-3, 0.99), 1)
    48.2
    """
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    critical = chi2.isf(level, bins - 1)
    if power <= level:
        return 0.0
    high = 1.0
    while ncx2.sf(critical, bins - 1, high) < power:
        high *= 2
    return float(brentq(lambda x: ncx2.sf(critical, bins - 1, x) - power, 0, high))


def visible_effect(law: np.ndarray, samples: int, level: float, power: float) -> float:
    """The least total variation that so many samples detect with probability `power`, whatever its shape.

    Among all deviations of total variation `d`, chi-squared sees those worst that move mass evenly between two
    halves of the law: `sum (p' - p)^2 / p >= d^2 (1 / P(A) + 1 / (1 - P(A))) >= 4 d^2` by Cauchy-Schwarz, `A` the
    outcomes that gain.  So `4 N d^2 = noncentrality`, and what the pooled bin may hide is added.  1 or more: none.

    >>> round(visible_effect(np.full(10, 0.1), samples=4_823, level=1e-3, power=0.99), 3)
    0.05
    """
    bins = pool(law, samples)
    if (law > 0).sum() == 1:  # certain: only excluded outcomes can be seen, and one is enough
        return float(1 - (1 - power) ** (1 / samples))
    if len(bins.law) < 2 or samples <= FEWEST:
        return math.inf
    return math.sqrt(noncentrality(len(bins.law), level, power) / (4 * samples)) + bins.hidden


def power_at(law: np.ndarray, samples: int, level: float, effect: float) -> float:
    """The probability of rejecting a deviation of total variation `effect`, at the least favourable shape."""
    from scipy.stats import chi2, ncx2

    if (law > 0).sum() == 1:
        return float(1 - (1 - effect) ** samples)
    bins = pool(law, samples)
    seen = effect - bins.hidden
    if len(bins.law) < 2 or samples <= FEWEST or seen <= 0:
        return 0.0
    dof = len(bins.law) - 1
    return float(ncx2.sf(chi2.isf(level, dof), dof, 4 * samples * seen**2))


def required_samples(law: Sequence[float] | np.ndarray, effect: float, level: float, power: float) -> int:
    """How many samples detect a total variation of `effect` at `level` with probability `power`, at any shape.

    >>> required_samples([0.1] * 10, effect=0.02, level=1e-3, power=0.99)
    30139
    """
    p = checked_law(law)
    for name, value in (("effect", effect), ("level", level), ("power", power)):
        share(name, value)
    enough = lambda n: visible_effect(p, n, level, power) <= effect  # noqa: E731
    high = 1
    while not enough(high):
        high *= 2
        if high > LARGEST:
            raise SpecdecError(f"an effect of {effect:g} would need more than {LARGEST:,} samples: name a larger one")
    low = high // 2  # too few, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# -- looking early -------------------------------------------------------------------------------------


def log_e_value(counts: np.ndarray, law: np.ndarray, effect: float) -> float:
    """Logarithm of an e-value for the law, which may be looked at after any number of samples.

    Probability of the samples under a Dirichlet mixture of laws around this one, over that under this one.  Where the
    law is right it is a martingale of mean 1, so that it ever exceeds `1 / level` has probability at most `level`
    (Ville), however often one looks.  Lindon and Malek, "Anytime-valid inference for multinomial count data"
    (NeurIPS 2022, arXiv 2011.03567).

    Args:
        counts, law: of the same outcomes, those of probability 0 left out.
        effect: the mixture is as wide as deviations of about this total variation.

    >>> p = np.array([0.5, 0.5])
    >>> [round(math.exp(log_e_value(np.array(n), p, effect=0.25)), 3) for n in ([0, 0], [1, 0], [2, 0])]
    [1.0, 1.0, 1.2]
    """
    from scipy.special import gammaln

    weight = max(len(law) - 1, 1) / (4 * effect**2)  # under it, sum (p' - p)^2 / p is 4 effect^2 on average
    a = weight * law
    mixture = gammaln(weight) - gammaln(weight + counts.sum()) + (gammaln(a + counts) - gammaln(a)).sum()
    return float(mixture - (counts * np.log(law)).sum())


def noise(law: Sequence[float] | np.ndarray, samples: int, share: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """How far the frequencies of a *correct* sampler are from its law: the middle `share` of `Fit.variation`, drawn.

    An observed total variation is never 0; only one beyond this range says something.

    >>> low, high = noise([0.5, 0.5], samples=100)  # |heads - 50| / 100, standard deviation 0.05
    >>> round(low, 1), round(high, 1)
    (0.0, 0.1)
    """
    bins = pool(checked_law(law), samples)
    observed = np.random.default_rng(seed).multinomial(samples, bins.law, 2_000) / samples
    low, high = np.quantile(abs(observed - bins.law).sum(1) / 2, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


# -- many tests ----------------------------------------------------------------------------------------


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: rejecting those up to `level` keeps the chance of any false rejection at `level`.

    The smallest is multiplied by m, the next by m - 1, ...; none is below the one before (Holm 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
