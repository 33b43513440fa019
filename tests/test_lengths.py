"""Draft lengths: each rule does what it says, learns nothing across calls, and the controller comes near the best."""

import json
import random
from pathlib import Path
from statistics import mean

import pytest

import specdec_lib as sd
from specdec_lib.decode.draft_length import (
    Confidence,
    Constant,
    DraftLengthPolicy,
    Fastest,
    Heuristic,
    Shares,
    as_policy,
    best_length,
    pass_seconds,
)
from specdec_lib.decode.results import Round
from specdec_lib.models import load_model, load_transformers
from specdec_lib.studies.replay import Met, meet, replay

PROMPT = [5, 9, 17, 3, 8, 9, 17, 3]


def a_round(drafted, accepted, row=0, draft_seconds=0.0, seconds=0.0):
    emitted, target_seconds = [7] * accepted + [9], seconds - draft_seconds
    return Round(row, [7] * drafted, accepted, emitted, [], [], drafted, draft_seconds, target_seconds, seconds)


def test_the_heuristic_counts_each_row_for_itself():
    schedule = Heuristic(first=3).start()
    for done in (a_round(3, 3), a_round(3, 0, row=1), a_round(2, 1, row=1), a_round(1, 0, row=1), a_round(0, 0)):
        schedule.update(done)
    assert [schedule.next(row) for row in (0, 1, 2)] == [5, 1, 3]
    assert Heuristic(first=3).start().next(0) == 3


def test_the_heuristic_in_a_decoder(tiny_folder):
    target = load_model(tiny_folder("llama"), device="cpu")
    out = sd.generate(sd.Pair(target, target), PROMPT, gamma=Heuristic(1), max_new_tokens=40, eos=[])
    assert [len(r.drafted) for r in out.trace] == [1, 3, 5, 7, 9, 9]  # two more each time, the last cut by the length


def test_confidence_ends_a_draft_with_the_unsure_token_kept(tiny_folder):
    target = load_model(tiny_folder("llama"), device="cpu")
    draft = load_transformers(tiny_folder("llama", seed=1), device="cpu")
    pair = sd.Pair(target, draft)
    for temperature in (0.0, 1.0):
        never, always = (
            sd.generate(pair, PROMPT, Confidence(c, longest=4), 24, temperature, eos=[]) for c in (0.0, 1.0)
        )
        assert max(len(r.drafted) for r in never.trace) == 4
        assert {len(r.drafted) for r in always.trace[:-1]} == {1}
    some = sd.generate(pair, PROMPT, Confidence(0.5, longest=4), 24, 1.0, eos=[])
    assert all(q >= 0.5 for r in some.trace for q in r.q[:-1])  # at temperature 1 q is the draft's own probability
    assert any(q < 0.5 for r in some.trace for q in r.q[-1:])


def test_a_draft_that_a_text_had_no_room_for_was_not_refused():
    """The end of a text cuts a draft to 3 of 8 tokens: what came of the 3 counts, of the others nothing is known."""
    schedule = Fastest(first=8).start()
    assert schedule.next(0, 3) == 3
    schedule.update(a_round(3, 3))
    assert schedule.kept.tries == schedule.kept.successes == [1] * 3 + [0] * 9
    assert schedule.offered.tries == schedule.offered.successes == [1] * 3 + [0] * 9
    cut = Fastest(first=8).start()
    assert cut.next(0, 20) == 8
    cut.update(a_round(3, 3))  # here the drafter ended it: as good as refused
    assert cut.kept.tries[3] == 1 and cut.kept.successes[3] == 0 and cut.offered.tries[7] == 1


def test_short_texts_do_not_make_drafts_short():
    """A draft that is always right, in texts of 4 tokens: nothing but that is learnt of it."""
    schedule = Fastest().start()
    for row in range(50):
        left = 4
        while left:
            g = min(schedule.next(row, left - 1), left - 1)
            schedule.update(a_round(g, g, row, 0.1 * g, 0.1 * g + 1))
            left -= g + 1
    assert all(share == 1 for share in schedule.offered.estimates())
    assert schedule.kept.successes == schedule.kept.tries and schedule.kept.tries[2] > 30


