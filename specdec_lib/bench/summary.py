"""One comparison, whole: the race, the costs measured in between, and the prediction beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..acceptance import acceptance_by_position, acceptance_from_trace
from ..decode import Round, summarise
from ..drafters import SamplingParams
from ..engines import Reply
from .contest import ARMS, Contest, Unfit, prepared
from .costs import FEWEST, CostMeter, Costs, Estimate, rounds_with_room
from .prompts import Prompt
from .speed import Row, partings, race, speed_ratio


def measure(
    contest: Contest,
    prompts: Sequence[Prompt],
    gamma: int = 5,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    tick: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """Race, measure the costs in between, predict: the numbers of `summary`, ready for JSON.

    An interrupt (Ctrl-C) ends it early with the prompts that are done; the result then has the key `interrupted`.
    Arguments as in `race`; `tick` is called after each prompt.
    """
    try:
        if prompts:
            contest = prepared(contest, contest.pair.encode(prompts[0].messages), gamma, temperature)
        return _measure(contest, prompts, gamma, max_new_tokens, temperature, seed, tick)
    except Unfit as error:  # without that arm, then
        return _measure(replace(contest, refusal=str(error)), prompts, gamma, max_new_tokens, temperature, seed, tick)


def _measure(
    contest: Contest,
    prompts: Sequence[Prompt],
    gamma: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    tick: Callable[[], Any] | None,
) -> dict[str, Any]:
    meter = CostMeter(contest.bare, gamma, SamplingParams(temperature), seed=seed)

    def also(row: Row) -> None:
        meter.measure(row.ids, row.runs["drafted"].tokens)

    rows: list[Row] = []
    interrupted = False
    try:
        for row in race(contest, prompts, gamma, max_new_tokens, temperature, seed, also):
            rows.append(row)
            if tick is not None:
                tick()
    except KeyboardInterrupt:
        if not rows:
            raise
        interrupted = True
    found = summary(contest, rows, meter.costs(trace_of(rows, "plain"), trace_of(rows, "drafted")), temperature)
    if interrupted:
        found["interrupted"] = f"{len(rows)} of {len(prompts)} prompts"
        found["notes"].append(f"interrupted: only {len(rows)} of {len(prompts)} prompts are in these numbers")
    return found


def trace_of(rows: Sequence[Row], arm: str) -> list[Round]:
    return [r for row in rows for r in row.runs[arm].trace]


def flat(name: str, estimate: Estimate) -> dict[str, float | None]:
    """An estimate as `name`, `name_low`, `name_high`."""
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def summary(contest: Contest, rows: Sequence[Row], costs: Costs, temperature: float) -> dict[str, Any]:
    """All numbers of one comparison.

    `speedup` is ours drafted against transformers plain (one token a pass).  The runtime analysis speaks of another
    ratio, drafted against *our own* plain loop (`own_speedup`, `own_predicted`, `own_predicted_extended`); how the two
    plain loops compare is measured (`plain_ratio`).  `predicted` and `predicted_extended` are the products, and so
    predictions of `speedup`.  `factors` has the predicted own speed-up after each term that joins the theorem.

    `vs_assisted` is ours drafted against transformers assisted; None, for the reason in `vs_assisted_missing`, where
    that cannot take the draft.  `alpha`, `block_efficiency` and the costs are defined by `acceptance_from_trace`,
    `Stats` and `Costs`.  A name with `_low` and `_high` has a 95 % interval, None where there are too few prompts.
    """
    trace = trace_of(rows, "drafted")
    stats = summarise(trace)
    lengths = [row.new_tokens for row in rows]
    asked = rounds_with_room(trace, costs.gamma, lengths) or trace
    prediction = costs.predict(trace, lengths)
    plain_ratio = speed_ratio(rows, "transformers", "plain")
    kinds = {kind: [r for r in rows if r.prompt.kind == kind] for kind in dict.fromkeys(r.prompt.kind for r in rows)}
    found = {
        "temperature": temperature,
        "prompts": len(rows),
        "new_tokens": stats.emitted,
        **_speeds(contest, rows),
        "vs_assisted_missing": contest.refusal or None,
        "predicted": prediction.theorem * plain_ratio.value,
        "predicted_extended": prediction.extended * plain_ratio.value,
        **flat("plain_ratio", plain_ratio),
        **flat("own_speedup", speed_ratio(rows, "plain", "drafted")),
        "own_predicted": prediction.theorem,
        "own_predicted_extended": prediction.extended,
        "factors": prediction.factors,
        **_acceptance(rows),
        "block_efficiency_predicted": prediction.extended_block_efficiency,
        "accepted_per_drafted": stats.accepted_per_drafted,
        "drafted_per_round": float(np.mean([len(r.drafted) for r in asked])),
        **flat("cost_coefficient", costs.cost_coefficient),
        "verification_cost": [v.value for v in costs.verification_cost],
        "verification_cost_low": [v.low for v in costs.verification_cost],
        "verification_cost_high": [v.high for v in costs.verification_cost],
        **flat("overhead_per_round", costs.overhead_per_round),
        **flat("overhead_plain", costs.overhead_plain),
        **flat("target_pass_seconds", costs.target_pass),
        "prefill_target": costs.prefill_target,
        "prefill_draft": costs.prefill_draft,
        "decoders": {arm: _decoder([r.runs[arm] for r in rows]) for arm in rows[0].runs},
        "kinds": {k: {"prompts": len(g), **_speeds(contest, g), **_acceptance(g)} for k, g in kinds.items()},
        "texts": partings(contest, rows) if temperature == 0 else None,
    }
    found["notes"] = _notes(contest, found, costs.gamma)
    return found


def _speeds(contest: Contest, rows: Sequence[Row]) -> dict[str, float | None]:
    if contest.refusal:
        assisted: dict[str, float | None] = dict.fromkeys(["vs_assisted", "vs_assisted_low", "vs_assisted_high"])
    else:
        assisted = flat("vs_assisted", speed_ratio(rows, "assisted", "drafted"))
    return {**flat("speedup", speed_ratio(rows, "transformers", "drafted")), **assisted}


def _acceptance(rows: Sequence[Row]) -> dict[str, Any]:
    """Acceptance with prompts as the independent units (rounds, where there is but one prompt)."""
    trace = trace_of(rows, "drafted")
    accepted, rejected = [r.kept for r in trace], [r.rejected for r in trace]
    units = [i for i, row in enumerate(rows) for _ in row.runs["drafted"].trace]
    tested = sorted({i for i, a, r in zip(units, accepted, rejected, strict=True) if a + r})
    found: dict[str, Any] = dict.fromkeys(["alpha", "alpha_low", "alpha_high"])
    if len(tested) > 1:
        estimate = acceptance_from_trace(accepted, rejected, units)
        found = flat("alpha", Estimate(estimate.alpha, estimate.low, estimate.high))
    elif tested:
        found["alpha"] = summarise(trace).acceptance_rate
    found["alpha_by_position"] = acceptance_by_position(accepted, rejected).tolist() if tested else []
    return {**found, "block_efficiency": summarise(trace).block_efficiency}


def _decoder(runs: Sequence[Reply]) -> dict[str, float]:
    seconds = sum(run.seconds for run in runs)
    return {
        "seconds": seconds,
        "tokens_per_second": sum(len(run.tokens) for run in runs) / seconds,
        "first_token_seconds": float(np.median([run.first for run in runs])),
    }


def _notes(contest: Contest, found: dict[str, Any], gamma: int) -> list[str]:
    """What a reader must know about the numbers."""
    notes = []
    if found["prompts"] < FEWEST:
        notes.append(f"{found['prompts']} prompts are too few for an interval: measure at least {FEWEST}")
    if contest.refusal:
        notes.append(f"vs_assisted is empty: {contest.refusal}")
    if contest.remark:
        notes.append(contest.remark)
    if found["alpha"] is None:
        notes.append("the draft proposed no token, so there is no acceptance rate")
    elif found["drafted_per_round"] < gamma - 0.05:
        notes.append(
            f"the draft proposed {found['drafted_per_round']:.1f} tokens a round of the {gamma} asked for; "
            "the prediction counts what it did not propose as refused"
        )
    if found["cost_coefficient"] >= 1:
        notes.append(f"the draft is slower than the target (c = {found['cost_coefficient']:.2f}): it can only lose")
    for arm, texts in (found["texts"] or {}).items():
        if texts["ties"] or texts["different"]:
            notes.append(
                f"{ARMS[arm]}: {texts['identical']} texts are those of {ARMS['plain']}, {texts['ties']} part at a tie "
                f"within rounding, {texts['different']} differ"
            )
    return notes
