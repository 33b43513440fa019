"""Settings of our decoder in turns: every arm meets every prompt, with its own options and no other's."""

import pytest

import specdec_lib as sd
from specdec_lib.bench.sweep import in_turns, speedup
from specdec_lib.errors import SpecdecError

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
