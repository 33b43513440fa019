"""Reports of penalties, bans and masks that drafting forgot, or applied with the wrong history."""

from itertools import pairwise

import pytest
import torch
from kit import slow_greedy
from tiny import tiny_feature_draft
from transformers import (
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    TypicalLogitsWarper,
)

import specdec_lib as sd

PROMPT = [5, 9, 17, 3, 8, 9, 17, 3]
N = 28


def presence(ids, scores):
    """A penalty on every token that has occurred, and one for each time: presence and frequency."""
    counts = torch.zeros_like(scores).index_add_(1, ids[0], torch.ones(1, ids.shape[1], dtype=scores.dtype))
    return scores - 0.5 * (counts > 0) - 0.3 * counts


def in_place(ids, scores):
    scores[:, ids[0, -1]] = float("-inf")
    return scores


def no_rising(_, ids):
    """A grammar: a token is followed by a smaller one, or by anything from 40 on; it knows no other text."""
    new = ids[len(PROMPT) :].tolist()
    assert all(b < a or b >= 40 for a, b in pairwise(new))
    return [t for t in range(46) if t < ids[-1] or t >= 40]


PROCESSORS = {
    "https://github.com/vllm-project/vllm/issues/22987 - repetition": [RepetitionPenaltyLogitsProcessor(1.8)],
    "https://github.com/vllm-project/vllm/issues/18902 - presence and frequency": [presence],
    "https://github.com/NVIDIA/TensorRT-LLM/pull/17701 - n-grams": [NoRepeatNGramLogitsProcessor(2)],
    "https://github.com/vllm-project/vllm/issues/6718 - a list of them": LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.3), NoBadWordsLogitsProcessor([[7], [9, 17]], 0)]
    ),
    "https://github.com/huggingface/transformers/issues/47912 - a forced end": [
        ForcedEOSTokenLogitsProcessor(len(PROMPT) + 11, 0, "cpu")
    ],
    "https://github.com/vllm-project/vllm/issues/9423 - a grammar": [PrefixConstrainedLogitsProcessor(no_rising, 1)],
    "https://github.com/huggingface/transformers/pull/28508 - bans at the beginning": [
        SuppressTokensAtBeginLogitsProcessor(list(range(20)), len(PROMPT), "cpu")
    ],
    "https://github.com/huggingface/transformers/issues/47932 - truncations": [
        MinPLogitsWarper(0.05),
        TypicalLogitsWarper(0.9),
    ],
    "https://github.com/vllm-project/vllm/issues/18902 - a bias on sequences": [
        SequenceBiasLogitsProcessor([[[3, 8], -6.0], [[11], 2.0]])
    ],
    "https://github.com/vllm-project/vllm/issues/18902 - scores changed in place": in_place,
}
DRAFTERS = {
    "model": lambda case: case.pair.draft,
    "itself": lambda case: case.pair.target,
    "lookup": lambda case: sd.PromptLookupDrafter(max_ngram=2),
    "ngram": lambda case: sd.NGramDrafter.fit([list(range(46))]),
    "early exit": lambda case: sd.EarlyExitDrafter(1),
    "features": lambda case: sd.FeatureDrafter(tiny_feature_draft(case.model)),
}


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("address", PROCESSORS)
def test_the_greedy_text_is_the_processed_targets(address, draft, tiny):
    case = tiny(noise=0.1)
    given = PROCESSORS[address]
    listed = [given] if callable(given) and not isinstance(given, list) else given
    expected = slow_greedy(case.model, PROMPT, N, ends=(0,), processors=listed)
    pair = case.with_draft(DRAFTERS[draft](case))
    for options in ({"gamma": 5}, {"gamma": 2, "verifier": "block"}):
        out = sd.generate(pair, PROMPT, max_new_tokens=N, eos=[0], processors=given, **options)
        assert out.tokens == [expected]
    assert sd.generate_plain(pair, PROMPT, max_new_tokens=N, eos=[0], processors=given).tokens == [expected]


def test_every_processor_mattered(tiny):
    """https://github.com/huggingface/transformers/pull/27540 - a test that could not have failed."""
    case = tiny(noise=0.1)
    free = slow_greedy(case.model, PROMPT, N, ends=(0,))
    changed = 0
    for given in PROCESSORS.values():
        out = sd.generate(case.pair, PROMPT, max_new_tokens=N, eos=[0], processors=given)
        changed += out.tokens != [free]
    assert changed >= len(PROCESSORS) - 2  # what truncates may leave the most probable token where it is


def test_a_draft_model_follows_the_processors_too(tiny):
    """https://github.com/vllm-project/vllm/issues/6718 - penalties that only the target knows empty the drafts."""
    case = tiny()
    pair = case.with_draft(case.pair.target)
    out = sd.generate(pair, PROMPT, gamma=4, max_new_tokens=20, eos=[], processors=[presence, in_place])
    assert out.stats.acceptance_rate == 1 and out.stats.rounds == 4


def test_a_draft_that_has_no_allowed_token_drafts_none(tiny):
    """https://github.com/vllm-project/vllm/issues/9423 - a mask that leaves a draft with nothing but NaN."""
    case = tiny()

    class Shortlisted(sd.ModelDrafter):
        def start_batch(self, *given):
            drafting = super().start_batch(*given)
            feed = drafting.session.feed
            drafting.session.feed = lambda *ids: feed(*ids).index_fill(-1, torch.arange(40, 46), float("-inf"))
            return drafting

    def only_forty(ids, scores):
        return scores.index_fill(1, torch.arange(40), float("-inf"))

    expected = slow_greedy(case.model, PROMPT, 12, processors=[only_forty])
    pair = case.with_draft(Shortlisted(case.pair.draft))
    out = sd.generate(pair, PROMPT, max_new_tokens=12, eos=[], processors=only_forty)
    assert out.tokens == [expected] and out.stats.drafted == 0
    out = sd.generate(pair, PROMPT, max_new_tokens=12, eos=[], temperature=1.0, processors=only_forty)
    assert out.stats.drafted == 0 and min(out.tokens[0]) >= 40


def test_processors_see_low_precision_logits_in_float32(tiny_folder):
    """https://github.com/deepseek-ai/DeepSpec/issues/31 - one side in bfloat16, the other in float32."""
    seen = set()

    def look(ids, scores):
        seen.add(scores.dtype)
        return scores

    pair = sd.load_pair(tiny_folder("llama"), tiny_folder("llama", seed=1), device="cpu", dtype="bfloat16")
    sd.generate(pair, PROMPT, max_new_tokens=8, temperature=1.0, processors=look)
    assert seen == {torch.float32}


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ([3], "a logits processor is a function"),
        (lambda ids, scores: scores + float("-inf"), "leave no token to follow 8 tokens of text"),
        (type("SynthIDTextWatermarkLogitsProcessor", (), {"__call__": None})(), "not a function of the text so far"),
    ],
)
def test_processors_that_could_not_work_are_refused(processors, message, tiny):
    """https://github.com/vllm-project/vllm/issues/18902 - a processor that is taken and then ignored."""
    with pytest.raises(sd.SpecdecError, match=message):
        sd.generate(tiny().pair, PROMPT, processors=processors)
