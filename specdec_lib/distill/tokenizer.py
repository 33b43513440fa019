"""A draft with a tokenizer of its own: one made from the target's text, and that text in its tokens.

Where a target has no small relative of the same tokens, a small model of any tokens can draft for it
(`drafters/other_tokenizer.py`).  A few thousand tokens made from the target's own text make the smallest table; the
draft is an ordinary Llama over them.  The target's probabilities are of its own tokens and no help here: the draft
learns from the text alone, each next token being a label that is certain.  So `train` minimises `- log q(x)` of that
token, and in its last part `1 - q(x)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..detokenize import UNFINISHED
from ..drafters.other_tokenizer import decode, encode, special_tokens
from ..models.shortlist import ShortlistLlamaForCausalLM
from .text import Turns
from .train import Text, answer_positions

BYTES = 256  # the tokens that a byte-level tokenizer begins with


def smallest(target_tokenizer: Any) -> int:
    """The fewest tokens that a tokenizer for this target's text can have: each byte, and the special ones."""
    return BYTES + len(special_tokens(target_tokenizer))


def make_tokenizer(texts: Iterable[str], size: int, target_tokenizer: Any) -> Any:
    """A byte-level BPE tokenizer of at most `size` tokens, with the target's special tokens and chat template.

    Args:
        texts: to learn the merges from, without special tokens.
        size: at least `smallest(target_tokenizer)`.
        target_tokenizer: the target's.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    single = pre_tokenizers.Digits(individual_digits=True)  # as most targets have them: their drafts then keep step
    inner.pre_tokenizer = pre_tokenizers.Sequence([single, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    names = special_tokens(target_tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[names[i] for i in sorted(names)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    roles = {role: getattr(target_tokenizer, role) for role in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=getattr(target_tokenizer, "chat_template", None), **roles
    )


def tokenizer_of(run: Path, text: Text, size: int, target_tokenizer: Any) -> Any:
    """The tokenizer of a training run: made from the training text once, and kept in the run's folder."""
    folder = run / "tokenizer"
    if not (folder / "tokenizer_config.json").exists():  # written last
        texts = target_tokenizer.batch_decode(text.tokens, skip_special_tokens=True)
        make_tokenizer(texts, size, target_tokenizer).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


class OwnText(Text):
    """A text of the target's in the tokens of another tokenizer; the label of a position is the token after it.

    Rows become longer or shorter; all are cut, or filled with the end token, to the average length.
    """

    def __init__(self, text: Text, tokenizer: Any, target_tokenizer: Any):
        texts = target_tokenizer.batch_decode(text.tokens, clean_up_tokenization_spaces=False)
        rows = tokenizer([t.rstrip(UNFINISHED) for t in texts], add_special_tokens=False)["input_ids"]
        length = round(sum(map(len, rows)) / len(rows))
        turns = Turns.of(tokenizer)
        self.tokens = torch.full((len(rows), length), tokenizer.eos_token_id)
        for own, row in zip(self.tokens, rows, strict=True):
            own[: len(row)] = torch.tensor(row[:length])
        header = list(turns.header)
        while header and not decode(tokenizer, header[-1:]).strip():
            header.pop()  # a space or newline at its end may be one token with what follows
        self.answering = answer_positions(self.tokens, header, turns.ends)
        for answering, row in zip(self.answering, rows, strict=True):
            answering[min(len(row), length) - 1 :] = False  # what follows the last token is not known
        self.ids = self.tokens.roll(-1, 1)[..., None]
        self.logprobs = torch.zeros(self.ids.shape)


def own_table(table: torch.Tensor, tokenizer: Any, target_tokenizer: Any) -> torch.Tensor:
    """For each token of a tokenizer the mean of the target's embeddings of its text, `[tokens, W]`.

    A special token has that of its name; part of a character has the mean of all.

    Args:
        table: the target's input embeddings `[V, W]`.
        tokenizer, target_tokenizer: the draft's and the target's.
    """
    names = {name: i for i, name in special_tokens(target_tokenizer).items()}
    special = special_tokens(tokenizer)
    result = table.mean(0).repeat(len(tokenizer), 1)
    for token in range(len(tokenizer)):
        text = decode(tokenizer, [token])
        ids = [names[special[token]]] if token in special else encode(target_tokenizer, text)
        if ids and UNFINISHED not in text:
            result[token] = table[ids].mean(0)
    return result


def ordinary(model: ShortlistLlamaForCausalLM) -> LlamaForCausalLM:
    """The Llama that a shortlist model is when its shortlist is the whole vocabulary."""
    settings = model.config.to_dict()
    for name in ("model_type", "architectures", "shortlist_size", "transformers_version"):
        settings.pop(name, None)
    llama = LlamaForCausalLM(LlamaConfig(**settings))
    weights = model.state_dict()
    llama.load_state_dict({name: weights[name] for name in llama.state_dict()})
    return llama.eval()
