"""A memoized transformers model, for audits of a loop that somebody wrote by hand around `model(ids, cache=cache)`."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import SpecdecError
from .memoize import MemoCache, MemoizedModel


class MemoizedForward:
    """Answers `model(input_ids, cache=cache).logits` like the model, and runs the model once for each new prefix.

    The cache is the loop's own transformers cache.  It holds token ids where a model would keep keys, so that what the
    loop feeds and what it crops decide which text the logits belong to: a forgotten rollback shows in an audit, as it
    would with the model itself.  What cannot be seen is a model that answers the same prefix differently next time.

    Args:
        model: a transformers causal model.
        top_k: the model then has probabilities for its `top_k` likeliest tokens only: every other logit is minus
            infinity.  So few texts are possible that all can be outcomes of a test.

    Attributes:
        config: of the model, from which the loop makes its cache.
        passes: how often the model itself ran.

    >>> from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> quick = MemoizedForward(LlamaForCausalLM(LlamaConfig(vocab_size=5, **shape)), top_k=2)
    >>> cache = DynamicCache(config=quick.config)
    >>> quick(torch.tensor([[1, 2, 3]]), cache=cache).logits.isfinite().sum(-1).tolist()
    [[2, 2, 2]]
    >>> cache.crop(-1)
    >>> again = quick(torch.tensor([[3]]), cache=cache)  # the text is 1, 2, 3 once more
    >>> cache.get_seq_length(), quick.passes
    (3, 1)
    """

    def __init__(self, model: Any, top_k: int | None = None):
        self.config, self.top_k = model.config, top_k
        self._memory = MemoizedModel(model)

    @property
    def device(self) -> torch.device:
        return self._memory.device

    @property
    def passes(self) -> int:
        return self._memory.passes

    def __call__(self, input_ids: torch.Tensor, cache: Any = None, past_key_values: Any = None) -> Any:
        """The logits `[1, n, V]` after each of `input_ids` `[1, n]`.

        Args:
            cache: a transformers cache of one text; before transformers 5.24 it is called `past_key_values`.

        Raises:
            SpecdecError: no cache, or more than one text.
        """
        held = cache if cache is not None else past_key_values
        if held is None or len(input_ids) != 1:
            raise SpecdecError(
                f"a memoized model reads one text into a cache, got {len(input_ids)} texts and "
                f"{'no' if held is None else 'a'} cache: call model(input_ids, cache=DynamicCache(config=model.config))"
            )
        keys = input_ids[:, None, :, None]
        n, text = input_ids.shape[1], held.update(keys, keys, 0)[0][0, 0, :, 0].tolist()
        before = MemoCache(self._memory, 0)
        before.ids, before.length = text[:-n], len(text) - n
        logits = self._memory.logits(input_ids, before, last=n)
        if self.top_k is not None:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        return CausalLMOutputWithPast(logits=logits)