def test_a_rule_can_be_used_again():
    for rule in (Constant(3), Heuristic(), Confidence(), Fastest()):
        first, second = rule.start(), rule.start()
        length = first.next(0)
        for _ in range(9):
            first.update(a_round(length, length, draft_seconds=0.1, seconds=1.0))
        assert second.next(0) == length == rule.start().next(0)


def simulate(rule, alpha, draft, passes, seed, texts=12, tokens=64, noise=0.1):
    """Tokens a unit of time; the rule sees every time with noise on it, as a machine shows them."""
    draws, schedule, seconds = random.Random(seed), rule.start(), 0.0
    for row in range(texts):
        left = tokens
        while left:
            g = min(schedule.next(row), left - 1)
            n = next((i for i in range(g) if draws.random() >= alpha), g)
            left -= n + 1
            seen = [t * (1 + noise * abs(draws.gauss(0, 1))) for t in (g * draft, passes(g + 1))]
            schedule.update(a_round(g, n, row, seen[0], sum(seen)))
            seconds += g * draft + passes(g + 1)
    return texts * tokens / seconds


COSTS = {
    "memory-bound": lambda n: 1 + 0.02 * (n - 1),
    "in between": lambda n: 1 + 0.06 * (n - 1),
    "compute-bound": lambda n: 1 + 0.15 * (n - 1),
}


@pytest.mark.parametrize("regime", COSTS)
def test_the_controller_comes_near_the_best_constant(regime):
    shares = []
    for alpha in (0.4, 0.6, 0.85):
        for draft in (0.03, 0.1, 0.3):
            speed = lambda rule, a=alpha, d=draft: mean(simulate(rule, a, d, COSTS[regime], s) for s in range(3))  # noqa: E731
            best = max(speed(Constant(g)) for g in range(1, 13))
            shares.append(speed(Fastest()) / max(best, 1.0))
            assert shares[-1] > 0.92, (alpha, draft)
    assert mean(shares) > 0.97
    worst = simulate(Constant(12), 0.4, 0.3, COSTS[regime], 0)
    assert worst < 0.7 * simulate(Fastest(), 0.4, 0.3, COSTS[regime], 0)  # there was something to lose


TWO_CORES = {"small": 0.025, "medium": 0.045, "lookup": 0.0}  # a draft token over a target pass, rounded


def met():
    """What packaged drafts met on twelve texts of the packaged target, two of each kind of prompt, at T = 0 and 1.

    Of each text three rows in base 13, as in `Met`.  At T = 1 a token of the text counts as kept with the chance that
    it was drafted, given that it was written: `min(1, q / p)`, one draw for each.
    """
    for name, texts in json.loads((Path(__file__).parent / "met.json").read_text()).items():
        rows = ([[int(c, 13) for c in row] for row in text] for text in texts)
        yield name, [Met(offered, kept, list(map(bool, by_model))) for offered, kept, by_model in rows]


@pytest.mark.parametrize(("rise", "factor"), [(0.02, 1), (0.1, 2)], ids=["flat", "steep"])
@pytest.mark.parametrize("name", [name for name, _ in met()])
def test_the_controller_is_within_three_percent_of_the_best_constant(name, rise, factor):
    """In replay, where the machine adds no noise; the drafts copy, draft by a model, or do both by turns."""
    texts = dict(met())[name]
    draft = factor * TWO_CORES[name.split()[0].split("+")[-1]]
    speed = lambda rule: replay(rule, texts, draft, lambda n: 1 + rise * (n - 1))[0]  # noqa: E731
    constants = [1.0, *(speed(Constant(g)) for g in range(1, 13))]
    assert speed(Fastest()) >= 0.97 * max(constants)
    assert min(constants) < 0.97 * max(constants)  # there was something to lose


def test_one_alpha_cannot_describe_copies_and_a_model():
    """What the controller used to do: equal chances at all positions. It copies too little, and loses 5 % by that."""
    texts = dict(met())["lookup+small 0"]

    class OneAlpha(type(Fastest().start())):
        def __init__(self):
            super().__init__(4, 12)
            estimates = self.kept.estimates
            self.kept.estimates = lambda: [sum(self.kept.successes) / max(sum(self.kept.tries), 1)] * len(estimates())
            self.offered.estimates = lambda: [1.0] * len(estimates())

    class Policy(DraftLengthPolicy):
        def start(self):
            return OneAlpha()

    pass_cost = lambda n: 1 + 0.02 * (n - 1)  # noqa: E731
    before, now = (replay(rule, texts, 0.025, pass_cost)[0] for rule in (Policy(), Fastest()))
    assert before < 0.97 * now


