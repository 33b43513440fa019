"""A model's own generation settings: named, applied when asked for, and the same on both sides of a comparison."""

import logging

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

import specdec_lib as sd
from specdec_lib.audit import adapters
from specdec_lib.audit.audit import audit
from specdec_lib.decode import generate, generate_plain
from specdec_lib.errors import SpecdecError
from specdec_lib.generation_settings import (
    NEUTRAL,
    SettingProcessor,
    bound,
    listed,
    neutral,
    processors_of,
    shaping,
    span_of,
    warn_of_settings,
)
from specdec_lib.models.pair import end_tokens, fast
from specdec_lib.studies.both_sides import written

SETTINGS = {
    "sequence_bias": [[[7], 4.0], [[9, 7], -5.0]],
    "encoder_repetition_penalty": 1.5,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 1,
    "bad_words_ids": [*([i] for i in range(3, 30)), [31, 33]],
    "min_length": 16,
    "min_new_tokens": 12,
    "forced_bos_token_id": 25,
    "forced_eos_token_id": 0,
    "exponential_decay_length_penalty": [3, 2.0],
    "suppress_tokens": list(range(3, 20)),
    "begin_suppress_tokens": list(range(0, 40)),
}
PROMPT, LENGTH = [5, 9, 17, 3, 8, 12, 7, 5, 9], 16


def made(kind, seed=0, **settings):
    model = tiny_model(kind, tiny_tokenizer(kind), seed, {})
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def shaped(kind, name):
    """With several end ids where the setting holds the end back."""
    ends = {"eos_token_id": [0, *range(20, 43)]} if name.startswith("min") else {}
    return made(kind, **{name: SETTINGS[name]}, **ends)


