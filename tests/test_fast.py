"""The fast pass: which models may enter it, what it holds in memory, what it does where a layout is refused."""

import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_feature_draft, tiny_model, tiny_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

import specdec_lib as sd
from specdec_lib.bench.contest import pack_linears
from specdec_lib.models import fast as fast_module
from specdec_lib.models import load_model, load_transformers, open_session
from specdec_lib.models.fast import Cache, FastLlama, PackedLinear, packed_linears_available, unsupported
from specdec_lib.models.feature_draft import FastFeatureDraft
from specdec_lib.models.pair import fast
from specdec_lib.studies.hardware import measure_machine

IDS = torch.tensor([[5, 9, 17, 3, 8, 30, 12, 7, 25, 6, 11, 14]])
EXACT = {"rtol": 1e-4, "atol": 1e-5}  # transformers takes norms and rotary angles in float32, also in a float64 model


@pytest.fixture
def model():
    """A tiny Llama in float64 of transformers."""
    return tiny_model("llama", tiny_tokenizer("llama"), 0, {}).double()


def logits_of(model, ids=IDS):
    with torch.inference_mode():
        return model(ids).logits


# -- a layout that the processor refuses ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_processor_refuses_runs_through_torch_and_says_so_once(no_bfloat16_layout, dtype, tiny_folder, caplog):
    folder, kind = tiny_folder("llama"), getattr(torch, dtype)
    stock, model = load_transformers(folder, "cpu", dtype), load_model(folder, "cpu", dtype)
    assert model.head.packed is packed_linears_available(kind) and not packed_linears_available(torch.bfloat16)
    assert pack_linears(load_transformers(folder, "cpu", dtype)) == (15 if packed_linears_available(kind) else 0)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.05, "atol": 0.5}
    torch.testing.assert_close(open_session(model).feed(IDS, last=12), logits_of(stock), **close)
    pair = sd.load_pair(folder, folder, device="cpu", dtype=dtype)
    for options in ({}, {"temperature": 1.0}, {"batch_size": 2}):
        out = sd.generate(pair, [[5, 9, 17], [4]], gamma=3, max_new_tokens=12, eos=[], **options)
        assert out.stats.acceptance_rate > 0.8
    assert measure_machine(dtype=kind, repeats=1, megabytes=1, width=16).rate.value > 0
    said = [record.message for record in caplog.records if "bfloat16 weights" in record.message]
    assert len(said) == 1 and "lays out no bfloat16 weights here (bf16 path needs the cpu support)" in said[0]


def test_a_torch_without_the_operators(monkeypatch, caplog):
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    fast_module._can_pack.cache_clear()
    try:
        linear = PackedLinear(torch.eye(3), torch.ones(3))
        assert linear(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[2, 3, 4]] and not linear.packed
        assert "lays out no float32 weights here" in caplog.text
    finally:
        fast_module._can_pack.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_never_packed(dtype, caplog):
    assert not packed_linears_available(dtype) and not PackedLinear(torch.ones(2, 2, dtype=dtype)).packed
    assert not caplog.records


# -- who may enter -------------------------------------------------------------------------------------


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Adapted(torch.nn.Module):
    """What an adapter library puts in the place of a linear layer, and shows the base layer's weight."""

    def __init__(self, base):
        super().__init__()
        self.base, self.extra = base, torch.nn.Linear(base.in_features, base.out_features, False, dtype=torch.float64)

    @property
    def weight(self):
        return self.base.weight

    bias = None

    def forward(self, x):
        return self.base(x) + self.extra(x)


class Negated(torch.nn.Module):
    def forward(self, weight):
        return -weight


class OtherTensor(torch.Tensor):
    """As quantised weights are: a plain linear layer around a tensor of another kind."""


def a_subclass(model):
    model.model.layers[0].mlp.down_proj.__class__ = Doubled


def an_adapter(model):
    model.model.layers[1].self_attn.q_proj = Adapted(model.model.layers[1].self_attn.q_proj)


def an_adapted_head(model):
    model.lm_head = Adapted(model.lm_head)


def a_hook(model):
    model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda module, inputs, out: -out)


def a_hook_before(model):
    model.model.layers[1].register_forward_pre_hook(lambda module, inputs: (-inputs[0], *inputs[1:]))


