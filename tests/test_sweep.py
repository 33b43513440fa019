"""Settings of our decoder in turns: every arm meets every prompt, with its own options and no other's."""

from dataclasses import replace
from itertools import count
from math import prod

import pytest

import specdec_lib as sd
from specdec_lib.bench.sweep import in_turns, speedup
from specdec_lib.errors import SpecdecError
from specdec_lib.studies import grid
from specdec_lib.studies.grid import predicted_and_measured

PROMPTS = [[5, 9, 17, 3], [8, 2, 8, 2, 8], [1, 7]]


@pytest.fixture(scope="module")
def pair(tiny_folder):
    return sd.load_pair(tiny_folder("llama"), "lookup", device="cpu")


def test_each_arm_decodes_each_prompt_with_its_options(pair):
    table = sd.NGramDrafter.fit([[5, 9, 17, 3, 8] * 4], order=2)
    arms = {
        "plain": {},
        1: {"gamma": 1},
        4: {"gamma": 4},
        "table": {"gamma": 2, "draft": table},
        3: {"max_new_tokens": 3},
    }
    found = in_turns(pair, PROMPTS, arms, max_new_tokens=9, eos=[])
    assert list(found) == list(arms) and {len(outs) for outs in found.values()} == {len(PROMPTS)}
    texts = [out.tokens for out in found["plain"]]
    for arm in (1, 4, "table"):
        assert [out.tokens for out in found[arm]] == texts
    assert [len(out.tokens[0]) for out in found[3]] == [3, 3, 3]
    longest = {arm: max(len(r.drafted) for out in found[arm] for r in out.trace) for arm in arms}
    assert longest["plain"] == longest[3] == 0 and longest[1] == 1 < longest[4] <= 4 and longest["table"] == 2


def test_measurements_come_between_the_prompts(pair):
    seen = []
    found = in_turns(
        pair,
        PROMPTS,
        {"plain": {}, 2: {"gamma": 2}},
        between=lambda ids, out: seen.append((ids, out)),
        max_new_tokens=4,
    )
    assert [ids for ids, _ in seen] == PROMPTS
    assert [out for _, out in seen] == found["plain"]


def test_the_speed_is_a_ratio_of_totals(pair):
    found = in_turns(pair, PROMPTS, {"plain": {}, 2: {"gamma": 2}}, max_new_tokens=4)
    seconds = {arm: sum(out.stats.seconds for out in outs) for arm, outs in found.items()}
    assert speedup(found["plain"], found[2]).value == pytest.approx(seconds["plain"] / seconds[2])


@pytest.mark.parametrize("prompts, arms", [([], {"plain": {}}), (PROMPTS, {})])
def test_nothing_to_compare_is_refused(pair, prompts, arms):
    with pytest.raises(SpecdecError, match="at least one prompt and one arm"):
        in_turns(pair, prompts, arms)


# -- every draft at every length -----------------------------------------------------------------------


def test_every_draft_at_every_length_is_predicted_and_measured(pair):
    table = sd.NGramDrafter.fit([[5, 9, 17, 3, 8] * 4], order=2)
    drafts = {"lookup": sd.PromptLookupDrafter(), "table": table}
    rows = predicted_and_measured(pair, PROMPTS * 3, drafts, [1, 4], temperature=1.0, max_new_tokens=8)
    assert [(row["draft"], row["gamma"]) for row in rows] == [(d, g) for d in drafts for g in (1, 4)]
    for row in rows:
        terms = [row[name] for name in ("verification cost", "acceptance by position", "last rounds", "prefill")]
        assert row["all terms"] == pytest.approx(row["theorem"] * prod(terms) * row["outside the models"])
        assert row["temperature"] == 1.0 and row["low"] < row["speed"] < row["high"]
        assert 1 <= row["block efficiency"] <= row["gamma"] + 1 and row["c"] < 1


def lasting(text, seconds):
    """The text with rounds of so many seconds, of which the models took three."""
    trace = [replace(r, draft_seconds=1.0, target_seconds=2.0, seconds=seconds) for r in text.trace]
    return replace(text, trace=trace, stats=replace(text.stats, seconds=seconds * len(trace)))


def test_no_time_that_a_prediction_is_held_against_enters_it(pair, monkeypatch):
    """Drafted texts that took twice as long, but the last one: the measured speed halves, the prediction stays."""
    found = {}
    for seconds in (4.0, 8.0):

        def slowed(*given, between, seconds=seconds, **options):
            outs = in_turns(*given, **options)
            for text in outs[grid.PLAIN]:
                between(PROMPTS[0], text)
            drafted = {
                arm: [lasting(text, seconds) for text in texts[:-1]] + [lasting(texts[-1], 5.0)]
                for arm, texts in outs.items()
            }
            return drafted | {grid.PLAIN: [lasting(text, 4.0) for text in outs[grid.PLAIN]]}

        with monkeypatch.context() as patch:
            patch.setattr(grid, "in_turns", slowed)
            patch.setattr("specdec_lib.bench.costs.perf_counter", count().__next__)  # all that is timed takes 1 s
            found[seconds] = predicted_and_measured(
                pair, PROMPTS, {"lookup": sd.PromptLookupDrafter()}, [2], max_new_tokens=8
            )[0]
    assert found[8.0]["speed"] == pytest.approx(found[4.0]["speed"] / 2)
    assert found[8.0]["outside the models"] < 1  # 2 of a round's 5 s against 1 of 4
    for name in ("theorem", "all terms", "c", "v"):
        assert found[8.0][name] == found[4.0][name]


@pytest.mark.parametrize(
    ("prompts", "drafts", "gammas"), [([[5]], {"a": 0}, [1]), (PROMPTS, {}, [1]), (PROMPTS, {"a": 0}, [])]
)
def test_too_little_to_compare_is_refused(pair, prompts, drafts, gammas):
    with pytest.raises(SpecdecError, match="two prompts, one draft and one draft length"):
        predicted_and_measured(pair, prompts, drafts, gammas)