def theirs(model, prompt=PROMPT, **more):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LENGTH, **more)
    return out[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist()


def ours(model, prompt=PROMPT):
    """Plainly and drafted, with the model's own settings."""
    pair = sd.Pair(fast(model), sd.PromptLookupDrafter(1) if model.config.is_encoder_decoder else made_draft(model))
    ids = pair.encode(prompt)
    settings = bound(processors_of(pair), span_of(pair, ids, LENGTH))
    plain = generate_plain(pair, ids, LENGTH, processors=settings).tokens[0]
    return plain, generate(pair, ids, 3, LENGTH, processors=settings).tokens[0]


def made_draft(model):
    return made(model.config.model_type, 1)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("name", SETTINGS)
def test_transformers_text_with_each_setting(kind, name):
    model = shaped(kind, name)
    wanted = theirs(model)
    assert ours(model) == (wanted, wanted)


def test_each_setting_changes_some_text():
    """Else the test above shows nothing."""
    unchanged = set(SETTINGS)
    for kind in ("llama", "gpt2", "t5"):
        for prompt in (PROMPT, [5]):
            for name in sorted(unchanged):
                without = shaped(kind, name)
                setattr(without.generation_config, name, None)
                if theirs(shaped(kind, name), prompt) != theirs(without, prompt):
                    unchanged.remove(name)
    assert unchanged == set()


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_all_settings_together_and_a_prompt_of_one_token(kind):
    several = {n: SETTINGS[n] for n in ("repetition_penalty", "suppress_tokens", "forced_bos_token_id", "min_length")}
    model = made(kind, **several)
    assert [repr(p).split("=")[0] for p in processors_of(model)] == [n for n in NEUTRAL if n in several]
    for prompt in (PROMPT, [5]):
        assert ours(model, prompt) == (theirs(model, prompt),) * 2


def test_every_setting_that_transformers_turns_into_a_processor_is_known():
    """A new one of a later release fails here: `_get_logits_processor` reads it from the config."""
    import inspect
    import re

    from transformers.generation.utils import GenerationMixin

    from specdec_lib.generation_settings import SEARCH

    read = set(re.findall(r"generation_config\.([a-z]\w*)", inspect.getsource(GenerationMixin._get_logits_processor)))
    assert read - {"use_cache"} <= {*NEUTRAL, *SEARCH}
    assert set(SETTINGS) | {"remove_invalid_values", "guidance_scale", "watermarking_config"} == set(NEUTRAL)


def test_the_neutral_values_of_a_fresh_config_shape_nothing():
    assert shaping(made("llama")) == {} and processors_of(made("llama")) == ()
    off = made("llama", repetition_penalty=1.0, no_repeat_ngram_size=0, suppress_tokens=[], min_length=0)
    assert shaping(off) == {}


def test_what_no_processor_can_do_is_refused_by_name():
    with pytest.raises(SpecdecError, match="guidance_scale is not a function of the text"):
        processors_of(made("llama", guidance_scale=1.5))
    with pytest.raises(SpecdecError, match="repetition_penalty is not bound to a text"):
        SettingProcessor("repetition_penalty", 1.1)(torch.tensor([[5]]), torch.zeros(1, 9))


def test_all_end_ids_of_the_generation_config_reach_the_fast_model():
    model = made("llama", eos_token_id=[0, 7])
    assert end_tokens(sd.Pair(fast(model))) == [0, 7] == end_tokens(sd.Pair(model))


def test_what_is_not_applied_is_named_once(caplog):
    caplog.set_level(logging.WARNING)
    model = fast(made("llama", repetition_penalty=1.1, suppress_tokens=list(range(99)), temperature=0.6))
    pair = sd.Pair(model)
    warn_of_settings(pair, [])
    warn_of_settings(pair, processors_of(pair))
    assert caplog.messages == []
    for _ in range(2):
        warn_of_settings(pair, None)
    assert len(caplog.messages) == 1 and "\n" not in caplog.messages[0]
    assert "sets repetition_penalty=1.1, suppress_tokens (99 entries), which is not applied" in caplog.messages[0]
    assert "processors=sd.processors_of(pair)" in caplog.messages[0] and "temperature" not in caplog.messages[0]
    warn_of_settings(fast(made("llama")))
    assert len(caplog.messages) == 1
    assert listed({"a": {"b": "c" * 50}}) == "a (1 entries)"


# -- comparisons ---------------------------------------------------------------------------------------

SHAPED = {"repetition_penalty": 1.8, "suppress_tokens": [1, 2], "num_beams": 3, "temperature": 0.3, "top_k": 1}


def test_neutral_gives_the_models_own_text_and_leaves_the_config_as_it_was():
    model = made("llama", **SHAPED)
    config, before = model.generation_config, model.generation_config.to_dict()
    with neutral(model, None, model):
        assert theirs(model) == theirs(made("llama"))
        assert end_tokens(sd.Pair(model)) == [0]
    assert model.generation_config is config and config.to_dict() == before
    assert theirs(model, num_beams=1) != theirs(made("llama"))
    assert written(model, PROMPT) == written(made("llama"), PROMPT)


def small(seed, **settings):
    model = tiny_model("llama", tiny_tokenizer("llama"), seed, {"vocab_size": 6})
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.parametrize("drafted", [False, True])
def test_an_audit_of_transformers_accuses_no_model_for_its_settings(drafted):
    model = small(0, **SHAPED)
    draft = small(1, repetition_penalty=1.5) if drafted else None
    prompt = [2, 3, 2]
    block = adapters.BlockLaw(adapters.tabular(model, prompt), 2)
    how = {"effect": 0.3, "level": 0.001, "power": 0.99, "seed": 1}
    assert audit(block.of(adapters.transformers(model, prompt, 2, draft)), block.law, **how).exit_status == 0
    if drafted:  # one text at a time is slow
        return
    penalised = adapters.transformers(model, prompt, 2, draft, repetition_penalty=1.8)  # asked for, so it is applied
    assert audit(block.of(penalised), block.law, **how).exit_status == 1