def a_parametrization(model):
    torch.nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Negated())


def a_forward_of_its_own(model):
    norm = model.model.norm
    norm.forward = lambda x: 2 * type(norm).forward(norm, x)


def another_norm(model):
    model.model.norm = torch.nn.LayerNorm(32, dtype=torch.float64)


def another_class(model):
    model.__class__ = type("Mine", (type(model),), {"__module__": "somewhere.else"})


def another_tensor(model):
    linear = model.model.layers[0].mlp.gate_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(OtherTensor), requires_grad=False)


def a_quantisation(model):
    model.config.quantization_config = {"quant_method": "torchao"}


def two_dtypes(model):
    model.model.norm.float()


ALTERED = {
    a_subclass: "model.layers.0.mlp.down_proj is a test_fast.Doubled",
    an_adapter: "model.layers.1.self_attn.q_proj is a test_fast.Adapted",
    an_adapted_head: "lm_head is a test_fast.Adapted",
    a_hook: "model.layers.0.self_attn.v_proj has a forward hook",
    a_hook_before: "model.layers.1 has a forward hook",
    a_parametrization: "ParametrizedLinear",
    a_forward_of_its_own: "model.norm has a forward pass of its own",
    another_norm: "model.norm is a torch.nn.modules.normalization.LayerNorm",
    another_class: "the model is a somewhere.else.Mine",
    another_tensor: "model.layers.0.mlp.gate_proj.weight is a test_fast.OtherTensor",
    a_quantisation: "quantised weights",
    two_dtypes: "weights of several dtypes",
}


@pytest.mark.parametrize("alter", ALTERED, ids=lambda alter: alter.__name__)
def test_what_is_not_plain_stays_on_transformers_path_and_is_decoded_as_it_is(alter, model, caplog):
    assert unsupported(model) is None
    before = logits_of(model)
    alter(model)
    reason = unsupported(model)
    assert ALTERED[alter] in reason
    with pytest.raises(sd.SpecdecError, match="cannot run as FastLlama"):
        FastLlama(model)
    with caplog.at_level(logging.INFO, "specdec_lib"):
        assert fast(model) is model
    assert [record.message for record in caplog.records] == [
        f"{model.config.name_or_path} runs through transformers ({reason})"
    ]
    same_numbers = alter in (another_class, another_tensor, a_quantisation, two_dtypes)
    assert torch.allclose(logits_of(model), before, rtol=1e-4, atol=1e-4) is same_numbers
    text = [5, 9, 17]
    for _ in range(8):
        text.append(int(logits_of(model, torch.tensor([text]))[0, -1].argmax()))
    draft = load_draft_for(model)
    assert sd.generate(sd.Pair(fast(model), draft), [5, 9, 17], 3, 8, eos=[]).tokens == [text[3:]]


def load_draft_for(model):
    return fast(tiny_model("llama", tiny_tokenizer("llama"), 1, {"vocab_size": model.config.vocab_size}).double())


def test_hooks_by_which_transformers_reads_hidden_states_change_nothing(model):
    model(IDS, output_hidden_states=True, output_attentions=True)
    assert unsupported(model) is None


def test_a_feature_draft_must_be_plain_too(model):
    draft = tiny_feature_draft(model)
    FastFeatureDraft(draft)
    draft.join.__class__ = Doubled
    with pytest.raises(sd.SpecdecError, match=r"cannot run as FastFeatureDraft \(join is a test_fast.Doubled\)"):
        sd.FeatureDrafter(draft)


def test_it_keeps_the_models_generation_settings(model):
    model.generation_config.eos_token_id = [7, 9]
    assert FastLlama(model).generation_config.eos_token_id == [7, 9]


# -- memory --------------------------------------------------------------------------------------------


def test_a_released_model_gives_its_weights_and_the_same_logits(model):
    expected = logits_of(model)
    shown = FastLlama(model, release=True)
    assert model.lm_head.weight is None and model.model.layers[1].self_attn.k_proj.weight is None
    torch.testing.assert_close(open_session(shown).feed(IDS, last=12), expected, **EXACT)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory of a process as Linux counts it")
