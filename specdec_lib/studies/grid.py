"""Every draft at every length: the speed that is predicted, and the speed that is measured.

The prediction knows no time that it is held against.  Acceptance by position is counted on the texts that are timed:
which tokens were kept is no time.  The draft's step, the target's passes and the reading of the prompts are timed by
themselves, between the texts; what lies outside both models is taken from one more text, which is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ..bench.costs import CostMeter
from ..bench.sweep import in_turns, speedup
from ..decode import Generation, Round, summarise
from ..drafters import SamplingParams
from ..errors import SpecdecError
from ..models.pair import Pair

PLAIN = ("plain", 0)


def predicted_and_measured(
    pair: Pair,
    prompts: Sequence[list[int]],
    drafts: Mapping[str, Any],
    gammas: Sequence[int],
    temperature: float = 0.0,
    max_new_tokens: int = 64,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Decode the prompts with every draft at every length, in turns, and predict each setting's speed.

    Args:
        pair: whose target is used.
        prompts: token ids; the last one only tells the time outside the models.
        drafts: by name.
        gammas: draft lengths.
        temperature, max_new_tokens, seed: as in `generate`; no end of text ends a text.

    Returns:
        A row a setting: `draft`, `gamma`, `temperature`; `alpha` and `block efficiency` as counted; `c` and `v`, that
        is v(gamma + 1); the predictions `theorem` and `all terms` and the measured `speed` with its 95 % interval
        `low`, `high` (None for fewer than 6 texts), all against our own plain loop on the same texts; and by what
        factor each further term changes the prediction, under the term's name.

    Raises:
        SpecdecError: fewer than two prompts, no draft or no length; otherwise as `generate`.
    """
    if len(prompts) < 2 or not drafts or not gammas:
        raise SpecdecError("nothing to compare: give at least two prompts, one draft and one draft length")
    arms: dict[Any, dict[str, Any]] = {PLAIN: {}}
    arms |= {(name, g): {"draft": draft, "gamma": g} for name, draft in drafts.items() for g in gammas}
    meter = CostMeter(pair, max(gammas), SamplingParams(temperature), seed=seed, drafts=drafts)
    outs = in_turns(
        pair, prompts, arms, seed, between=lambda ids, plain: meter.measure(ids, plain.tokens[0]),
        temperature=temperature, max_new_tokens=max_new_tokens, eos=[],
    )  # fmt: skip
    rows = []
    for name, gamma in list(arms)[1:]:
        *texts, other = outs[name, gamma]
        costs = replace(meter.costs(outs[PLAIN][-1].trace, other.trace, name), gamma=gamma)
        trace = rounds_of(texts)
        prediction = costs.predict(trace, [max_new_tokens] * len(texts))
        stats, speed = summarise(trace), speedup(outs[PLAIN][:-1], texts, seed)
        rows.append(
            {
                "draft": name,
                "gamma": gamma,
                "temperature": temperature,
                "alpha": stats.acceptance_rate,
                "block efficiency": stats.block_efficiency,
                "c": costs.cost_coefficient.value,
                "v": costs.verification_cost[gamma].value,
                "theorem": prediction.theorem,
                "all terms": prediction.extended,
                "speed": speed.value,
                "low": speed.low,
                "high": speed.high,
                **changes(prediction.factors),
            }
        )
    return rows


def rounds_of(texts: Sequence[Generation]) -> list[Round]:
    return [done for text in texts for done in text.trace]


def changes(factors: Mapping[str, float]) -> dict[str, float]:
    """By what factor each term after the first changes the prediction.

    >>> changes({"theorem": 2.0, "verification cost": 1.5, "prefill": 1.5})
    {'verification cost': 0.75, 'prefill': 1.0}
    """
    return {name: after / before for (_, before), (name, after) in pairwise(factors.items())}
