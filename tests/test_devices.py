"""Where a model is put: by name, by accelerate on one device or spread over several; and what is no place for it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import specdec_lib as sd
from specdec_lib.models import load_model, load_transformers
from specdec_lib.models import pair as pair_module
from specdec_lib.models.fast import FastLlama
from specdec_lib.models.pair import device_and_dtype, fast, moved

PLACES = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]


def test_a_target_that_accelerate_places_decodes_as_any_other(tiny_folder):
    folder = tiny_folder("llama")
    spread, plain = (sd.load_pair(folder, folder, device=device) for device in ("auto", "cpu"))
    options = {"max_new_tokens": 12, "eos": []}
    found = sd.generate(spread, [5, 9, 17, 3], **options)
    assert found.tokens == sd.generate(plain, [5, 9, 17, 3], **options).tokens
    assert found.stats.acceptance_rate == 1 and found.stats.target_passes == 2


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("on_disk", [["model.layers.1"], ["model.embed_tokens", "model.layers.0", "lm_head"]])
def test_a_model_on_two_devices_decodes_as_any_other(kind, on_disk, tiny_folder, tmp_path):
    """Without a GPU the second device is the disk, from which accelerate fetches the weights at each pass."""
    folder = tiny_folder(kind)
    model = load_transformers(folder, "cpu", "float64")
    assert isinstance(fast(model), FastLlama) is (kind == "llama")
    placed = {place: "disk" if place in on_disk else "cpu" for place in PLACES}
    spread = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, device_map=placed, offload_folder=tmp_path)
    assert fast(spread) is spread and spread.hf_device_map == placed
    draft = load_transformers(tiny_folder(kind, seed=1), "cpu", "float64")
    prompts, options = [[5, 9, 17, 3], [4]], {"max_new_tokens": 12, "eos": []}
    expected = sd.generate_plain(sd.Pair(model), prompts, **options).tokens
    for size in (1, 2):
        for pair in (sd.Pair(spread, draft), sd.Pair(model, spread), sd.Pair(spread, model)):
            out = sd.generate(pair, prompts, gamma=3, batch_size=size, criteria=lambda ids, scores: False, **options)
            assert out.tokens == expected
            assert out.stats.acceptance_rate == 1 or pair.draft is draft


# -- what is refused -----------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def nothing_loads(monkeypatch):
    monkeypatch.setattr(pair_module, "resolve", lambda *_: pytest.fail("it began to load"))


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda:9", "device cuda:9 was asked for, but torch sees cuda:0 to cuda:1: use one of these, or 'cpu'"),
        ("cuda:2", "torch sees cuda:0 to cuda:1"),
        (torch.device("cuda", 3), "device cuda:3 was asked for"),
    ],
)
def test_a_gpu_that_is_not_there(device, said, two_gpus, nothing_loads):
    with pytest.raises(sd.SpecdecError, match=said) as error:
        load_model("packaged", device)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("device", ["mps", "meta", "xpu", "cuda", "nowhere", "cpu:x", 1.5, ["cpu"]])
def test_a_device_that_cannot_decode(device, nothing_loads, monkeypatch):
    """Not there, without numbers, or without float64."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for load in (load_model, load_transformers, sd.load_pair):
        with pytest.raises(sd.SpecdecError, match=r"device .*use (cpu|device='cpu')") as error:
            load("packaged", device=device)
        assert "\n" not in str(error.value)


def test_a_device_without_float64_is_refused(monkeypatch, nothing_loads):
    """As Apple's: what it says is a TypeError."""
    real = torch.ones

    def ones(*size, dtype=None, device=None):
        if dtype is torch.float64 and device is not None and device.type == "mps":
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype\nmore")
        return real(*size, dtype=dtype, device="cpu")

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(sd.SpecdecError, match=r"device mps cannot be used \(Cannot convert a MPS Tensor to float64"):
        load_model("packaged", "mps")


@pytest.mark.parametrize("dtype", ["int8", "half", torch.int8, torch.complex64, 32, ["float32"]])
def test_a_dtype_that_no_model_runs_in(dtype, nothing_loads):
    with pytest.raises(sd.SpecdecError, match=r"unknown dtype .*: use one of float32, float64, bfloat16, float16"):
        load_model("packaged", "cpu", dtype)


def test_what_is_there_is_taken():
    assert device_and_dtype("cpu", None) == (torch.device("cpu"), torch.float32)
    assert device_and_dtype(torch.device("cpu"), torch.bfloat16) == (torch.device("cpu"), torch.bfloat16)
    assert device_and_dtype("cpu", "float16")[1] is torch.float16


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, ValueError])
def test_a_model_that_does_not_fit_is_one_line(error, tiny_folder, monkeypatch):
    model = load_transformers(tiny_folder("llama"), "cpu")

    def to(*_):
        raise error("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")

    monkeypatch.setattr(type(model), "to", to)
    said = r"cannot move big \(0.0 GB of weights\) to meta: CUDA out of memory. .*: use device='cpu', device='auto'"
    with pytest.raises(sd.SpecdecError, match=said) as found:
        moved(model, torch.device("meta"), "big")
    assert "\n" not in str(found.value)
    assert load_transformers(tiny_folder("llama"), "cpu").device.type == "cpu"  # what is there already is not moved