def test_loading_never_holds_the_weights_twice(tmp_path):
    """Peaks of memory that is no file's, as shares of the weights: packed in float32, unpacked in float64."""
    # freed memory goes back at once, so that what counts is what is held
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(tmp_path)], env=environment, check=True, capture_output=True, text=True
    )
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert set(peaks) == {"float32", "float64"}
    assert all(0.95 < peak < 1.15 for peak in peaks.values()), peaks


LOADING = """
import gc, json, sys, threading, time
import psutil, torch
from transformers import LlamaConfig, LlamaForCausalLM
from specdec_lib.models import load_model
from specdec_lib.models.fast import FastLlama

def folder(name, width, layers):
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": 4000}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128, "tie_word_embeddings": False}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).half()
    model = model.to_empty(device="cpu")
    for weight in model.parameters():
        torch.nn.init.constant_(weight, 0.01)
    model.save_pretrained(f"{sys.argv[1]}/{name}")
    return f"{sys.argv[1]}/{name}", sum(weight.numel() for weight in model.parameters())

def held():
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared

def watch(seen, done):
    while not done.is_set():
        seen.append(held())
        time.sleep(0.0005)

small, _ = folder("small", 128, 1)
large, count = folder("large", 512, 16)
peaks = {}
for dtype in (torch.float32, torch.float64):
    load_model(small, "cpu", dtype)  # what is imported on first use is no weight
    gc.collect()
    before, seen, done = held(), [], threading.Event()
    watcher = threading.Thread(target=watch, args=(seen, done))
    watcher.start()
    model = load_model(large, "cpu", dtype)
    done.set()
    watcher.join()
    assert isinstance(model, FastLlama)
    peaks[str(dtype).split(".")[1]] = (max(seen) - before) / (count * dtype.itemsize)
    del model
print(json.dumps(peaks))
"""


class Largest(TorchDispatchMode):
    """Notes the most elements that an operation gave, and the operations for which the host waits on a device."""

    WAITS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::lift")

    def __init__(self):
        super().__init__()
        self.elements, self.waits = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        if func.name().startswith(self.WAITS):
            self.waits.append(func.name())
        return out


