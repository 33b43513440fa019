"""Tiny random models and their tokenizers."""

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'ĠĊ"  # the last two are a byte-level space and newline
SPECIAL = ["<eos>", "<bos>", "<unk>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def tiny_tokenizer(kind):
    """One token a character; Gemma's puts `<bos>` first and T5's `<eos>` last, as the real ones do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *ALPHABET])}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    single = {"gemma": "<bos> $A", "t5": "$A <eos>"}.get(kind)
    if single:
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<eos>", 0), ("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        pad_token="<eos>",
        chat_template=CHAT_TEMPLATE if kind in ("llama", "qwen2", "gemma") else None,
    )


def tiny_model(kind, tokenizer, seed, settings):
    """Two layers of width 32, with weights large enough that the next-token laws are far from uniform."""
    import torch
    import transformers

    settings = {"vocab_size": len(tokenizer), "eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 0} | settings
    llama = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,  # tied random weights repeat one token for ever
    }
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.3}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    t5 |= {"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "initializer_factor": 2.0}
    window = llama | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    name, shape = {
        "llama": ("Llama", llama),
        "qwen2": ("Qwen2", llama),
        "gemma": ("Gemma", llama),
        "mistral": ("Mistral", llama | {"sliding_window": 4}),
        "gemma2": ("Gemma2", window),
        "gemma3": ("Gemma3Text", window),
        "gpt2": ("GPT2", gpt2),
        "t5": ("T5", t5),
    }[kind]
    heads = {"gpt2": "GPT2LMHeadModel", "gemma3": "Gemma3ForCausalLM", "t5": "T5ForConditionalGeneration"}
    head = heads.get(kind, f"{name}ForCausalLM")
    config = getattr(transformers, f"{name}Config")(**shape | settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return getattr(transformers, head)(config).eval()


def tiny_feature_draft(target, seed=1, **changes):
    """A random draft on the hidden states of a tiny Llama, in float64; it never says the last token, nor the first."""
    import torch

    from specdec_lib.distill.features import watched_layers
    from specdec_lib.models.feature_draft import FeatureDraft, FeatureDraftConfig

    config, size = target.config, target.config.vocab_size
    first = int(size > 4)  # of a tiny vocabulary it leaves out the last one only
    shape = {
        "watched": watched_layers(config.num_hidden_layers),
        "target_width": config.hidden_size,
        "vocab_size": size,
        "shortlist_size": size - 1 - first,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = FeatureDraft(FeatureDraftConfig(**shape | changes))
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    model.set_shortlist(torch.arange(first, size - 1), torch.arange(size).clamp(first, size - 2) - first)
    return model.double().eval()