def test_what_a_drafter_meets_is_what_decoding_does(tiny_folder):
    target = load_model(tiny_folder("llama"), device="cpu")
    draft = load_model(tiny_folder("llama", seed=1), device="cpu")
    text = sd.generate_plain(sd.Pair(target), PROMPT, max_new_tokens=40, eos=[]).tokens[0]
    lookup = sd.PromptLookupDrafter()
    for drafter in (draft, lookup, sd.ComposedDrafter([lookup, sd.ModelDrafter(draft)], [None, 2])):
        found = meet(drafter, 46, PROMPT, text, longest=5)
        for gamma in (1, 3, 5):
            out = sd.generate(sd.Pair(target, drafter), PROMPT, gamma, max_new_tokens=40, eos=[])
            _, rounds = replay(Constant(gamma), [found], 0.1, lambda n: 1.0)
            assert [(len(r.drafted), r.accepted) for r in rounds] == [(len(r.drafted), r.accepted) for r in out.trace]


def test_where_no_draft_pays_the_target_decodes_alone_and_tries_again():
    schedule = Fastest().start()
    lengths = []
    for _ in range(120):
        lengths.append(schedule.next(0))
        g = lengths[-1]
        schedule.update(a_round(g, 0, 0, 0.8 * g, 0.8 * g + 1))
    assert lengths[30:].count(0) > 75 and 0 < lengths[30:].count(1) < 15
    for _ in range(300):  # the draft has become good and cheap: that is found out
        g = schedule.next(0)
        schedule.update(a_round(g, g, 0, 0.01 * g, 0.01 * g + 1))
    assert schedule.next(0) == 12


def test_the_estimate_of_a_pass_is_a_line_through_what_was_timed():
    assert pass_seconds({3: [2.0, 2.0, 9.0]})(8) == pytest.approx(2.0)  # one length: no slope to see
    line = pass_seconds({n: [1 + 0.1 * n] * 5 for n in (1, 2, 5, 9)})
    assert [line(n) for n in (1, 4, 12)] == pytest.approx([1.1, 1.4, 2.2])
    assert pass_seconds({1: [2.0] * 9, 5: [1.0] * 9, 6: []})(40) > 0  # a falling line is noise
    for kept, best in ((0.0, 0), (1.0, 12)):
        assert best_length([kept] * 12, [1.0] * 12, 0.1, lambda n: 1.0) == best
    # a model of two tokens, else long copies: it pays to ask for many, since few are drafted
    kept, offered = [0.3, 0.3, *[0.9] * 10], [1.0, 1.0, *[0.1] * 10]
    assert best_length(kept, offered, 0.025, lambda n: 1 + 0.02 * n) == 12
    assert best_length(kept, [1.0] * 12, 0.025, lambda n: 1 + 0.02 * n) < 12


def test_chances_by_position():
    shares = Shares(3, first=0.6)
    for _ in range(2000):
        shares.see(successes=1, tries=2)
    first, second, third = shares.estimates()
    assert first > 0.95 and second < 0.1 and third == second  # nothing is known of the third but what precedes it


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(0), "gamma must be a whole number >= 1"),
        (lambda: as_policy("5"), "gamma must be a whole number >= 1"),
        (lambda: Heuristic(0), "first must be a whole number >= 1"),
        (lambda: Confidence(1.5), r"must lie in \[0, 1\]"),
        (lambda: Confidence(0.4, 0), "longest must be a whole number >= 1"),
        (lambda: Fastest(8, 4), "first must not exceed longest"),
        (lambda: sd.ModelDrafter(None, confidence=-1), r"must lie in \[0, 1\]"),
        (lambda: sd.ComposedDrafter([sd.PromptLookupDrafter()]).with_confidence(0.4), "none of these drafters"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(sd.SpecdecError, match=message):
        make()
