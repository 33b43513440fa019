"""Models, drafts, prompts and options drawn at random: greedy, ours writes what the slow decoder writes."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit import slow_greedy
from transformers import MaxLengthCriteria, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

import specdec_lib as sd
from specdec_lib.decode.draft_length import Confidence, Heuristic

PROCESSORS = {"repetition": RepetitionPenaltyLogitsProcessor(1.4), "n-grams": NoRepeatNGramLogitsProcessor(3)}
DRAFTERS = {
    "model": lambda case: case.pair.draft,
    "itself": lambda case: case.pair.target,
    "lookup": lambda case: sd.PromptLookupDrafter(),
    "composed": lambda case: sd.ComposedDrafter(
        [sd.PromptLookupDrafter(), sd.ModelDrafter(case.pair.draft)], [None, 2]
    ),
}
prompts = st.lists(st.lists(st.integers(3, 45), min_size=1, max_size=9), min_size=1, max_size=4)


@given(
    kind=st.sampled_from(["llama", "qwen2", "gpt2", "gemma", "mistral", "t5"]),
    noise=st.sampled_from([0.1, 0.3, 1.0]),
    draft=st.sampled_from(sorted(DRAFTERS)),
    prompts=prompts,
    gamma=st.one_of(st.integers(1, 7), st.just(Heuristic(2))),
    confidence=st.sampled_from([0.0, 0.3, 0.9]),
    verifier=st.sampled_from(["token", "block", "greedy"]),
    n=st.integers(0, 16),
    least=st.integers(0, 4),
    ends=st.lists(st.integers(0, 45), max_size=4),
    stop=st.lists(st.text("abcdefgh0123 .", min_size=1, max_size=2), max_size=2),
    limit=st.integers(6, 40),
    processors=st.lists(st.sampled_from(sorted(PROCESSORS)), max_size=2, unique=True),
    batch_size=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_anything(
    tiny, kind, noise, draft, prompts, gamma, confidence, verifier, n, least, ends, stop, limit, processors, batch_size
):
    """https://github.com/huggingface/transformers/pull/27540 - tests that never met the combination that failed."""
    case = tiny(kind, noise)
    least = min(least, n)
    chosen, rules = [PROCESSORS[name] for name in processors], [MaxLengthCriteria(limit)]
    told = {"ends": ends, "min_new": least, "stop": stop, "criteria": rules, "processors": chosen}
    expected = [slow_greedy(case.model, prompt, n, **told, decode=case.decode) for prompt in prompts]
    if confidence and draft in ("model", "itself", "composed"):
        gamma = Confidence(confidence, 6)
    options = {"eos": ends, "min_new_tokens": least, "stop": stop, "criteria": rules, "processors": chosen}
    options |= {"max_new_tokens": n, "batch_size": batch_size}
    out = sd.generate(case.with_draft(DRAFTERS[draft](case)), prompts, gamma, verifier=verifier, **options)
    assert out.tokens == expected
    assert sd.generate_plain(case.pair, prompts, **options).tokens == expected
