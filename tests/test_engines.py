"""The engines: the same protocol for our decoder and for transformers' own."""

import pytest
import torch

from specdec_lib.decode import generate, generate_plain
from specdec_lib.engines import Engine, OurEngine, TransformersEngine
from specdec_lib.models import Pair, load_model, load_transformers
from specdec_lib.sampling import SamplingParams

PROMPTS = [[5, 9, 17, 3, 8, 9, 17, 3], [4, 21]]
GREEDY, WARM = SamplingParams(), SamplingParams(1.0, top_k=9)


@pytest.fixture(scope="module")
def models(tiny_folder):
    return load_transformers(tiny_folder("llama"), "cpu"), load_transformers(tiny_folder("llama", seed=1), "cpu")


def engines_of(models):
    target, draft = models
    return [
        OurEngine(Pair(target)),
        OurEngine(Pair(target, draft), gamma=3),
        TransformersEngine(target),
        TransformersEngine(target, draft, gamma=3),
        TransformersEngine(target, gamma=3, lookup=2),
    ]


def tokens(engine, params=GREEDY, n=10, **how):
    return [reply.tokens for reply in engine.run(PROMPTS, n, params, **how)]


def test_all_write_the_targets_greedy_text(models):
    expected = generate_plain(Pair(models[0]), PROMPTS, 10, eos=[]).tokens
    for engine in engines_of(models):
        assert isinstance(engine, Engine) and engine.name
        assert tokens(engine) == expected
        end = expected[0][4]
        assert tokens(engine, ends=[end])[0] == expected[0][: expected[0].index(end) + 1]


def test_replies_tell_times_and_rounds(models):
    for engine in engines_of(models):
        for reply in engine.run(PROMPTS, 6, WARM, seed=1):
            assert len(reply.tokens) == 6 and 0 < reply.first <= reply.seconds
            assert sum(len(r.emitted) for r in reply.trace) in (0, 6)
    drafted = OurEngine(Pair(*models), gamma=3).run(PROMPTS, 6, WARM, seed=1)
    assert [len(reply.trace) > 0 for reply in drafted] == [True, True]


def test_a_seed_is_a_text_and_the_callers_random_state_is_left_alone(models):
    for engine in engines_of(models):
        state = torch.get_rng_state()
        assert tokens(engine, WARM, seed=1) == tokens(engine, WARM, seed=1) != tokens(engine, WARM, seed=2)
        assert torch.equal(state, torch.get_rng_state())
    assert (
        tokens(OurEngine(Pair(*models), 3), WARM, seed=4)
        == generate(Pair(*models), PROMPTS, 3, 10, temperature=1.0, top_k=9, seed=4, eos=[]).tokens
    )


def test_many_samples_of_one_prompt_are_one_batch_of_transformers(models):
    calls = []
    target = models[0]
    real = target.generate
    target.generate = lambda ids, **how: calls.append(how["generation_config"].num_return_sequences) or real(ids, **how)
    try:
        replies = TransformersEngine(target).run([PROMPTS[0]] * 5, 4, WARM, seed=3)
    finally:
        del target.generate
    assert len(replies) == 5 and calls == [5] and len({tuple(r.tokens) for r in replies}) > 1


def test_only_the_ends_that_are_asked_for_end_a_text(models):
    """The model's own end, which is also what transformers pads with, is a token like any other."""
    assert {model.generation_config.eos_token_id for model in models} == {0}
    hot = SamplingParams(50.0)
    for engine in engines_of(models):
        texts = [reply.tokens for reply in engine.run([PROMPTS[0]] * 6, 40, hot, seed=5)]
        assert {len(text) for text in texts} == {40}
        assert any(0 in text and any(text[text.index(0) + 1 :]) for text in texts)
        ended = [reply.tokens for reply in engine.run([PROMPTS[0]] * 6, 40, hot, seed=5, ends=[7])]
        assert {text.index(7) for text in ended if 7 in text} == {len(text) - 1 for text in ended if 7 in text} != set()


@pytest.mark.parametrize("fails", [False, True])
def test_models_settings_play_no_part_and_come_back(models, fails, tiny_folder):
    target, draft = (load_transformers(tiny_folder("llama", seed=s), "cpu") for s in (0, 1))
    target.generation_config.repetition_penalty = 1.8
    draft.generation_config.num_assistant_tokens = 17
    before = target.generation_config.to_dict(), draft.generation_config.to_dict()
    engine = TransformersEngine(target, draft, gamma=3)
    if fails:
        with pytest.raises(Exception):  # noqa: B017 - whatever transformers raises of it
            engine.run([[10**6]], 4, GREEDY)
    else:
        assert tokens(engine) == generate_plain(Pair(models[0]), PROMPTS, 10, eos=[]).tokens
    assert (target.generation_config.to_dict(), draft.generation_config.to_dict()) == before


def test_an_encoder_decoder(tiny_folder):
    from specdec_lib.models.pair import start_marker

    model = load_model(tiny_folder("t5"), "cpu")
    prompts = [[*ids, start_marker(model)] for ids in PROMPTS]
    ours, theirs = (e.run(prompts, 8, GREEDY) for e in (OurEngine(Pair(model)), TransformersEngine(model)))
    assert [r.tokens for r in ours] == [r.tokens for r in theirs]
