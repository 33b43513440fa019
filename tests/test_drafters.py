"""Drafters propose what they say they propose."""

from random import Random

import numpy as np
import pytest
import torch

import specdec_lib as sd
from specdec_lib.drafters import Draft, SamplingParams
from specdec_lib.models import load_model, open_session


def propose(drafter, prefix, gamma, temperature=0.0, vocabulary=46):
    return drafter.start(vocabulary).propose(prefix, gamma, SamplingParams(temperature), Random(0))


def test_lookup_takes_the_longest_suffix_and_its_last_occurrence():
    prefix = [1, 2, 9, 3, 2, 8, 1, 2, 7, 1, 2]
    assert propose(sd.PromptLookupDrafter(max_ngram=2), prefix, 2).tokens == [7, 1]
    assert propose(sd.PromptLookupDrafter(max_ngram=1), [1, 5, 1, 6, 1], 5).tokens == [6, 1]


def test_lookup_finds_nothing_in_a_text_without_repeats():
    assert propose(sd.PromptLookupDrafter(), [1, 2, 3, 4], 5).tokens == []


def test_lookup_goes_on_from_round_to_round_as_if_it_started_afresh():
    text = np.random.default_rng(0).integers(3, size=60).tolist()
    drafter = sd.PromptLookupDrafter()
    session = drafter.start(46)
    for end in (5, 6, 9, 20, 21, 40, 60):
        went_on = session.propose(text[:end], 4, SamplingParams(), Random(0)).tokens
        assert went_on == propose(drafter, text[:end], 4).tokens


def test_ngram_backs_off_and_breaks_ties_to_the_smaller_id():
    table = sd.NGramDrafter.fit([[1, 2, 3, 1, 2, 4], [7, 7, 7, 7]], order=3)
    assert table.following([1, 2]) == 3  # 3 and 4 followed once each
    assert table.following([9, 7]) == 7  # "9 7" is unknown, "7" is not
    assert table.following([9, 9]) == 7  # nothing known: the most frequent token


def test_ngram_equals_counting_by_hand():
    text = np.random.default_rng(1).integers(5, size=400).tolist()
    table = sd.NGramDrafter.fit([text], order=4)
    for start in range(0, 390, 13):
        context = text[start : start + 3]
        counts = np.zeros(5, int)
        for i in range(len(text) - 3):
            if text[i : i + 3] == context:
                counts[text[i + 3]] += 1
        assert table.following([2, *context]) == counts.argmax()


def test_ngram_survives_saving(tmp_path):
    table = sd.NGramDrafter.fit([[1, 2, 3, 4, 2, 3, 5]], order=4)
    table.save(tmp_path / "table.safetensors")
    again = sd.NGramDrafter.load(tmp_path / "table.safetensors")
    assert propose(again, [9, 2, 3], 6).tokens == propose(table, [9, 2, 3], 6).tokens


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sd.NGramDrafter.fit([[]]), "needs text"),
        (lambda: sd.NGramDrafter.fit([[1, 2]], order=5), "order must be 1 to 4"),
        (lambda: sd.NGramDrafter.fit([[1, 70_000]]), "below 65536"),
        (lambda: sd.NGramDrafter.load("no/such/file"), "no n-gram table"),
        (lambda: sd.NGramDrafter.fit([[1, 99]]).start(50), "outside the target's vocabulary of 50"),
        (lambda: sd.PromptLookupDrafter(max_ngram=0), "max_ngram must be a whole number >= 1, got 0"),
        (lambda: sd.PromptLookupDrafter(max_ngram=1, min_ngram=2), "min_ngram <= max_ngram"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(sd.SpecdecError, match=message):
        make()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_model_draft_reports_the_law_it_drew_from(kind, tiny_folder):
    model = load_model(tiny_folder(kind), device="cpu")
    prefix = [5, 9, 17, 3]
    drafter = sd.ModelDrafter(model)
    draft = propose(drafter, prefix, 4, temperature=0.7)
    assert draft.probs.shape == (4, 46) and draft.passes == 4
    plain = load_model(tiny_folder(kind), device="cpu")
    for i in range(4):
        logits = open_session(plain).feed(torch.tensor([prefix + draft.tokens[:i]]))[0, -1]
        torch.testing.assert_close(draft.probs[i], (logits / 0.7).softmax(-1), rtol=1e-4, atol=1e-6)


def test_model_draft_after_a_rejection_equals_a_fresh_start(tiny_folder):
    model = load_model(tiny_folder("llama"), device="cpu")
    session = sd.ModelDrafter(model).start(46)
    prefix = [5, 9, 17]
    for accepted in (0, 2, 4, 1):
        tokens = session.propose(prefix, 4, SamplingParams(), Random(0)).tokens
        assert tokens == propose(sd.ModelDrafter(model), prefix, 4).tokens
        prefix = [*prefix, *tokens[:accepted], 30]


def test_a_draft_with_a_short_context_stops_proposing(tiny_folder):
    model = load_model(tiny_folder("gpt2", n_positions=8), device="cpu")
    assert len(propose(sd.ModelDrafter(model), [1] * 5, 6).tokens) == 3
    assert propose(sd.ModelDrafter(model), [1] * 8, 6).tokens == []


def test_a_certain_draft_is_a_point_mass():
    laws = Draft([2, 0], certain=True).probs_like(torch.zeros(3, 4))
    assert laws.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]


def test_a_composed_drafter_keeps_greedy_identity_and_the_law_of_who_proposed(tiny_folder):
    model = load_model(tiny_folder("llama"), device="cpu")
    drafter = sd.ComposedDrafter([sd.PromptLookupDrafter(min_ngram=2), sd.ModelDrafter(model)])
    session = drafter.start(46)
    repeated = session.propose([1, 2, 3, 1, 2], 2, SamplingParams(1.0), Random(0))
    assert repeated.tokens == [3, 1] and repeated.probs is None
    fresh = session.propose([1, 2, 3, 1, 2, 9], 2, SamplingParams(1.0), Random(0))
    assert fresh.probs is not None and fresh.passes == 2
    pair = sd.Pair(load_model(tiny_folder("llama", seed=1), device="cpu"), drafter)
    assert sd.generate(pair, [5, 6, 5, 6], max_new_tokens=30).tokens == sd.generate_plain(pair, [5, 6, 5, 6], 30).tokens
    with pytest.raises(sd.SpecdecError, match="at least one drafter"):
        sd.ComposedDrafter([])
