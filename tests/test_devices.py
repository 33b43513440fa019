"""A target that accelerate places: by itself on one device, or spread over several."""

import pytest
from transformers import AutoModelForCausalLM

import specdec_lib as sd
from specdec_lib.models import load_transformers
from specdec_lib.models.fast import FastLlama
from specdec_lib.models.pair import fast

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
