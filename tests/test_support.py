"""What a model is, and what it can do: asked of tiny random models of many kinds."""

import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import specdec_lib as sd
from specdec_lib.drafters import ComposedDrafter, ModelDrafter, PromptLookupDrafter
from specdec_lib.errors import SpecdecError
from specdec_lib.models import Pair, load_model, load_transformers, open_session, support
from specdec_lib.models.fast import FastLlama
from specdec_lib.models.pair import end_tokens, start_marker
from specdec_lib.models.session import arguments, cache_keyword
from specdec_lib.models.support import check_decoder, check_rows, context_length, decoding, new_tokens, room

LLAMA = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
BERT = {k: LLAMA[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
BERT |= {"num_attention_heads": 2, "max_position_embeddings": 64}
BART = {"vocab_size": 50, "d_model": 32, "max_position_embeddings": 64, "init_std": 0.3, "dropout": 0.0}
BART |= {f"{part}_layers": 2 for part in ("encoder", "decoder")}
BART |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
BART |= {f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")}
BART |= {
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 0}
MPT = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 24, "initializer_range": 0.3}
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}
PHI3 = LLAMA | {"original_max_position_embeddings": 32}
PHI3 |= {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}}
STRETCHED = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 32}


def made(name, head=None, seed=0, **settings):
    """A random model in eval mode: `made("Llama", **LLAMA)`, `made("GPT2", "LMHeadModel", **GPT2)`."""
    config = getattr(transformers, f"{name}Config")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return getattr(transformers, f"{name}{head or 'ForCausalLM'}")(config).eval()


def plain(target, prompt, **options):
    """The text of one prompt, decoded as `generate` is to do it."""
    with decoding(target):
        check_decoder(target)
        return sd.generate_plain(Pair(target), prompt, eos=[], **options).tokens[0]


