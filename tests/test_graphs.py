"""Passes of fixed shape, as CUDA graphs need them, give the logits of ordinary passes; recording itself needs a GPU."""

import pytest
import torch

from specdec_lib.models import load_model
from specdec_lib.models.fast import FastLlama
from specdec_lib.models.graphs import FixedPass, Recorder
from specdec_lib.models.session import FastSession, open_session

TEXT = [5, 9, 17, 3, 8, 2, 11, 4]


@pytest.fixture(scope="module")
def model(tiny_folder):
    found = load_model(tiny_folder("llama"), "cpu")
    assert isinstance(found, FastLlama)
    return found


@pytest.mark.parametrize("n", [1, 2, 4])
@torch.inference_mode()
def test_a_fixed_pass_is_the_ordinary_one(model, n):
    ordinary, fixed = open_session(model, capacity=32), open_session(model, capacity=32)
    for session in (ordinary, fixed):
        session.feed(torch.tensor([TEXT]), last=0)
    short = FixedPass(model, fixed.cache, n)
    for round_ in range(3):
        ids = torch.tensor([[round_ + 1] * n])
        expected = ordinary.feed(ids, last=n)
        torch.testing.assert_close(short(ids, fixed.length), expected)
        assert fixed.length == ordinary.length
        for session in (ordinary, fixed):  # one token of each block is refused
            session.rollback(session.length - 1)


@torch.inference_mode()
def test_a_cache_that_grew_gets_new_passes(model):
    ordinary, recorder = open_session(model, capacity=4), Recorder(model)
    recorder.lend(ordinary, 4)
    for token in TEXT:
        ids = torch.tensor([[token]])
        torch.testing.assert_close(recorder.feed(ids), ordinary.feed(ids))
    assert recorder.passes[1].capacity == recorder.cache.capacity > 4
    assert recorder.feed(torch.ones(1, Recorder.LONGEST + 1, dtype=torch.long)) is None


def test_one_session_at_a_time_borrows_the_passes(model):
    recorder = Recorder(model)
    model.recorder = recorder  # as on a GPU
    try:
        first, second = FastSession(model, capacity=16), FastSession(model, capacity=16)
        assert first.cache is recorder.cache is not second.cache
        ids = torch.tensor([TEXT])
        expected = second.feed(ids, last=3)
        torch.testing.assert_close(first.feed(ids, last=3), expected)
        assert list(recorder.passes) == [len(TEXT)]
        recorded = recorder.passes[len(TEXT)]
        del first
        third = FastSession(model, capacity=16)
        torch.testing.assert_close(third.feed(ids, last=3), expected)
        assert third.cache is recorder.cache and recorder.passes[len(TEXT)] is recorded  # not recorded anew
        assert FastSession(model, batch=2).recorder is None
    finally:
        model.recorder = None


@torch.inference_mode()
def test_what_cannot_be_recorded_is_launched_piece_by_piece(model, monkeypatch, caplog):
    recorder = Recorder(model)
    model.recorder = recorder
    monkeypatch.setattr(FixedPass, "__init__", refuse)
    try:
        session = FastSession(model, capacity=16)
        logits = session.feed(torch.tensor([TEXT]))
        torch.testing.assert_close(
            session.feed(torch.tensor([[3]])), FastSession(model).feed(torch.tensor([[*TEXT, 3]]))
        )
        assert logits.shape[:2] == (1, 1) and session.length == len(TEXT) + 1
        assert [record.message.count("not used") for record in caplog.records] == [1]
    finally:
        model.recorder = None


def refuse(self, *_):
    raise RuntimeError("operation not permitted when stream is capturing")
