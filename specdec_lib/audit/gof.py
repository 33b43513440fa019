"""Goodness of fit with everything fixed before the first sample: bins, level, power, sample size.

The expected law of finitely many outcomes (texts, say; see `exact.law`) is an array of probabilities; samples are
counts of the same outcomes.  Bins depend on *expected* counts only: bins that depend on the observed counts would
change the level of the test.
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

LEAST_EXPECTED = 10  # least expected count of a bin; the usual 5 is meant for level 0.05, our levels are far lower
LEAST_SAMPLES = 13  # chi-squared needs more samples than this, from scipy's documentation
ENUMERATED = 20_000  # the most outcomes of a multinomial that are summed one by one; more are sampled
MONTE_CARLO_DRAWS = 20_000  # so the p-value of the Monte-Carlo test is at least 1 / (MONTE_CARLO_DRAWS + 1)
MOST_SAMPLES = 10**9  # an effect that needs more is refused


def checked_law(law: Sequence[float] | np.ndarray) -> np.ndarray:
    """The law as floats that sum to 1.

    Raises `SpecdecError` if it is not one; a sum within 1e-6 of 1 (float32 sums) is scaled to 1.
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
    """The assignment of outcomes to bins.

    Attributes:
        label: the bin of each outcome `[outcomes]`; -1 for probability 0.
        law: probability of each bin.
        hidden: probability of the bin that several outcomes share, 0 if there is none.  A shift of mass within that bin
            is not seen, so a deviation of total variation `d` has at least `d - hidden` over the bins.
    """

    label: np.ndarray
    law: np.ndarray
    hidden: float

    def count(self, counts: np.ndarray) -> np.ndarray:
        """Counts of the bins, without outcomes of probability 0."""
        seen = self.label >= 0
        return np.bincount(self.label[seen], counts[seen], len(self.law)).astype(np.int64)


def pool(law: np.ndarray, samples: int) -> Bins:
    """One bin for all outcomes expected fewer than `LEAST_EXPECTED` times, and for more until the bin reaches it.

    >>> bins = pool(np.array([0.5, 0.4, 0.06, 0.04, 0.0]), samples=160)
    >>> bins.label.tolist(), bins.law.round(2).tolist(), round(bins.hidden, 2)
    ([1, 2, 0, 0, -1], [0.1, 0.5, 0.4], 0.1)
    """
    order = np.argsort(law, kind="stable")
    order = order[law[order] > 0]
    rare = int(np.searchsorted(law[order] * samples, LEAST_EXPECTED))
    if rare:
        # the shared bin itself must reach LEAST_EXPECTED; it takes the rarest outcomes
        reached = int(np.searchsorted(np.cumsum(law[order]) * samples, LEAST_EXPECTED)) + 1
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
    """The result of a test of counts against a law.

    Attributes:
        p_value: the p-value; 0 if an outcome of probability 0 occurred.
        method: `chi-squared`, `exact multinomial`, `Monte-Carlo multinomial`, or `excluded outcome`.
        samples, bins: their numbers.
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
        """An upper bound on the true total variation, with confidence `1 - level`.

        `variation + sqrt(log(1 / level) / (2 N)) + hidden`.  The mean of the observed variation is at least the true
        one (it is convex in the frequencies), and one sample changes it by at most `1 / N`.  So McDiarmid's inequality
        bounds it from below; there is no approximation.
        """
        return min(1.0, self.variation + math.sqrt(math.log(1 / level) / (2 * self.samples)) + self.hidden)


def goodness_of_fit(counts: Sequence[int] | np.ndarray, law: Sequence[float] | np.ndarray, seed: int = 0) -> Fit:
    """Do the counts come from the law?

    Pearson's statistic on pooled bins, or on all outcomes if there are too few samples for two bins.  Its p-value is
    summed over all tables of counts if there are few (exact), else from `scipy.stats.chisquare` if its conditions hold
    (pooled, more than 13 samples), else by Monte-Carlo.

    Args:
        counts: how often each outcome came up.
        law: probability of each outcome.
        seed: random seed of the Monte-Carlo draws.

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
    pooled = len(bins.law) >= 2 and samples > LEAST_SAMPLES
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
    """The number of tables of counts.

    >>> tables_of(samples=2, bins=2)
    3
    """
    return math.comb(samples + bins - 1, bins - 1)