def theirs(model, prompt, new):
    """Transformers' greedy text."""
    ids = torch.tensor([prompt])
    out = model.generate(input_ids=ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


# -- asked of the model: may rows of different length be decoded together? -------------------------------

TOGETHER = {
    "llama": lambda: made("Llama", **LLAMA),
    "gemma2": lambda: made("Gemma2", **LLAMA),
    "mistral with a window": lambda: made("Mistral", **LLAMA, sliding_window=4),
    "mixtral": lambda: made("Mixtral", **LLAMA, num_local_experts=4),
    "mixtral in bfloat16": lambda: made("Mixtral", **LLAMA, num_local_experts=4).bfloat16(),
    "gpt2": lambda: made("GPT2", "LMHeadModel", **GPT2),
    "opt": lambda: made("OPT", **BERT, ffn_dim=64, word_embed_proj_dim=32),
    "mpt": lambda: made("Mpt", **MPT),
    "bert as decoder": lambda: made("Bert", "LMHeadModel", **BERT, is_decoder=True),
}
APART = {
    "bart": lambda: made("Bart", **BART),
    "marian": lambda: made("Marian", **BART),
    "pegasus": lambda: made("Pegasus", **BART),
    "trocr": lambda: made("TrOCR", **{k: v for k, v in BART.items() if "encoder" not in k}),
}
TWO_TOGETHER = {
    "t5": lambda: made("T5", "ForConditionalGeneration", **T5),
    "umt5": lambda: made("UMT5", "ForConditionalGeneration", **T5),
}
TWO_APART = {
    "bart": lambda: made("Bart", "ForConditionalGeneration", **BART),
    "m2m100": lambda: made("M2M100", "ForConditionalGeneration", **BART),
    "switch": lambda: made("SwitchTransformers", "ForConditionalGeneration", **T5, num_experts=2),
}
PROMPTS = [[5, 9, 17, 3, 8], [4]]


@pytest.mark.parametrize("kind", TOGETHER)
def test_a_model_that_reads_rows_together_passes_and_its_texts_are_those_of_batch_1(kind):
    model = TOGETHER[kind]()
    check_decoder(model)
    check_rows(model)
    if model.dtype == torch.float32:
        pair = Pair(model, PromptLookupDrafter())
        for decode in (sd.generate_plain, sd.generate):
            alone, together = (decode(pair, PROMPTS, max_new_tokens=10, eos=[], batch_size=n).tokens for n in (1, 2))
            assert alone == together


@pytest.mark.parametrize("kind", APART)
def test_a_model_that_numbers_positions_from_the_cache_is_refused_for_rows_and_decodes_alone(kind):
    model = APART[kind]()
    name = type(model).__name__
    with pytest.raises(SpecdecError, match=f"{name} cannot decode rows of different length together.*batch_size"):
        check_rows(model)
    assert plain(model, [5, 9, 17], max_new_tokens=8) == theirs(model, [5, 9, 17], 8)


def test_the_refused_model_would_have_written_another_text(monkeypatch):
    pair = Pair(APART["bart"]())
    monkeypatch.setattr("specdec_lib.decode.check_rows", lambda model: None)
    alone, together = (sd.generate_plain(pair, PROMPTS, max_new_tokens=10, eos=[], batch_size=n) for n in (1, 2))
    assert alone.tokens != together.tokens


@pytest.mark.parametrize("kind", TWO_TOGETHER)
def test_encoder_decoders_of_relative_positions_read_rows_together(kind):
    check_rows(TWO_TOGETHER[kind]())


@pytest.mark.parametrize("kind", TWO_APART)
def test_encoder_decoders_that_number_positions_or_share_experts_are_refused_for_rows(kind):
    model = TWO_APART[kind]()
    check_decoder(model)
    with pytest.raises(SpecdecError, match="cannot decode rows of different length together"):
        check_rows(model)


def test_a_model_is_asked_once_and_carries_no_mark_of_it(monkeypatch):
    model = made("Llama", **LLAMA)
    before = set(vars(model))
    check_rows(model)
    monkeypatch.setattr(support, "_read", lambda *a, **k: pytest.fail("asked again"))
    check_decoder(model)
    check_rows(model)
    assert set(vars(model)) == before
    check_rows(FastLlama(model))  # ours reads rows together: there is nothing to ask


def test_nan_is_no_difference_and_leaves_the_finding_to_the_decoder():
    model = made("Llama", **LLAMA)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    check_rows(model)


# -- asked of the model: can it be decoded with? ---------------------------------------------------------


@pytest.mark.parametrize("spread", [0.3, 0.02])
def test_an_encoder_is_refused_that_was_not_made_a_decoder(spread):
    model = made("Bert", "LMHeadModel", **BERT, initializer_range=spread)
    with pytest.raises(SpecdecError, match=r"BertLMHeadModel sees tokens that come later.*is_decoder=True"):
        check_decoder(model)
    check_decoder(made("Bert", "LMHeadModel", **BERT, is_decoder=True))


RECURRENT = {
    "xlstm": lambda: made(
        "xLSTM", vocab_size=50, hidden_size=32, embedding_dim=32, num_blocks=2, num_hidden_layers=2, num_heads=2
    ),
    "mamba": lambda: made("Mamba", vocab_size=50, hidden_size=32, num_hidden_layers=2),
    "rwkv": lambda: made("Rwkv", vocab_size=50, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32),
    "recurrent gemma": lambda: made(
        "RecurrentGemma", **BERT | {"num_hidden_layers": 3}, lru_width=32, attention_window_size=16
    ),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_states_that_do_not_roll_back_are_refused_by_name(kind):
    try:
        model = RECURRENT[kind]()
    except AttributeError:
        pytest.skip("not in this transformers")
    with pytest.raises(SpecdecError, match=f"{type(model).__name__} (keeps a recurrent state|takes no cache)"):
        check_decoder(model)


def test_a_model_without_cache_and_one_that_breaks_are_refused_by_name():
    small = {"vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    with pytest.raises(SpecdecError, match="OpenAIGPTLMHeadModel takes no cache"):
        check_decoder(made("OpenAIGPT", "LMHeadModel", **small))
    model = made("Llama", **LLAMA)
    model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(SpecdecError, match=r"LlamaForCausalLM cannot be decoded with \(division by zero\)"):
        check_decoder(model)


class Wrapped(transformers.LlamaForCausalLM):
    """The cache is hidden in `**kwargs`, as in wrappers that add something to a forward pass."""

    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids=input_ids, **kwargs)


class Around(torch.nn.Module):
    """A wrapper that is no transformers model; as PEFT's are, if it says it comes from there."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config, self.device, self.dtype = inner, inner.config, inner.device, inner.dtype

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("wrap", [Around, lambda inner: Around(Around(inner)), None], ids=["once", "twice", "subclass"])
def test_a_cache_behind_kwargs_is_found_and_the_text_is_that_of_the_bare_model(wrap):
    inner = made("Llama", **LLAMA)
    if wrap is None:
        model = Wrapped(inner.config).eval()
        model.load_state_dict(inner.state_dict())
    else:
        model = wrap(inner)
    assert cache_keyword(model) == cache_keyword(inner) == cache_keyword(model.forward)
    assert {"attention_mask", "position_ids", "logits_to_keep"} <= arguments(model)
    check_rows(model)
    assert plain(model, [5, 9, 3], max_new_tokens=10) == theirs(inner, [5, 9, 3], 10)


def test_a_forward_that_names_its_cache_is_taken_at_its_word():
    bloom = {"vocab_size": 50, "hidden_size": 32, "n_layer": 1, "n_head": 2}
    assert "position_ids" not in arguments(made("Bloom", **bloom))
    assert cache_keyword(torch.nn.Linear(2, 2)) is None


def from_peft(model, **attributes):
    """`model` in what looks like a PEFT model."""
    wrapped = type("PeftModelForCausalLM", (Around,), {"__module__": "peft.peft_model"})(model)
    for name, value in attributes.items():
        setattr(wrapped, name, value)
    return wrapped


def test_a_peft_adapter_decodes_and_what_cannot_is_refused_with_the_remedy():
    inner = made("Llama", **LLAMA)
    assert plain(from_peft(inner), [5, 9, 3], max_new_tokens=8) == theirs(inner, [5, 9, 3], 8)
    prompt = type("PrefixTuningConfig", (), {"is_prompt_learning": True})()
    with pytest.raises(SpecdecError, match=r"PEFT model with a learnt prompt.*merge_and_unload"):
        check_decoder(from_peft(inner, active_peft_config=prompt))
    with pytest.raises(SpecdecError, match=r"PeftModelForCausalLM, a PEFT model, takes no cache.*merge_and_unload\(\)"):
        check_decoder(from_peft(made("OpenAIGPT", "LMHeadModel", vocab_size=50, n_embd=32, n_layer=1, n_head=2)))


# -- how long a text may be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "context"),
    [
        ("Llama", LLAMA, 64),
        ("GPTJ", {"n_positions": 24}, 24),
        ("GPT2", {"n_positions": 24}, 24),
        ("CodeGen", {"n_positions": 24}, 24),
        ("CTRL", {"n_positions": 24}, 24),
        ("Dbrx", {"max_seq_len": 24}, 24),
        ("Mpt", {"max_seq_len": 24}, 24),
        ("XLNet", {"vocab_size": 50}, support.UNLIMITED),
        ("Bloom", {"vocab_size": 50}, support.UNLIMITED),
        ("Qwen2", LLAMA | STRETCHED, 128),
        ("Llama", LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 128),
        # 8,192 x 8 is less than Llama 3.1 says of itself
        (
            "Llama",
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        (
            "Qwen2",
            {
                "max_position_embeddings": 128,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            },
            128,
        ),
        ("Llama", LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 64),
        ("Phi3", PHI3, 32),
        ("Gemma3Text", {"max_position_embeddings": 64}, 64),
        # the factor of some layers, already counted in what the model says of itself
        (
            "Gemma3Text",
            {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            64,
        ),
        ("Bart", {"max_position_embeddings": 64}, 64),
        ("LED", {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 32}, 32),
        ("T5", {"n_positions": 16}, support.UNLIMITED),  # a name that its relative positions outgrew
    ],
)
def test_contexts_by_every_name_and_with_rope_factors(name, settings, context):
    model = type("Model", (), {"config": getattr(transformers, f"{name}Config")(**settings)})()
    assert context_length(model) == context


def test_a_stretched_context_can_be_used_to_its_end():
    model = made("Qwen2", **LLAMA | STRETCHED)
    prompt = [i % 49 + 1 for i in range(40)]
    assert new_tokens(model, prompt, None) == 88
    assert plain(model, prompt, max_new_tokens=12) == theirs(model, prompt, 12)


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_where_rotary_positions_depend_on_the_length_a_text_ends_and_until_there_it_is_transformers(rope):
    model = (
        made("Phi3", **PHI3)
        if rope == "longrope"
        else made(
            "Llama", **LLAMA | {"max_position_embeddings": 32, "rope_scaling": {"rope_type": rope, "factor": 4.0}}
        )
    )
    prompt = [i % 48 + 2 for i in range(22)]
    assert new_tokens(model, prompt, None) == 10
    with decoding(model):
        out = sd.generate(Pair(model, PromptLookupDrafter()), prompt, gamma=7, max_new_tokens=10, eos=[])
    assert out.tokens[0] == theirs(model, prompt, 10)
    with pytest.raises(SpecdecError, match=f"exceed the 32 positions after which .* change with the length .{rope}"):
        new_tokens(model, prompt, 11)


def test_a_draft_model_stops_at_its_context_by_whatever_name_and_the_target_goes_on():
    target, draft = made("Llama", **LLAMA), made("Mpt", **MPT)
    prompt = list(range(1, 21))
    out = sd.generate(Pair(target, draft), prompt, max_new_tokens=12, eos=[])
    assert out.tokens == sd.generate_plain(Pair(target), prompt, max_new_tokens=12, eos=[]).tokens
    assert [room(draft, [1] * n) for n in (20, 24, 25)] == [4, 0, -1]


def test_an_encoder_decoder_has_a_context_for_the_source_and_one_for_the_output():
    model = made("Bart", "ForConditionalGeneration", **BART)
    marker = start_marker(model)
    assert new_tokens(model, [5] * 50 + [marker], 20) == 20
    assert new_tokens(model, [5] * 64 + [marker], None) == 64
    # source, marker and 60 tokens of output leave 4
    assert room(model, [5] * 50 + [marker] + [6] * 60) == 4
    with pytest.raises(SpecdecError, match="a source of 65 tokens exceeds the target's 64 positions"):
        new_tokens(model, [5] * 65 + [marker], 1)
    with pytest.raises(SpecdecError, match="65 new tokens exceed the target's 64 output positions"):
        new_tokens(model, [5, marker], 65)
    # and all of both can be fed
    session = open_session(model)
    session.feed(torch.tensor([[5] * 64 + [marker] + [6] * 63]), last=1)


def test_the_refusals_of_a_decoder_name_what_to_change():
    model = made("Llama", **LLAMA)
    assert new_tokens(model, [1] * 60, 4) == new_tokens(model, [1] * 60, None) == 4
    with pytest.raises(SpecdecError, match="60 tokens and 5 new ones exceed the target's context of 64: shorten"):
        new_tokens(model, [1] * 60, 5)
    with pytest.raises(SpecdecError, match="a prompt of 65 tokens exceed"):
        new_tokens(model, [1] * 65, None)
    with pytest.raises(SpecdecError, match=r"min_new_tokens \(3\) exceeds the 2 new tokens"):
        new_tokens(model, [1], 2, least=3)
    with pytest.raises(SpecdecError, match="names no context length: give max_new_tokens"):
        new_tokens(made("T5", "ForConditionalGeneration", **T5), [1], None)


# -- while it decodes ------------------------------------------------------------------------------------


def dropping(seed=0):
    """A GPT-2 in training mode, whose dropout changes every pass."""
    return made("GPT2", "LMHeadModel", seed, **GPT2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()


def test_training_mode_decodes_as_eval_mode_and_is_restored_also_after_an_error():
    target, draft = dropping(), dropping(1)
    target.transformer.h[0].eval()  # a part that the user had frozen
    drafter = ComposedDrafter([PromptLookupDrafter(), ModelDrafter(draft)])
    before = [m.training for model in (target, draft) for m in model.modules()]
    expected = theirs(made("GPT2", "LMHeadModel", **GPT2), [5, 9, 3], 10)
    for _ in range(2):
        assert sd.generate(Pair(target, drafter), [5, 9, 3], max_new_tokens=10, eos=[]).tokens[0] == expected

    def fail(done):
        assert not any(m.training for model in (target, draft) for m in model.modules())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sd.generate(Pair(target, drafter), [5, 9, 3], max_new_tokens=10, eos=[], on_round=fail)
    assert [m.training for model in (target, draft) for m in model.modules()] == before


def test_a_model_in_training_mode_is_asked_in_eval_mode():
    model = dropping()
    check_rows(model)
    assert model.training


def test_what_an_earlier_text_left_in_the_model_is_put_aside_and_back():
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {k: v for k, v in LLAMA.items() if k != "head_dim"} | {"rope_scaling": rope, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    special = {"image_token_id": 47, "video_token_id": 48, "vision_start_token_id": 46, "vision_end_token_id": 45}
    model = made("Qwen2_5_VL", "ForConditionalGeneration", text_config=text, vision_config=vision, **special)
    prompt = [5, 9, 3, 7]
    if transformers.__version__.startswith("4."):  # where it forgets how much the cache holds
        with pytest.raises(SpecdecError, match="scores a text read in pieces otherwise than read at once"):
            check_decoder(model)
        return
    expected = plain(model, prompt, max_new_tokens=8)
    assert expected == theirs(model, prompt, 8)
    stale = torch.tensor([[-7]])
    model.model.rope_deltas = stale
    assert plain(model, prompt, max_new_tokens=8) == expected
    assert model.model.rope_deltas is stale
    with pytest.raises(ZeroDivisionError), decoding(model):
        raise ZeroDivisionError
    assert model.model.rope_deltas is stale


def test_what_is_no_model_is_left_alone():
    with decoding(), decoding(None, PromptLookupDrafter(), FastLlama(made("Llama", **LLAMA))):
        pass


# -- end tokens and dtypes -------------------------------------------------------------------------------


def test_end_tokens_beyond_the_vocabulary_are_left_out():
    model = made("Llama", **LLAMA | {"eos_token_id": [0, 50]})
    model.generation_config.eos_token_id = [0, 7, 77, -1]
    tokenizer = type("Tokenizer", (), {"eos_token_id": 60})()
    pair = Pair(model, None, tokenizer)
    assert end_tokens(pair) == [0, 7]
    pair = Pair(model)
    out = sd.generate_plain(pair, [5, 9, 3], max_new_tokens=6, min_new_tokens=4)
    assert len(out.tokens[0]) >= 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_a_draft_in_bfloat16_works_for_a_target_in_float32_and_the_reverse(temperature, verifier):
    for of_target, of_draft in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        target, draft = made("Llama", **LLAMA).to(of_target), made("Llama", **LLAMA, seed=1).to(of_draft)
        options = {"max_new_tokens": 12, "temperature": temperature, "eos": []}
        for drafter in (draft, ComposedDrafter([PromptLookupDrafter(), ModelDrafter(draft)])):
            out = sd.generate(Pair(target, drafter), [5, 9, 3], verifier=verifier, **options)
            assert len(out.tokens[0]) == 12


# -- loading ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    made("Llama", **LLAMA).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def test_missing_weights_are_refused_by_name(folder):
    assert isinstance(load_model(folder, "cpu"), FastLlama)
    rewrite(folder, lambda w: {k: v for k, v in w.items() if k != "lm_head.weight"})
    with pytest.raises(SpecdecError, match=r"the weights of .* lack lm_head\.weight, which LlamaForCausalLM needs"):
        load_transformers(folder, "cpu")


def test_a_draft_head_in_a_folder_of_the_base_architecture_is_refused(folder):
    rewrite(folder, lambda w: {"fc.weight": torch.zeros(32, 64), "layers.0.mlp.up_proj.weight": torch.zeros(64, 32)})
    with pytest.raises(SpecdecError, match=r"lack lm_head\.weight and 19 more.*right architecture"):
        sd.load_pair(folder, "lookup", "cpu")


def test_tied_weights_are_not_missing(tmp_path):
    made("Llama", **LLAMA | {"tie_word_embeddings": True}).save_pretrained(tmp_path)
    assert isinstance(load_model(tmp_path, "cpu"), FastLlama)


def test_quantised_weights_stay_with_transformers():
    from specdec_lib.models.pair import fast

    model = made("Llama", **LLAMA)
    model.config.quantization_config = {"quant_method": "torchao"}
    assert fast(model) is model


def test_the_probe_is_quiet(caplog):
    with caplog.at_level(logging.INFO):
        check_rows(made("GPT2", "LMHeadModel", **GPT2))
    assert not [r for r in caplog.records if r.name.startswith("specdec")]
