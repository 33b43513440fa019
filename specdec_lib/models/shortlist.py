"""The drafts' architecture: a small Llama that reads and writes a shortlist of the target's vocabulary.

Nearly all text uses a small part of a large vocabulary, and the output layer is most of a small model's work.  So
the draft scores only the `shortlist_size` most frequent tokens; every other token has logit minus infinity, which
is probability 0, and verification still keeps the output distribution exact.  As input, a token outside the shortlist
is read as its nearest neighbour inside it (`token_index`).  Input and output share one table.

From outside it is an ordinary transformers causal language model with the full vocabulary, so
`transformers.generate(assistant_model=...)` accepts it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .session import cache_keyword

_CACHE = cache_keyword(LlamaModel.forward) or "past_key_values"


class ShortlistLlamaConfig(LlamaConfig):
    """`LlamaConfig` with the size of the shortlist."""

    model_type = "shortlist_llama"

    def __init__(self, shortlist_size: int = 8192, **kwargs: Any):
        self.shortlist_size = shortlist_size
        super().__init__(**{"tie_word_embeddings": True, **kwargs})
        self.shortlist_size = shortlist_size


class ShortlistLlamaForCausalLM(LlamaForCausalLM):
    """A Llama over the shortlist, presented over the full vocabulary.

    Buffers:
        shortlist: int64 `[S]`, the token id of each shortlist entry, ascending.
        token_index: int64 `[V]`, the shortlist entry that each token id is read as.
    """

    config_class = ShortlistLlamaConfig
    shortlist: torch.Tensor
    token_index: torch.Tensor

    def __init__(self, config: ShortlistLlamaConfig):
        super().__init__(config)
        size, width = config.shortlist_size, config.hidden_size
        self.model.embed_tokens = torch.nn.Embedding(size, width)
        self.lm_head = torch.nn.Linear(width, size, bias=False)
        self.register_buffer("shortlist", torch.arange(size))
        self.register_buffer("token_index", torch.zeros(config.vocab_size, dtype=torch.long))
        self.post_init()
        self.tie_weights()

    def set_shortlist(self, shortlist: torch.Tensor, token_index: torch.Tensor) -> None:
        self.shortlist.copy_(shortlist)
        self.token_index.copy_(token_index)

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Final hidden states `[batch, n, width]`, without a cache: for training."""
        return self.model(input_ids=self.token_index[input_ids], use_cache=False).last_hidden_state

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,  # a named argument, because `generate` reads the signature
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,  # what `cache` was called before transformers 5.24
        logits_to_keep: int = 0,
        labels: None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        if labels is not None:
            raise ValueError("a shortlist draft is trained by specdec_lib.distill: it computes no loss of its own")
        held = {_CACHE: cache if cache is not None else past_key_values}
        held |= {"attention_mask": attention_mask, "position_ids": position_ids}
        out = self.model(input_ids=self.token_index[input_ids], **held, **kwargs)
        scores = self.lm_head(out.last_hidden_state[:, -logits_to_keep:] if logits_to_keep else out.last_hidden_state)
        logits = scores.new_full((*scores.shape[:-1], self.config.vocab_size), float("-inf"))
        logits[..., self.shortlist] = scores
        return CausalLMOutputWithPast(logits=logits, **{_CACHE: getattr(out, _CACHE)})


AutoConfig.register(ShortlistLlamaConfig.model_type, ShortlistLlamaConfig)
AutoModelForCausalLM.register(ShortlistLlamaConfig, ShortlistLlamaForCausalLM)