def small_sample(observed: np.ndarray, law: np.ndarray, seed: int) -> tuple[float, str]:
    """The probability of a chi-squared statistic at least as large, without the chi-squared approximation."""
    samples, size = int(observed.sum()), len(law)
    expected = law * samples

    def at_least(tables: np.ndarray) -> np.ndarray:
        statistic = lambda table: ((table - expected) ** 2 / expected).sum(-1)  # noqa: E731
        return statistic(tables) >= statistic(observed) * (1 - 1e-12)  # equal statistics may differ by rounding

    if tables_of(samples, size) <= ENUMERATED:
        from scipy.stats import multinomial

        tables = compositions(samples, size)
        weights = multinomial.pmf(tables, samples, law)
        return float(min(1.0, weights[at_least(tables)].sum())), "exact multinomial"
    draws = np.random.default_rng(seed).multinomial(samples, law, MONTE_CARLO_DRAWS)
    return (1 + int(at_least(draws).sum())) / (1 + MONTE_CARLO_DRAWS), "Monte-Carlo multinomial"


@lru_cache(maxsize=8)
def compositions(total: int, parts: int) -> np.ndarray:
    """Every way to write `total` as `parts` numbers >= 0, one a row.

    >>> compositions(2, 2).tolist()
    [[0, 2], [1, 1], [2, 0]]
    """
    places = total + parts - 1
    bars = np.array(list(combinations(range(places), parts - 1)), int)  # the places of the parts - 1 separators
    edges = np.pad(bars, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, places)))
    return np.diff(edges, axis=1) - 1


# -- power ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def noncentrality(bins: int, level: float, power: float) -> float:
    """The `N sum (p' - p)^2 / p` at which chi-squared on this many bins rejects with probability `power`.

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
    """The least total variation that this many samples detect with probability `power`, for every shape of deviation.

    Among all deviations of total variation `d`, chi-squared has the least power for those that move mass evenly between
    two halves of the law: `sum (p' - p)^2 / p >= d^2 (1 / P(A) + 1 / (1 - P(A))) >= 4 d^2` by Cauchy-Schwarz, `A` the
    outcomes that gain.  So `4 N d^2 = noncentrality`, and the mass of the pooled bin is added.  1 or more: no
    effect is detectable.

    >>> round(visible_effect(np.full(10, 0.1), samples=4_823, level=1e-3, power=0.99), 3)
    0.05
    """
    bins = pool(law, samples)
    if (law > 0).sum() == 1:  # one outcome only: a deviation shows as an excluded outcome, and one is enough
        return float(1 - (1 - power) ** (1 / samples))
    if len(bins.law) < 2 or samples <= LEAST_SAMPLES:
        return math.inf
    return math.sqrt(noncentrality(len(bins.law), level, power) / (4 * samples)) + bins.hidden


def power_at(law: np.ndarray, samples: int, level: float, effect: float) -> float:
    """The probability of rejecting a deviation of total variation `effect`, for the least favourable shape."""
    from scipy.stats import chi2, ncx2

    if (law > 0).sum() == 1:
        return float(1 - (1 - effect) ** samples)
    bins = pool(law, samples)
    seen = effect - bins.hidden
    if len(bins.law) < 2 or samples <= LEAST_SAMPLES or seen <= 0:
        return 0.0
    dof = len(bins.law) - 1
    return float(ncx2.sf(chi2.isf(level, dof), dof, 4 * samples * seen**2))


def required_samples(law: Sequence[float] | np.ndarray, effect: float, level: float, power: float) -> int:
    """How many samples detect a total variation of `effect` at `level` with probability `power`, for every shape.

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
        if high > MOST_SAMPLES:
            raise SpecdecError(
                f"an effect of {effect:g} would need more than {MOST_SAMPLES:,} samples: name a larger one"
            )
    low = high // 2  # not enough, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# -- a test that may stop early ------------------------------------------------------------------------


def log_e_value(counts: np.ndarray, law: np.ndarray, effect: float) -> float:
    """Logarithm of an e-value against the law, which may be read after any number of samples.

    The probability of the samples under a Dirichlet mixture around the law, divided by that under the law.  If the law
    is right, this is a martingale of mean 1, so the probability that it ever exceeds `1 / level` is at most `level`
    (Ville), however often it is read.  Lindon and Malek, "Anytime-valid inference for multinomial count data" (NeurIPS
    2022, arXiv 2011.03567).

    Args:
        counts, law: of the same outcomes, without those of probability 0.
        effect: the width of the mixture: about this total variation.

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
    """The range of `Fit.variation` for a *correct* sampler: its middle `share`, by simulation.

    An observed total variation is rarely 0; only one above this range is evidence.

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
    """Holm's adjusted p-values: rejecting those up to `level` bounds the chance of any false rejection by `level`.

    The smallest is multiplied by m, the next by m - 1, ..., and none may be below the one before it (Holm 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
