"""Both sides of a question, and what a probe may not say; our drafters as transformers' assistants."""

import pytest
import torch
import transformers

import specdec_lib as sd
from specdec_lib.decode.results import summarise
from specdec_lib.drafters import ComposedDrafter, EarlyExitDrafter, ModelDrafter, NGramDrafter, PromptLookupDrafter
from specdec_lib.drafters.assistant import DrafterAssistant
from specdec_lib.errors import SpecdecError
from specdec_lib.studies import tiny_t5
from specdec_lib.studies.both_sides import (
    LENGTH,
    PROMPT,
    attempt,
    disturbed,
    honoured,
    noisy,
    ours_of,
    tiny,
    traced,
    written,
)
from specdec_lib.studies.probes import BREAKS, HONOURED, IGNORED, PROBES, REFUSED, WORDS, look


def raising(error):
    def side():
        raise error

    return side


def test_an_error_that_names_the_matter_is_a_refusal_and_any_other_a_break():
    assert attempt(raising(SpecdecError("no"))).word == attempt(raising(ValueError("no"))).word == REFUSED
    assert attempt(raising(IndexError("index 7"))).word == BREAKS
    assert [honoured(right, "", IGNORED).word for right in (True, False)] == [HONOURED, IGNORED]


@pytest.mark.parametrize("name", PROBES)
def test_ours_honours_or_refuses(name):
    finding = look(name)
    assert finding.ours.word in (HONOURED, REFUSED), finding.ours.seen
    assert finding.theirs.word in WORDS and finding.theirs.seen
    if transformers.__version__ == "5.24.0":
        assert finding.still, finding.theirs


def test_the_caller_s_draws_are_left_alone_on_every_device(monkeypatch):
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("seeds every device, also those in use"))
    before = torch.random.get_rng_state()
    look("a uniform that is exactly 0")
    disturbed(tiny(3), 0.1, seed=4)
    tiny_t5.build(tiny_t5.Recipe(layers=1, decoder_layers=1, width=16, heads=2, steps=1, rate=1.0), 30)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("gamma", [1, 4])
def test_the_account_of_transformers_rounds_is_ours(gamma):
    draft = noisy()
    draft.generation_config.num_assistant_tokens = gamma
    new, rounds = traced(tiny(), PROMPT, assistant_model=draft)
    out = sd.generate(ours_of(noisy()), PROMPT, gamma=gamma, max_new_tokens=LENGTH, eos=[])
    assert new == out.tokens[0]
    assert [(r.drafted, r.accepted, r.emitted) for r in rounds] == [
        (r.drafted, r.accepted, r.emitted) for r in out.trace
    ]
    stats = summarise(rounds)
    assert 0 < stats.accepted < stats.drafted


def test_an_end_token_inside_a_block_is_counted_as_accepted():
    plain = written(tiny(), PROMPT)
    at = max(plain.index(token) for token in plain)
    draft = tiny()
    draft.generation_config.update(
        num_assistant_tokens=LENGTH, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    new, rounds = traced(tiny(), PROMPT, assistant_model=draft, eos_token_id=plain[at])
    assert new == plain[: at + 1]
    assert sum(r.kept for r in rounds) == at + 1 and not any(r.rejected for r in rounds)


# -- our drafters in transformers' loop --------------------------------------------------------------------


def drafters():
    table = NGramDrafter.fit([PROMPT + written(tiny(), PROMPT)])
    return {
        "a table": table,
        "a model": ModelDrafter(noisy()),
        "a lookup that often has nothing": PromptLookupDrafter(),
        "both": ComposedDrafter([PromptLookupDrafter(min_ngram=2), ModelDrafter(noisy())]),
    }


@pytest.mark.parametrize("name", ["a table", "a model", "a lookup that often has nothing", "both"])
def test_a_drafter_of_ours_in_transformers_loop_writes_the_plain_text(name):
    target = tiny()
    assistant = DrafterAssistant(drafters()[name], target, gamma=4)
    for prompt in (PROMPT, PROMPT[:4], PROMPT):  # a new text starts anew, also the same one
        assert written(target, prompt, assistant_model=assistant) == written(target, prompt)


def test_it_drafts_what_our_own_loop_drafts():
    table = NGramDrafter.fit([PROMPT + written(tiny(), PROMPT)])
    target = tiny()
    new, rounds = traced(target, PROMPT, assistant_model=DrafterAssistant(table, target, gamma=4))
    out = sd.generate(ours_of(table), PROMPT, gamma=4, max_new_tokens=LENGTH, eos=[])
    assert new == out.tokens[0] and [r.drafted for r in rounds] == [r.drafted for r in out.trace]
    assert sum(r.accepted for r in rounds) > 0


def test_sampled_it_keeps_the_target_s_law_and_follows_the_seed():
    """The laws that are handed over are those drawn from: the draft's marginals are compared, not only the target's."""
    target, many = tiny(), 150
    assistant = DrafterAssistant(ModelDrafter(noisy(noise=0.3)), target, gamma=1)
    how = {"assistant_model": assistant, "do_sample": True, "top_k": 3, "temperature": 1.5, "max_new_tokens": 2}
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        first = [written(target, PROMPT, **how)[0] for _ in range(many)]
        torch.manual_seed(5)
        assert [written(target, PROMPT, **how)[0] for _ in range(5)] == first[:5]
    logits = target(torch.tensor([PROMPT])).logits[0, -1] / 1.5
    law = torch.softmax(logits.masked_fill(logits < logits.topk(3).values[-1], float("-inf")), 0)
    counts = torch.bincount(torch.tensor(first), minlength=len(law))
    named = law > 0
    assert counts[~named].sum() == 0
    chi_square = ((counts - many * law)[named] ** 2 / (many * law[named])).sum()
    assert chi_square < 13.8  # level 0.001 with 2 degrees of freedom


def test_what_cannot_draft_there_is_refused():
    with pytest.raises(SpecdecError, match="cannot draft in transformers' loop"):
        DrafterAssistant(EarlyExitDrafter(1), tiny())
    with pytest.raises(SpecdecError, match="whole number"):
        DrafterAssistant(PromptLookupDrafter(), tiny(), gamma=0)
    with pytest.raises(SpecdecError, match="only drafts"):
        DrafterAssistant(PromptLookupDrafter(), tiny())(torch.tensor([[1]]))


def test_the_figure_says_every_word_once_a_side():
    from matplotlib.figure import Figure

    from specdec_lib.studies.both_sides import Finding, Outcome
    from specdec_lib.studies.sides import LOOKS, draw_sides

    assert set(LOOKS) == set(WORDS)
    axes = Figure().add_subplot()
    draw_sides(axes, [Finding(word, word, Outcome(word, ""), Outcome(HONOURED, "")) for word in WORDS], ("a", "b"))
    assert sorted(text.get_text() for text in axes.texts) == sorted([*WORDS, *[HONOURED] * len(WORDS)])
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first finding is on top"
