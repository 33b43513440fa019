"""Reports of a decoder that changed what it was given: models, configurations, the caller's randomness, processors."""

import random

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import specdec_lib as sd
from specdec_lib.decode.draft_length import Confidence, Fastest, Heuristic
from specdec_lib.models import load_transformers
from specdec_lib.models.fast import FastLlama

PROMPT = [5, 9, 17, 3, 8, 9, 17, 3]


def state_of(*models):
    """Everything that a call must leave as it was."""
    legacy = str(np.random.get_state())  # noqa: NPY002
    found = [torch.get_rng_state().tolist(), random.getstate(), legacy, torch.get_num_threads()]
    found += [torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()]
    for model in models:
        found += [model.config.to_dict(), model.generation_config.to_dict(), model.training, model.config.use_cache]
        found += [[(name, p.double().sum().item(), p.requires_grad) for name, p in model.named_parameters()]]
        found += [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        found += [sorted(vars(model))]
    return found


CALLS = {
    "plain": lambda pair, **more: sd.generate_plain(pair, PROMPT, max_new_tokens=12, **more),
    "drafted": lambda pair, **more: sd.generate(pair, PROMPT, max_new_tokens=12, **more),
    "sampled": lambda pair, **more: sd.generate(pair, PROMPT, max_new_tokens=12, temperature=1.0, top_k=5, **more),
    "block": lambda pair, **more: sd.generate(
        pair, PROMPT, max_new_tokens=12, temperature=1.0, verifier="block", **more
    ),
    "heuristic": lambda pair, **more: sd.generate(pair, PROMPT, gamma=Heuristic(), max_new_tokens=12, **more),
    "confidence": lambda pair, **more: sd.generate(pair, PROMPT, gamma=Confidence(), max_new_tokens=12, **more),
    "fastest": lambda pair, **more: sd.generate(pair, PROMPT, gamma=Fastest(), max_new_tokens=12, **more),
    "several": lambda pair, **more: sd.generate(pair, PROMPT, max_new_tokens=12, temperature=1.0, drafts=3, **more),
    "batch": lambda pair, **more: sd.generate(pair, [PROMPT, [4]], max_new_tokens=12, batch_size=2, **more),
    "processed": lambda pair, **more: sd.generate(
        pair,
        PROMPT,
        max_new_tokens=12,
        min_new_tokens=3,
        logprobs=True,
        **{"processors": [RepetitionPenaltyLogitsProcessor(1.5)]} | more,
    ),
}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_changed_and_a_second_call_says_the_same(call, kind, tiny_folder):
    """https://github.com/huggingface/transformers/pull/28759 - a draft length that lived on in the model's config."""
    target, draft = (load_transformers(tiny_folder(kind, seed=s), device="cpu") for s in (0, 1))
    pair = sd.Pair(target, draft)
    before = state_of(target, draft)
    first = CALLS[call](pair)
    assert state_of(target, draft) == before
    if call != "fastest":
        assert [r.drafted for r in CALLS[call](pair).trace] == [r.drafted for r in first.trace]
    assert CALLS[call](pair).tokens == first.tokens


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("where", ["on_round", "criteria", "processors"])
def test_nothing_is_changed_when_it_fails_in_the_middle(call, where, tiny_folder):
    """https://github.com/huggingface/transformers/pull/34240 - the model stayed short after an exception."""
    target, draft = (load_transformers(tiny_folder("gpt2", seed=s), device="cpu") for s in (0, 1))
    pair = sd.Pair(target, draft)
    before = state_of(target, draft)
    expected = CALLS["drafted"](pair).tokens
    left = [3]

    def fail(*args):
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("in the middle")
        return args[-1] if where == "processors" else False

    with pytest.raises(RuntimeError, match="in the middle"):
        CALLS[call](pair, **{where: fail})
    assert state_of(target, draft) == before
    assert CALLS["drafted"](pair).tokens == expected


def test_lists_that_were_given_stay_as_they_were(tiny):
    """https://github.com/huggingface/transformers/issues/40739 - arguments that a call edits for the next one."""
    prompts, eos, stop, processors = [PROMPT[:], [4]], [3, 7], ["xy"], [RepetitionPenaltyLogitsProcessor(1.5)]
    copies = [list(map(list, prompts)), eos[:], stop[:], processors[:]]
    penalty = processors[0].penalty
    sd.generate(tiny().pair, prompts, eos=eos, stop=stop, processors=processors, max_new_tokens=9, min_new_tokens=2)
    assert [prompts, eos, stop, processors] == copies and processors[0].penalty == penalty


def test_a_fast_model_is_not_changed_either(tiny_folder):
    """https://github.com/huggingface/transformers/pull/34240 - layers that were cut off for early exit."""
    model = load_transformers(tiny_folder("llama"), device="cpu")
    before = state_of(model)
    fast = FastLlama(model)
    layers, config = list(fast.layers), fast.config.to_dict()
    for draft in (sd.EarlyExitDrafter(1), fast, sd.PromptLookupDrafter()):
        sd.generate(sd.Pair(fast, draft), PROMPT, max_new_tokens=12)
    assert state_of(model) == before and fast.config.to_dict() == config
    assert all(a is b for a, b in zip(fast.layers, layers, strict=True)) and len(fast.layers) == len(layers)
