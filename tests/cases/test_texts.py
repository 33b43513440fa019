"""Reports of a text that is not the target's, of caches and of positions.  Greedy, float64: equal or wrong."""

import pytest
import torch
from kit import slow_greedy
from tiny import tiny_feature_draft

import specdec_lib as sd
from specdec_lib.decode.draft_length import Confidence, Fastest, Heuristic
from specdec_lib.drafters import SamplingParams
from specdec_lib.models import load_model, open_session

PROMPT = [5, 9, 17, 3, 8, 9, 17, 3]

DRAFTERS = {
    "https://github.com/huggingface/transformers/issues/30042 - a draft model, rolled back": lambda case: (
        case.pair.draft
    ),
    "https://github.com/vllm-project/vllm/issues/41758 - n-grams": lambda case: sd.NGramDrafter.fit([PROMPT]),
    "https://github.com/ggml-org/llama.cpp/issues/5657 - lookup": lambda case: sd.PromptLookupDrafter(),
    "https://github.com/vllm-project/vllm/issues/6285 - the target itself": lambda case: case.pair.target,
    "https://github.com/huggingface/transformers/pull/34240 - early exit": lambda case: sd.EarlyExitDrafter(1),
    "https://arxiv.org/abs/2401.15077 - the target's hidden states": lambda case: sd.FeatureDrafter(
        tiny_feature_draft(case.model)
    ),
    "https://github.com/huggingface/transformers/pull/28759 - lookup, else a model": lambda case: sd.ComposedDrafter(
        [sd.PromptLookupDrafter(min_ngram=3), sd.ModelDrafter(case.pair.draft)]
    ),
}
LENGTHS = {
    "https://github.com/romsto/Speculative-Decoding/issues/4 - greedy that drew at random": 3,
    "https://github.com/huggingface/transformers/pull/28759 - +2 or -1": Heuristic(),
    "https://github.com/ggml-org/llama.cpp/issues/3919 - a confidence threshold": Confidence(0.5),
    "https://github.com/ollama/ollama/pull/16791 - a controller of throughput": Fastest(first=2, longest=6),
}


@pytest.mark.parametrize("address", DRAFTERS)
def test_every_drafter_leaves_the_greedy_text_alone(address, tiny):
    case = tiny()
    pair = case.with_draft(DRAFTERS[address](case))
    expected = slow_greedy(case.model, PROMPT, 24)
    for gamma in (1, 3, 6):
        out = sd.generate(pair, PROMPT, gamma=gamma, max_new_tokens=24, eos=[])
        assert out.tokens == [expected]
    assert out.stats.drafted > 0


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma"])
@pytest.mark.parametrize("address", LENGTHS)
def test_every_draft_length_leaves_the_greedy_text_alone(address, kind, tiny):
    case = tiny(kind)
    out = sd.generate(case.pair, PROMPT, gamma=LENGTHS[address], max_new_tokens=32, eos=[])
    assert out.tokens == [slow_greedy(case.model, PROMPT, 32)]
    if not isinstance(LENGTHS[address], Fastest):  # which may find that this draft, slower than its target, never pays
        assert out.stats.kept > 0 and out.stats.rejected > 0 and out.stats.rounds > 2


def test_a_draft_that_is_the_target_is_kept_whole(tiny):
    """https://github.com/meta-pytorch/gpt-fast/issues/107 - after a full acceptance a cache entry was missing."""
    case = tiny()
    pair = case.with_draft(case.pair.target)
    held = []
    out = sd.generate(pair, PROMPT, gamma=3, max_new_tokens=16, eos=[], on_round=held.append)
    assert [r.accepted for r in held] == [3, 3, 3, 3] and out.stats.acceptance_rate == 1
    assert out.tokens == [slow_greedy(case.model, PROMPT, 16)]


def test_a_draft_whose_context_ends_lets_the_target_go_on(tiny, tiny_folder):
    """https://github.com/huggingface/transformers/issues/46629 - an IndexError in the middle of the text."""
    case = tiny("gpt2")
    short = load_model(tiny_folder("gpt2", n_positions=16), "cpu", "float64")
    out = sd.generate(case.with_draft(short), PROMPT, gamma=4, max_new_tokens=40, eos=[])
    assert out.tokens == [slow_greedy(case.model, PROMPT, 40)]
    assert out.stats.drafted > 0 and out.trace[-1].drafted == [] and out.stats.rounds > 20


def test_early_exit_shares_the_cache_and_leaves_no_trace(tiny):
    """https://github.com/huggingface/transformers/pull/34240 - drafting by editing the model's own configuration."""
    case = tiny()
    target = case.pair.target
    before = target.config.to_dict()
    drafter = sd.EarlyExitDrafter(1)
    session = open_session(target)
    session.feed(torch.tensor([PROMPT[:-1]]), last=0)
    (draft,) = drafter.start_batch(1, 0, session).propose([PROMPT], [3], [SamplingParams()], [None])
    assert session.length == len(PROMPT) - 1 and len(draft.tokens) == draft.passes == 3
    after = session.feed(torch.tensor([PROMPT[-1:]]))[0, -1]
    fresh = open_session(target).feed(torch.tensor([PROMPT]))[0, -1]
    torch.testing.assert_close(after, fresh, rtol=1e-12, atol=1e-12)

    def fail(*args):
        raise RuntimeError("in the middle")

    for options in ({"on_round": fail}, {"processors": [fail]}):
        with pytest.raises(RuntimeError, match="in the middle"):
            sd.generate(case.with_draft(drafter), PROMPT, **options)
    assert target.config.to_dict() == before and len(target.layers) == 2
    out = sd.generate_plain(case.pair, PROMPT, max_new_tokens=12, eos=[])
    assert out.tokens == [slow_greedy(case.model, PROMPT, 12)]


@pytest.mark.parametrize("gamma", [Confidence(0.3), Heuristic(), 8])
def test_early_exit_with_adaptive_lengths(gamma, tiny):
    """https://github.com/huggingface/transformers/pull/34240 - drafts that the target's cache must not remember."""
    case = tiny()
    out = sd.generate(case.with_draft(sd.EarlyExitDrafter(1)), PROMPT, gamma=gamma, max_new_tokens=30, eos=[])
    assert out.tokens == [slow_greedy(case.model, PROMPT, 30)]
    assert out.stats.rejected > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda case: sd.EarlyExitDrafter(0), "layers must be a whole number >= 1, got 0"),
        (lambda case: sd.generate(case.with_draft(sd.EarlyExitDrafter(2)), PROMPT), "the target has 2"),
        (lambda case: sd.generate(sd.Pair(case.model, sd.EarlyExitDrafter(1)), PROMPT), "runs as FastLlama"),
        (lambda case: sd.generate(case.with_draft(sd.EarlyExitDrafter(1)), [PROMPT] * 2, batch_size=2), "one text"),
    ],
)
def test_early_exit_where_it_cannot_work(make, message, tiny):
    """https://github.com/huggingface/transformers/pull/34240 - 0 layers, or all of them, were taken in silence."""
    with pytest.raises(sd.SpecdecError, match=message):
        make(tiny())