def ids_of(rows, n, seed=0):
    return torch.randint(3, 40, (rows, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chunk", [1, 5, 16, 512])
def test_a_long_text_is_read_in_chunks_with_the_same_logits(chunk, model):
    ids = ids_of(2, 70)
    shown = FastLlama(model)
    shown.prefill_chunk = chunk
    session = open_session(shown, rows=2, capacity=1)
    session.capture_hidden([1, 2])
    logits = [session.feed(ids[:, :7], last=7), session.feed(ids[:, 7:], last=63)]
    torch.testing.assert_close(torch.cat(logits, 1), logits_of(model, ids), **EXACT)
    states = model.model(ids, output_hidden_states=True).hidden_states[1:]
    torch.testing.assert_close(session.cache.features[:, :70], torch.stack(states, 2), **EXACT)


@torch.inference_mode()
def test_a_long_text_needs_no_square_mask(model):
    shown, n = FastLlama(model), 600
    shown.prefill_chunk = 8
    cache = shown.new_cache(1, n)
    with Largest() as seen:
        shown.hidden(ids_of(1, n), cache)
    # two query heads share a key head; all keys and values of a layer are n * 2 * 8, all states n * 32
    assert seen.elements <= max(8 * 2 * n, cache.keys.numel(), n * 32) < n * n


@pytest.mark.parametrize("chunk", [2, 512])
@torch.inference_mode()
def test_rows_of_different_length_grow_from_a_small_cache(chunk, model):
    """Ragged feeds, refused tokens and chunks, in a cache of one position that grows as it goes."""
    shown = FastLlama(model)
    shown.prefill_chunk = chunk
    cache, ids = shown.new_cache(3, 1), ids_of(3, 40)
    cache.capture_hidden([1, 2], 32)
    lengths, capacities = torch.tensor([0, 0, 0]), set()
    for fed, kept in [((9, 1, 4), (7, 1, 4)), ((3, 6, 1), (3, 2, 1)), ((11, 8, 12), (11, 8, 12))]:
        n = max(fed)
        rows = [ids[i, start : start + n] for i, start in enumerate(lengths.tolist())]  # padding is written over
        out = shown.lm_head(shown.hidden(torch.stack(rows), cache, starts=lengths))
        for i, start in enumerate(lengths.tolist()):
            expected = logits_of(model, ids[i : i + 1, : start + fed[i]])[0, start:]
            torch.testing.assert_close(out[i, : fed[i]], expected, **EXACT)
        lengths = lengths + torch.tensor(kept)
        cache.length = int(lengths.max())
        capacities.add(cache.capacity)
    assert cache.features.shape[1] == cache.capacity and len(capacities) > 1
    cache.select_rows([2, 0, 2])
    for i, row in enumerate([2, 0, 2]):
        n = int(lengths[row])
        states = model.model(ids[row : row + 1, :n], output_hidden_states=True).hidden_states[1:]
        torch.testing.assert_close(cache.features[i, :n], torch.stack(states, 2)[0], **EXACT)


def test_a_cache_doubles_when_it_is_exceeded():
    cache, capacities = Cache(1, 1, 1, 1, 2, torch.empty(0)), []
    for length in range(1, 1001):
        cache.reserve(length)
        capacities.append(cache.capacity)
    assert sorted(set(capacities)) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    cache.reserve(5000)
    assert cache.capacity == 5000


@torch.inference_mode()
def test_the_rotary_table_doubles(model):
    shown = FastLlama(model)
    session = open_session(shown, capacity=600)
    session.feed(ids_of(1, 256), last=0)
    places = []
    for token in range(300):
        session.feed(torch.tensor([[token % 40]]))
        places.append(shown._rotary[0].data_ptr())
    assert len(set(places)) == 2  # 512, then 1024
    assert [len(part) for part in shown._rotary] == [1024, 1024]


def test_two_threads_may_use_one_model(model):
    """Each outgrows the rotary table while the other reads it."""
    shown, ids = FastLlama(model), ids_of(4, 330)

    def text(row):
        session = open_session(shown, capacity=1)
        return torch.cat([session.feed(part, last=part.shape[1]) for part in ids[row : row + 1].split(11, 1)], 1)[0]

    with ThreadPoolExecutor(4) as pool:
        found = torch.stack(list(pool.map(text, range(4))))
    torch.testing.assert_close(found, logits_of(model, ids), **EXACT)


# -- drafts that read hidden states --------------------------------------------------------------------


@torch.inference_mode()
def test_two_drafts_read_different_layers_of_one_target(model):
    """Each gets the states of its own layers, whatever the other asked for."""
    target, ids = FastLlama(model), ids_of(1, 9)
    drafts = [FastFeatureDraft(tiny_feature_draft(model, watched=watched)) for watched in ([2, 1], [1], [2])]
    alone = []
    for draft in drafts:
        cache = target.new_cache(1, 4)
        cache.capture_hidden(draft.watched, 32)
        target.hidden(ids, cache)
        assert cache.captured_layers == draft.watched
        alone.append(draft.states(cache.features[:, :9]))
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        cache = target.new_cache(1, 4)
        for k in order:
            cache.capture_hidden(drafts[k].watched, 32)
        target.hidden(ids, cache)
        assert sorted(cache.captured_layers) == [1, 2] and cache.features.shape[2] == 2
        for draft, expected in zip(drafts, alone, strict=True):
            torch.testing.assert_close(draft.states(cache.features[:, :9], cache.captured_layers), expected)


@torch.inference_mode()
def test_no_forward_pass_waits_for_the_device(model):
    target, draft = FastLlama(model), FastFeatureDraft(tiny_feature_draft(model))
    target.prefill_chunk = 4
    cache, own = target.new_cache(2, 64), draft.new_cache(2, 64)
    cache.capture_hidden(draft.watched, 32)
    ids, starts = ids_of(2, 9), torch.tensor([4, 9])
    with Largest() as seen:
        target.logits(ids, cache, last=2)
        target.lm_head(target.hidden(ids, cache, starts=starts))
        target.hidden(ids[:, :1], cache, layers=1)
        cache.reserve(200)
        states = draft.states(cache.features[:, :9], cache.captured_layers)
        draft.lm_head(draft.step(states, ids, own))
        draft.lm_head(draft.step(states[:, :1], ids[:, :1], own, starts))
    assert not seen.waits
