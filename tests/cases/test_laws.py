"""Reports of a wrong output law.  The law of our decoder is computed, not sampled: every way its draws can fall."""

from random import Random
from unittest.mock import patch

import numpy as np
import pytest
import torch
from kit import law_of, slow_law, slow_scores, total_variation
from tiny import tiny_feature_draft
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor

import specdec_lib as sd
from specdec_lib.acceptance import recording_verifier
from specdec_lib.audit.adapters import tabular
from specdec_lib.decode.draft_length import Confidence, Constant, Heuristic
from specdec_lib.drafters import SamplingParams
from specdec_lib.exact import accepted_law, output_law
from specdec_lib.verify import VERIFIERS, Verifier, block, token
from specdec_lib.verify.lossy import ensemble, lenience, lenience_greedy, typical

PROMPT = [2, 1, 2, 0]
SMALL = {"vocab_size": 3, "eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 0}


def tokens_of(pair, prompt=PROMPT, row=0, **options):
    settings = {"gamma": 2, "max_new_tokens": 3, "temperature": 1.0, "eos": []} | options
    return lambda: tuple(sd.generate(pair, prompt, **settings).tokens[row])


def lookup(case):
    return case.with_draft(sd.PromptLookupDrafter())


def early(case):
    return case.with_draft(sd.EarlyExitDrafter(1))


def features(case):
    return case.with_draft(sd.FeatureDrafter(tiny_feature_draft(case.model)))


LAWS = {
    "https://github.com/jaymody/speculative-sampling/issues/3 - the draft took its argmax, the test used its law": {
        "options": {"gamma": 1},
    },
    "https://github.com/huggingface/transformers/issues/47932 - tokens from the filtered law, the raw one reported": {
        "options": {"top_k": 2, "temperature": 0.7},
    },
    "https://github.com/vllm-project/vllm/issues/9834 - the target verified without the request's parameters": {
        "options": {"top_p": 0.8, "temperature": 1.3},
    },
    "https://github.com/huggingface/transformers/pull/28508 - tokens that the target excludes were accepted": {
        "options": {"min_p": 0.3},
    },
    "https://github.com/huggingface/transformers/pull/28166 - p and q one position apart, seen from gamma = 2 on": {
        "options": {"gamma": 3},
    },
    "https://github.com/ml-explore/mlx-swift-lm/pull/459 - a lookup draft kept with probability p(2 - p)": {
        "pair": lookup,
    },
    "https://github.com/vllm-project/vllm-ascend/issues/7807 - block verification with the token rule's residual": {
        "options": {"verifier": "block"},
    },
    "https://github.com/vllm-project/vllm/pull/26317 - min_tokens not kept at the later positions of a block": {
        "options": {"min_new_tokens": 2, "eos": [0]},
        "law": {"min_new": 2, "ends": (0,)},
    },
    "https://github.com/vllm-project/vllm/issues/22987 - a penalty that does not see the block's own tokens": {
        "options": {"processors": [RepetitionPenaltyLogitsProcessor(3.0)]},
        "law": {"processors": [RepetitionPenaltyLogitsProcessor(3.0)]},
    },
    "https://github.com/vllm-project/vllm/issues/18902 - a processor that the target's side ignores": {
        "pair": lookup,
        "options": {"processors": [NoRepeatNGramLogitsProcessor(3), SuppressTokensLogitsProcessor([1], "cpu")]},
        "law": {"processors": [NoRepeatNGramLogitsProcessor(3), SuppressTokensLogitsProcessor([1], "cpu")]},
    },
    "https://github.com/ggml-org/llama.cpp/issues/3919 - a confidence filter; the unsure token is kept here": {
        "options": {"gamma": Confidence(0.6, longest=3)},
    },
    "https://github.com/huggingface/transformers/pull/28759 - a draft length that adapts to what was accepted": {
        "options": {"gamma": Heuristic(first=1)},
    },
    "https://github.com/huggingface/transformers/pull/34240 - the target's first layers as its draft": {
        "pair": early,
    },
    "https://arxiv.org/abs/2401.15077 - the target's hidden states, over a part of its vocabulary": {
        "pair": features,
    },
}


@pytest.mark.parametrize("address", LAWS)
def test_the_output_law_is_the_targets(address, tiny):
    case = tiny(noise=0.5, **SMALL)
    spec = LAWS[address]
    pair = spec.get("pair", lambda case: case.pair)(case)
    options = spec.get("options", {})
    names = set(SamplingParams.__annotations__) - {"processors"}
    sampling = SamplingParams(**{"temperature": 1.0} | {k: v for k, v in options.items() if k in names})
    expected = slow_law(case.pair.target, PROMPT, 3, sampling, **spec.get("law", {}))
    found = law_of(tokens_of(pair, **options))
    assert total_variation(found, expected) < 1e-12
    assert len(expected) > 3  # there was something to get wrong


SEVERAL = {
    "https://github.com/NJUNLP/MCSD/issues/5 - which law the last token comes from when all candidates are refused": {},
    "https://github.com/foundation-model-stack/fms-extras/issues/12 - several candidates, compared with one draw": {
        "options": {"top_p": 0.8, "temperature": 1.3, "drafts": 3},
    },
    "https://arxiv.org/abs/2401.15077 - several drafts on the target's hidden states, which the rows then share": {
        "pair": features,
        "options": {"gamma": 2, "max_new_tokens": 3, "top_k": 2},
    },
    "https://github.com/vllm-project/vllm/issues/22987 - a penalty that does not see the block's own tokens": {
        "options": {"processors": [RepetitionPenaltyLogitsProcessor(3.0)]},
        "law": {"processors": [RepetitionPenaltyLogitsProcessor(3.0)]},
    },
    "https://github.com/vllm-project/vllm/pull/26317 - min_tokens not kept at the later positions of a block": {
        "options": {"min_new_tokens": 1, "eos": [0]},
        "law": {"min_new": 1, "ends": (0,)},
    },
    "https://github.com/ggml-org/llama.cpp/issues/3919 - a confidence filter; the chains end where they are unsure": {
        "options": {"gamma": Confidence(0.6, longest=2), "max_new_tokens": 3, "top_k": 2},
    },
}


@pytest.mark.parametrize("address", SEVERAL)
def test_the_output_law_of_several_drafts_is_the_targets(address, tiny):
    case, spec = tiny(noise=0.5, **SMALL), SEVERAL[address]
    options = {"drafts": 2, "gamma": 1, "max_new_tokens": 2} | spec.get("options", {})
    sampling = SamplingParams(options.get("temperature", 1.0), options.get("top_k"), options.get("top_p"))
    expected = slow_law(case.pair.target, PROMPT, options["max_new_tokens"], sampling, **spec.get("law", {}))
    pair = spec.get("pair", lambda case: case.pair)(case)
    assert total_variation(law_of(tokens_of(pair, **options)), expected) < 1e-12
    assert len(expected) > 3


def test_a_wrong_rule_has_another_law(tiny):
    case = tiny(noise=0.5, **SMALL)
    token = VERIFIERS["token"]
    wrong = Verifier("resamples from p", token.accepted, lambda p, q, x, n: p[n], False, "")
    found = law_of(tokens_of(case.pair, verifier=wrong, max_new_tokens=2))
    assert total_variation(found, slow_law(case.pair.target, PROMPT, 2)) > 0.01


def test_dropping_the_unsure_token_has_another_law(tiny):
    """https://github.com/ggml-org/llama.cpp/pull/22506 - a draft that ends before the token it was unsure of."""
    case = tiny(noise=0.5, **SMALL)

    class Drops(sd.ModelDrafter):
        def start_batch(self, *given):
            session = super().start_batch(*given)
            propose = session.propose

            def shorter(*args):
                (draft,) = propose(*args)
                if draft.probs is None:
                    return [draft]
                unsure = [i for i, x in enumerate(draft.tokens) if draft.probs[i, x] < 0.6]
                cut = unsure[0] if unsure else len(draft.tokens)
                draft.tokens, draft.probs = draft.tokens[:cut], draft.probs[:cut]
                return [draft]

            session.propose = shorter
            return session

    pair = case.with_draft(Drops(case.pair.draft))
    assert total_variation(law_of(tokens_of(pair, max_new_tokens=2)), slow_law(case.pair.target, PROMPT, 2)) > 0.01


@pytest.mark.parametrize("row", [0, 1])
def test_the_law_of_a_row_in_a_batch(row, tiny):
    """https://github.com/huggingface/transformers/issues/32165 - rows that accept different numbers of tokens."""
    case = tiny(noise=0.5, **SMALL)
    prompts = [PROMPT, [2]]
    options = {"gamma": 1, "max_new_tokens": 2, "batch_size": 2}
    found = law_of(tokens_of(case.pair, prompts, row, **options))
    assert total_variation(found, slow_law(case.pair.target, prompts[row], 2)) < 1e-12


def test_a_token_of_probability_zero_is_never_kept_even_by_a_uniform_of_zero(tiny):
    """https://github.com/sgl-project/sglang/issues/35771 - `u <= p / q` holds at u = 0 and p = 0."""
    case = tiny(noise=2.0, **SMALL)
    expected = slow_law(case.pair.target, PROMPT, 3, SamplingParams(1.0, top_k=1))
    with patch.object(Random, "random", lambda self: 0.0):
        for gamma in (1, 2, 3):
            found = tokens_of(case.pair, gamma=gamma, top_k=1)()
            assert expected.get(found, 0.0) > 0


RULES = {
    "token": "token",
    "block": "block",
    "lenience": lenience(0.5),
    "lenience, its own residual": lenience(0.5, "p-lq"),
    "typical": typical(),
    "a mixture, its bonus from the target": ensemble(0.5, bonus="target"),
}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_writes_the_law_that_the_exact_room_computes(name, tiny):
    """https://github.com/huggingface/transformers/issues/45865 - a lossy rule whose law nobody had stated."""
    case = tiny(noise=0.5, **SMALL)
    models = [tabular(model, PROMPT) for model in (case.pair.target, case.pair.draft)]
    expected = output_law(RULES[name], *models, gamma=2, length=3, cap=True).sequences
    assert total_variation(law_of(tokens_of(case.pair, verifier=RULES[name])), expected) < 1e-12


@pytest.mark.parametrize("name", ["token", "block"])
def test_what_two_rules_would_write_is_told_while_one_of_them_decodes(name, tiny):
    """https://github.com/vllm-project/vllm-ascend/issues/7807 - a rule's gain, here in expectation and exactly."""
    case, rules = tiny(noise=0.5, **SMALL), ["token", "block"]

    def write():
        answers = []
        rule = recording_verifier(VERIFIERS[name], [token.expected_tokens, block.expected_tokens], answers)
        stats = sd.generate(case.pair, PROMPT, 2, 3, temperature=1.0, eos=[], verifier=rule).stats
        assert len(answers) == stats.rounds
        return *answers[0], sum(told[rules.index(name)] for told in answers), stats.accepted + stats.rounds

    *first, told, written = np.array([weight * np.array(found) for found, weight in law_of(write).items()]).sum(0)
    models = [tabular(model, PROMPT) for model in (case.pair.target, case.pair.draft)]
    for rule, tokens in zip(rules, first, strict=True):
        law = accepted_law(rule, *models, 2)
        assert tokens == pytest.approx(1 + sum(n * chance for n, chance in enumerate(law)))
    assert first[1] > first[0] + 1e-3 and told == pytest.approx(written)


@pytest.mark.parametrize(("n", "batch_size"), [(2, 1), (1, 2)])
def test_a_mixture_is_the_mixture_at_every_token(n, batch_size, tiny):
    """https://github.com/huggingface/transformers/issues/45865 - the mixture's bonus drawn from the target alone."""
    case, w = tiny(noise=0.5, **SMALL), 0.3
    target, draft = case.pair.target, case.pair.draft

    def mixture(tokens):
        laws = [SamplingParams(1.0).probs(slow_scores(model, PROMPT + tokens, 4)) for model in (target, draft)]
        return (w * laws[0] + (1 - w) * laws[1]).tolist()

    expected = {(a,): p for a, p in enumerate(mixture([]))}
    if n == 2:
        expected = {(*a, b): p * q for a, p in expected.items() for b, q in enumerate(mixture(list(a)))}
    prompts = [PROMPT, [2]][:batch_size]
    options = {"gamma": 1, "max_new_tokens": n, "batch_size": batch_size}
    found = law_of(tokens_of(case.pair, prompts, verifier=ensemble(w), **options))
    assert total_variation(found, expected) < 1e-12
    by_target = law_of(tokens_of(case.pair, prompts, verifier=ensemble(w, bonus="target"), **options))
    assert total_variation(by_target, expected) > 0.01
    assert total_variation(slow_law(target, PROMPT, n), expected) > 0.1


def test_a_mixture_with_a_draft_that_has_nothing_to_say_is_refused(tiny):
    """https://github.com/huggingface/transformers/issues/45865 - a mixture weight without a draft to mix in."""
    case = tiny(**SMALL)
    with pytest.raises(sd.SpecdecError, match="mixes the draft's distribution into every token"):
        tokens_of(case.with_draft(sd.PromptLookupDrafter(min_ngram=3)), [0, 1, 2], verifier=ensemble(0.5))()


def test_a_mixture_takes_no_drafts_that_end_by_their_own_tokens(tiny):
    """https://github.com/huggingface/transformers/issues/45865 - the last token set the length, then was dropped."""
    case = tiny(**SMALL)
    with pytest.raises(sd.SpecdecError, match="does not depend on their tokens"):
        tokens_of(case.pair, gamma=Confidence(0.5), verifier=ensemble(0.5))()
    draft = sd.ComposedDrafter([sd.PromptLookupDrafter(), sd.ModelDrafter(case.pair.draft, confidence=0.5)])
    with pytest.raises(sd.SpecdecError, match="does not depend on their tokens"):
        tokens_of(case.with_draft(draft), verifier=ensemble(0.5))()


@pytest.mark.parametrize("lenient", [1.0, 0.6, 0.2])
def test_lenience_at_temperature_0_keeps_what_is_nearly_the_best(lenient, tiny):
    """Leviathan et al., arXiv 2211.17192, appendix A.5: its rule for temperature 0, whose inequality is misprinted."""
    case = tiny(noise=0.5, **SMALL)
    target, draft = case.pair.target, case.pair.draft
    expected, start = list(PROMPT), len(PROMPT)
    while len(expected) - start < 12:  # rounds of one draft token, by hand
        laws = [slow_scores(model, expected, start).softmax(-1) for model in (target, draft)]
        x = int(laws[1].argmax())
        kept = len(expected) - start < 11 and float(laws[0][x]) >= lenient * float(laws[0].max())
        expected.append(x if kept else int(laws[0].argmax()))
        if kept:
            expected.append(int(slow_scores(target, expected, start).argmax()))
    options = {"gamma": 1, "max_new_tokens": 12, "temperature": 0.0, "verifier": lenience_greedy(lenient)}
    found = list(tokens_of(case.pair, **options)())
    assert found == expected[start:]
    exact = list(tokens_of(case.pair, **{**options, "verifier": "greedy"})())
    assert (found == exact) == (lenient == 1)
    with pytest.raises(sd.SpecdecError, match="rule for temperature 0"):
        tokens_of(case.pair, **{**options, "temperature": 1.0})()


def test_an_exact_rule_does_not_keep_the_second_of_equal_tokens(tiny):
    """All tokens are equal where the processor sets all scores to 0: whatever is drafted, greedy text is token 0."""
    flat = lambda ids, scores: torch.zeros_like(scores)  # noqa: E731
    pair = tiny().with_draft(sd.NGramDrafter.fit([[3, 3, 3]], order=1))
    for rule in (lenience_greedy(1), "greedy", "token"):
        options = {"gamma": 1, "max_new_tokens": 6, "temperature": 0.0, "processors": flat, "verifier": rule}
        assert tokens_of(pair, [3, 3], **options)() == (0,) * 6


def test_a_draft_token_that_is_written_was_not_refused(tiny):
    """Without a bonus the mixture's last draft token is kept by writing it after the others."""
    pair = tiny(**SMALL).pair
    for w in (0.0, 0.5):
        out = sd.generate(pair, [1, 2], 3, 24, 1.0, verifier=ensemble(w, bonus="none"), eos=[])
        assert all(r.kept == sum(a == b for a, b in zip(r.drafted, r.emitted, strict=False)) for r in out.trace)
        assert (out.stats.rejected == 0) == (out.stats.acceptance_rate == 1) == (w == 0)
        assert out.stats.emitted == out.stats.accepted + out.stats.rounds - out.stats.trimmed


def test_a_number_and_the_constant_rule_are_the_same(tiny):
    pair = tiny(**SMALL).pair
    assert tokens_of(pair, gamma=3, max_new_tokens=20)() == tokens_of(pair, gamma=Constant(3), max_new_tokens=20)()
