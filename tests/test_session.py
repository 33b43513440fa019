"""A session's answers do not depend on how the text was fed, and roll back exactly."""

import inspect

import pytest
import torch

from specdec_lib.models import load_model, load_transformers, open_session
from specdec_lib.models.fast import FastLlama

KINDS = ["llama", "qwen2", "gpt2", "gemma", "mistral", "gemma2", "gemma3"]
IDS = torch.tensor([[5, 9, 17, 3, 8, 30, 12, 7, 25, 6, 11, 14]])


@pytest.fixture(params=KINDS)
def model(request, tiny_folder):
    return load_transformers(tiny_folder(request.param), device="cpu")


def reference(model, ids):
    with torch.inference_mode():
        return model(ids).logits[0]


def test_feeding_in_parts_gives_the_logits_of_one_pass(model):
    session = open_session(model)
    parts = [session.feed(IDS[:, a:b], last=b - a)[0] for a, b in [(0, 5), (5, 6), (6, 12)]]
    torch.testing.assert_close(torch.cat(parts), reference(model, IDS), rtol=1e-5, atol=1e-5)
    assert session.length == 12


def test_rollback_forgets(model):
    session = open_session(model)
    session.feed(IDS[:, :6], last=0)
    session.feed(torch.tensor([[1, 2, 3]]), last=0)
    session.rollback(6)
    assert session.length == 6
    torch.testing.assert_close(session.feed(IDS[:, 6:], last=6)[0], reference(model, IDS)[6:], rtol=1e-5, atol=1e-5)


def test_rollback_to_where_it_is_keeps_everything(model):
    session = open_session(model)
    session.feed(IDS[:, :6], last=0)
    session.rollback(6)
    assert session.length == 6
    with pytest.raises(ValueError, match="holds 6 tokens"):
        session.rollback(7)


def test_no_logits_when_none_are_asked_for(model):
    assert open_session(model).feed(IDS, last=0).shape == (1, 0, model.config.vocab_size)


def test_what_the_sessions_rely_on_in_transformers(tiny_folder):
    from transformers import DynamicCache

    model = load_transformers(tiny_folder("llama"), device="cpu")
    cache = DynamicCache(config=model.config)
    keyword = {"cache", "past_key_values"} & set(inspect.signature(model.forward).parameters)
    assert len(keyword) == 1
    model(IDS, use_cache=True, **{keyword.pop(): cache})
    cache.crop(-5)
    assert cache.get_seq_length() == 7


def test_what_a_window_lost_is_there_again(tiny_folder):
    layers = ["sliding_attention", "full_attention"]
    folder = tiny_folder("qwen2", use_sliding_window=True, sliding_window=4, layer_types=layers)
    model = load_model(folder, device="cpu")
    expected = reference(model, IDS)
    model.config.sliding_window = model.config.max_position_embeddings
    assert (reference(model, IDS) - expected).abs().max() > 0.1  # the window matters
    model.config.sliding_window = 4
    session = open_session(model)
    for length in (9, 4, 7, 0):
        session.feed(IDS[:, session.length :], last=0)
        session.rollback(length)
        torch.testing.assert_close(session.feed(IDS[:, length:], last=1)[0], expected[-1:], rtol=1e-5, atol=1e-5)
        session.rollback(length)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("pack", [True, False])
def test_fast_pass_equals_transformers(kind, pack, tiny_folder):
    model = load_transformers(tiny_folder(kind), device="cpu")
    fast = FastLlama(model, pack=pack)
    for ids in (IDS, IDS[:, :1], IDS.repeat(3, 1)):
        session = open_session(fast, rows=len(ids), capacity=4)
        logits = session.feed(ids, last=ids.shape[1])
        torch.testing.assert_close(logits, reference_batch(model, ids), rtol=1e-5, atol=1e-5)


def reference_batch(model, ids):
    with torch.inference_mode():
        return model(ids).logits


def test_fast_pass_equals_transformers_on_the_packaged_target(packaged_folder):
    """Of logits up to about 40; in float32 the rounding differs with the processor."""
    model, ids = load_transformers(packaged_folder, device="cpu"), torch.arange(5, 45)[None]
    rounded = open_session(FastLlama(model)).feed(ids, last=40)[0]
    exact = reference(model.double(), ids)  # but for its norms, which transformers takes in float32
    assert (open_session(FastLlama(model)).feed(ids, last=40)[0] - exact).abs().max() < 1e-3
    assert (rounded - exact).abs().max() < 0.01


def test_gpt2_is_left_to_transformers(tiny_folder):
    assert isinstance(load_model(tiny_folder("llama"), device="cpu"), FastLlama)
    assert not isinstance(load_model(tiny_folder("gpt2"), device="cpu"), FastLlama)


def test_rows_of_a_batch_do_not_mix(tiny_folder):
    fast = load_model(tiny_folder("llama"), device="cpu")
    rows = torch.tensor([[5, 9, 17], [8, 30, 12]])
    together = open_session(fast, rows=2).feed(rows, last=3)
    for i in range(2):
        alone = open_session(fast).feed(rows[i : i + 1], last=3)
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-5, atol=1e-5)
