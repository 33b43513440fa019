"""Reports of caches that cannot be rolled back, and of models in other forms than plain float32."""

import pytest
import torch
import transformers
from kit import slow_greedy

import specdec_lib as sd
from specdec_lib.models import load_transformers

PROMPT = [5, 9, 17, 3, 8, 9, 17, 3]
SMALL = {
    "vocab_size": 46, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=4))


def mamba():
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=46, hidden_size=32, state_size=4, num_hidden_layers=2, eos_token_id=0)
    )


def gemma2():
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, sliding_window=4))


STATEFUL = {
    "https://github.com/huggingface/transformers/pull/48280 - a sliding window, read past its end": mistral,
    "https://github.com/huggingface/transformers/issues/49036 - a recurrent state": mamba,
    "https://github.com/vllm-project/vllm/issues/39273 - layers of both kinds": gemma2,
}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("address", STATEFUL)
def test_a_state_that_cannot_be_rolled_back_is_refused_by_name(address, role, tiny):
    with torch.random.fork_rng():
        model = STATEFUL[address]().eval()
    full = tiny().model
    pair = sd.Pair(model, full) if role == "target" else sd.Pair(full, model)
    rounds = []
    for size in (1, 2):
        with pytest.raises(sd.SpecdecError, match=type(model).__name__):
            sd.generate(pair, [PROMPT, PROMPT], on_round=rounds.append, batch_size=size)
    assert not rounds


def test_a_compiled_target(tiny, tiny_folder):
    """https://github.com/huggingface/transformers/issues/32946 - a compiled model that took another path."""
    case = tiny("gpt2")
    compiled = torch.compile(load_transformers(tiny_folder("gpt2"), "cpu", "float64"), backend="eager", dynamic=True)
    out = sd.generate(sd.Pair(compiled, case.pair.draft), PROMPT, gamma=2, max_new_tokens=6, eos=[])
    assert out.tokens == [slow_greedy(case.model, PROMPT, 6)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_low_precision(dtype, kind, tiny_folder):
    """https://github.com/deepseek-ai/DeepSpec/issues/31 - laws in one precision, draws from another."""
    folder = tiny_folder(kind)
    pair = sd.load_pair(folder, folder, device="cpu", dtype=dtype)
    for options in ({}, {"temperature": 1.0}, {"temperature": 1.0, "verifier": "block"}, {"batch_size": 2}):
        out = sd.generate(pair, [PROMPT, [4]], gamma=3, max_new_tokens=20, eos=[], logprobs=True, **options)
        assert [len(tokens) for tokens in out.tokens] == [20, 20]
        # the draft is the target: nothing but rounding can refuse a token
        assert out.stats.acceptance_rate > 0.8
        assert all(value > -30 for row in out.logprobs for value in row)
