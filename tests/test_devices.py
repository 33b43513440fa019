"""A target that accelerate places: by itself on one device, or spread over several."""

import specdec_lib as sd
from specdec_lib.models import load_transformers
from specdec_lib.models.fast import FastLlama
from specdec_lib.models.pair import fast


def test_a_target_that_accelerate_places_decodes_as_any_other(tiny_folder):
    folder = tiny_folder("llama")
    spread, plain = (sd.load_pair(folder, folder, device=device) for device in ("auto", "cpu"))
    options = {"max_new_tokens": 12, "eos": []}
    found = sd.generate(spread, [5, 9, 17, 3], **options)
    assert found.tokens == sd.generate(plain, [5, 9, 17, 3], **options).tokens
    assert found.stats.acceptance_rate == 1 and found.stats.target_passes == 2


def test_a_model_on_two_devices_runs_through_transformers(tiny_folder):
    model = load_transformers(tiny_folder("llama"), device="cpu")
    assert isinstance(fast(model), FastLlama)
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    assert fast(model) is model
