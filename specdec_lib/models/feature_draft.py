"""A draft on its target's hidden states: one layer on states that the target computed anyway.

After each pass the target's hidden states of all tokens but the last are known.  The draft joins the state at a token
with the token after it, runs one layer over the sequence of these pairs, and scores the shortlist.  For tokens that the
target has not read yet, the draft uses its own last state instead of the target's.

    z_t = read(h_t)                        h_t: the target's hidden states after token t, of the layers `watched`
    s_t = layer(join(z_t, x_{t+1}); s_<t)  distribution of x_{t+2}: softmax(table s_t)
    s_{t+1} = layer(join(s_t, x_{t+2}); s_<=t), and so on

Feature-level drafting: EAGLE (Li et al., arXiv 2401.15077); several layers of the target and training on the draft's
own states: EAGLE-3 (Li et al., arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from ..errors import SpecdecError
from .fast import FastLlama, PackedLinear
from .shortlist import ShortlistLlamaConfig, ShortlistLlamaForCausalLM


class FeatureDraftConfig(ShortlistLlamaConfig):
    """`ShortlistLlamaConfig` with the layers of the target that are read.

    Attributes:
        watched: the target's hidden states are read after these layers; the last layer's after the final norm.
        target_width: the width of the target's hidden states.
    """

    model_type = "feature_draft"

    def __init__(self, watched: Sequence[int] = (1,), target_width: int = 1, **kwargs: Any):
        self.watched, self.target_width = list(watched), target_width
        super().__init__(**kwargs)
        self.watched, self.target_width = list(watched), target_width


class FeatureDraft(ShortlistLlamaForCausalLM):
    """The weights: a shortlist Llama of one layer, and what joins the target's states with tokens before it."""

    config_class: Any = FeatureDraftConfig
    norms: torch.nn.ModuleList
    token_norm: torch.nn.RMSNorm
    state_norm: torch.nn.RMSNorm

    def __init__(self, config: FeatureDraftConfig):
        super().__init__(config)
        if config.num_hidden_layers != 1:
            raise SpecdecError(f"a draft on the target's features has one layer, not {config.num_hidden_layers}")
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(config.target_width, eps) for _ in config.watched)
        self.read = torch.nn.Linear(len(config.watched) * config.target_width, width, bias=False)
        self.state_norm, self.token_norm = torch.nn.RMSNorm(width, eps), torch.nn.RMSNorm(width, eps)
        self.join = torch.nn.Linear(2 * width, width, bias=False)
        self.post_init()

    def states(self, features: torch.Tensor) -> torch.Tensor:
        """`z` `[..., width]` from the target's hidden states `[..., len(watched), target_width]`."""
        features = features.to(self.read.weight.dtype)
        return self.read(torch.cat([norm(features[..., k, :]) for k, norm in enumerate(self.norms)], -1))

    def joined(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The layer's input `[..., n, width]`: each state joined with the token `[..., n]` after it."""
        entries = self.model.embed_tokens(self.token_index[tokens])
        states = states.to(entries.dtype)
        return self.join(torch.cat([self.state_norm(states), self.token_norm(entries)], -1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise SpecdecError("a draft on the target's features cannot run alone: give it to load_pair or FeatureDrafter")


class FastFeatureDraft(FastLlama):
    """Inference of a `FeatureDraft`: its layer runs as in `FastLlama`, on joined states."""

    families = (FeatureDraftConfig.model_type,)

    def __init__(self, model: FeatureDraft):
        super().__init__(model)
        self.watched = tuple(model.config.watched)
        self.entry_of = model.token_index
        self.norms = [norm.get_parameter("weight").detach() for norm in model.norms]
        self.read, self.join = (PackedLinear(part.weight.detach()) for part in (model.read, model.join))
        self.state_norm = model.state_norm.weight.detach()
        gain = model.token_norm.weight.detach()
        self.entries = F.rms_norm(self.embedding, gain.shape, gain, self.eps)

    @torch.inference_mode()
    def states(self, features: torch.Tensor, watched: Sequence[int] | None = None) -> torch.Tensor:
        """As `FeatureDraft.states`, from `features` whose columns are the layers `watched`; None for this draft's own.

        A cache that several drafts read captures the layers of all of them; each draft takes its own.
        """
        columns = list(self.watched if watched is None else watched)
        features = features.to(self.entries)  # moves them from the target's device, too
        mine = [features[..., columns.index(layer), :] for layer in self.watched]
        parts = [F.rms_norm(x, norm.shape, norm, self.eps) for x, norm in zip(mine, self.norms, strict=True)]
        return self.read(torch.cat(parts, -1))

    @torch.inference_mode()
    def step(
        self, states: torch.Tensor, tokens: torch.Tensor, cache: Any, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The draft's states `[batch, n, width]` after `tokens` [batch, n], each joined with one of `states`."""
        states = F.rms_norm(states, self.state_norm.shape, self.state_norm, self.eps)
        entries = self.entries[self.entry_of[tokens]]
        return self.forward_embeds(self.join(torch.cat([states, entries], -1)), cache, starts=starts)


AutoConfig.register(FeatureDraftConfig.model_type, FeatureDraftConfig)
AutoModelForCausalLM.register(FeatureDraftConfig, FeatureDraft)
