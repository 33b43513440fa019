"""Reports of caches that cannot be rolled back, and of models in other forms than plain float32."""

from copy import deepcopy

import pytest
import torch
import transformers
from kit import slow_greedy

import specdec_lib as sd
from specdec_lib.audit.identity import compare, rounding
from specdec_lib.models import load_transformers
from specdec_lib.studies.both_sides import disturbed

PROMPT = [5, 9, 17, 3, 8, 9, 17, 3]
SMALL = {
    "vocab_size": 46, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def mamba():
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=46, hidden_size=32, state_size=4, num_hidden_layers=2, eos_token_id=0)
    )


def falcon_h1():
    state = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**SMALL, **state))


def deepseek():
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    index = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8, "mlp_layer_types": ["dense", "dense"]}
    shape = SMALL | {"num_key_value_heads": 4, "head_dim": 4}
    return transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**shape, **ranks, **index))


STATEFUL = {
    "https://github.com/huggingface/transformers/issues/49036 - a recurrent state": mamba,
    "https://github.com/vllm-project/vllm/issues/39273 - a recurrent state beside attention": falcon_h1,
    "https://github.com/meta-pytorch/gpt-fast/issues/209 - an index of what attention looks at": deepseek,
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


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3"])
def test_a_text_of_several_windows(kind, tiny):
    """https://github.com/huggingface/transformers/pull/48280 - a sliding window, read past its end."""
    case = tiny(kind, noise=0.1)
    expected = slow_greedy(case.model, PROMPT, 40)
    assert len(expected) > 8 * case.model.config.sliding_window
    assert expected != slow_greedy(tiny(kind, sliding_window=512).model, PROMPT, 40)  # the window matters
    for gamma in (2, 7):
        out = sd.generate(case.pair, PROMPT, gamma, max_new_tokens=40, eos=[])
        assert out.tokens == [expected]
        assert out.stats.kept > 0 and out.stats.rejected > 0
    assert sd.generate_plain(case.pair, PROMPT, max_new_tokens=40, eos=[]).tokens == [expected]
    theirs = case.model.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert theirs[0, len(PROMPT) :].tolist() == expected


def test_a_window_that_begins_anew():
    """https://github.com/vllm-project/vllm/issues/39273 - layers of both kinds, the others in chunks."""
    chunked = {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"]}
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 32, "initializer_range": 0.3}
    config = transformers.Llama4TextConfig(**SMALL, **chunked, **experts)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.Llama4ForCausalLM(config).double().eval()
    pair = sd.Pair(model, disturbed(deepcopy(model), 0.1))
    prompts = [PROMPT, [4], [30, 2, 2]]
    expected = [slow_greedy(model, prompt, 24) for prompt in prompts]
    for size in (1, 3):
        out = sd.generate(pair, prompts, gamma=5, max_new_tokens=24, eos=[], batch_size=size)
        assert out.tokens == expected
        assert out.stats.kept > 0 and out.stats.rejected > 0


def test_a_compiled_target(tiny, tiny_folder):
    """https://github.com/huggingface/transformers/issues/32946 - a compiled model that took another path."""
    case = tiny("mistral")
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["frames"]["ok"]
    compiled = torch.compile(load_transformers(tiny_folder("mistral"), "cpu", "float64"), backend="eager", dynamic=True)
    out = sd.generate(sd.Pair(compiled, case.pair.draft), PROMPT, gamma=2, max_new_tokens=5, eos=[])
    assert out.tokens == [slow_greedy(case.model, PROMPT, 5)]
    assert torch._dynamo.utils.counters["frames"]["ok"] > before  # it did not fall back


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "t5"])
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "t5"])
def test_the_greedy_text_of_low_precision_is_that_of_transformers(dtype, kind, tiny_folder):
    """https://github.com/ggml-org/llama.cpp/issues/27975 - a draft that changed the greedy text: at a tie only."""
    pair = sd.load_pair(tiny_folder(kind), tiny_folder(kind, seed=1), device="cpu", dtype=dtype)
    model = load_transformers(tiny_folder(kind), "cpu", dtype)
    same = 0
    for prompt in (PROMPT, [4], [30, 2, 2]):
        ours = sd.generate(pair, prompt, gamma=3, max_new_tokens=20, eos=[]).tokens[0]
        start = 1 if kind == "t5" else len(prompt)
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
        theirs = theirs[0, start:].tolist()
        ids = pair.encode(prompt)
        found = compare(pair.target, ids, theirs, ours, 2 * rounding(pair.target, ids, theirs, 4))
        assert found is None or found.tie
        same += len(theirs) if found is None else found.position
    assert same > 20


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_a_model_that_asks_for_a_static_cache(kind, tiny_folder):
    """https://github.com/huggingface/transformers/issues/30312 - another cache, another text."""
    model = load_transformers(tiny_folder(kind), "cpu", "float64")
    plain = sd.generate_plain(sd.Pair(model), PROMPT, max_new_tokens=20, eos=[]).tokens[0]
    model.generation_config.cache_implementation = "static"
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    pair = sd.Pair(model, load_transformers(tiny_folder(kind, seed=1), "cpu", "float64"))
    assert sd.generate(pair, PROMPT, max_new_tokens=20, eos=[]).tokens[0] == theirs[0, len(PROMPT) :].tolist() == plain
