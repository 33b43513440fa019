"""Who is compared: four engines, ours and transformers' own, each plain and drafted, over one target and one draft.

On a CPU our pass multiplies with weights that were laid out once for oneDNN.  A comparison must not gain from that,
so transformers' own target and assistant get the same layers, module by module.
"""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..drafters import ComposedDrafter, Drafter, ModelDrafter, PromptLookupDrafter, as_drafter
from ..drafters.on_disk import packaged_drafts
from ..engines import Engine, OurEngine, Reply, TransformersEngine
from ..errors import SpecdecError, first_line
from ..generation_settings import listed, shaping
from ..load import fastest_model, resolve_draft
from ..models.fast import PackedLinear, packed_linears_available
from ..models.pair import (
    PACKAGED,
    Pair,
    check_vocabulary,
    end_tokens,
    fast,
    is_encoder_decoder,
    load_tokenizer,
    load_transformers,
    vocabulary_size,
)
from ..sampling import SamplingParams

ARMS = {
    "transformers": "transformers plain",
    "assisted": "transformers assisted",
    "plain": "ours plain",
    "drafted": "ours drafted",
}
"""The arms of a contest, and what tables call them."""


class PackedModule(torch.nn.Module):
    """`PackedLinear` where a transformers model expects a module; for inference only."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self.multiply = PackedLinear(linear.weight.detach(), bias)
        self.weight = linear.weight.detach().new_empty(0)  # T5 asks its layers for their dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x)


def pack_linears(model: torch.nn.Module) -> int:
    """Give `model` packed linear layers *in place*; returns how many.

    The stock weights are freed, so the model can be neither trained nor saved afterwards: pack only what you loaded
    yourself.  A table shared with the embeddings stays for those.  On a GPU, and in a dtype that
    `packed_linears_available` says no to, nothing is changed.

    >>> stock = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    >>> x = torch.ones(1, 3)
    >>> before = stock(x)
    >>> packed = pack_linears(stock)
    >>> torch.allclose(before, stock(x))
    True
    """
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear
        and child.weight.device.type == "cpu"
        and packed_linears_available(child.weight.dtype)
    ]
    for parent, name in found:
        setattr(parent, name, PackedModule(getattr(parent, name)))
    return len(found)


@dataclass
class Contest:
    """One target and one draft, loaded once for both decoders.

    Attributes:
        pair: ours.
        bare: the same without its tokenizer, so that no text is made while the clock runs.
        target: the transformers model of the same weights, packed, its generation config cleared.
        ends: the ids that end a text.
        assistant: the transformers model of the draft, packed; None where the draft is no model.
        lookup: the longest n-gram that transformers' own prompt lookup looks up; None where the draft is no lookup.
        translation: what transformers needs beside `assistant`, a draft of other tokens: both tokenizers, by the names
            that its `generate` gives them.  The assistant then is as it was loaded: `prepared` makes one to run.
        refusal: why transformers' assisted generation cannot take this draft; empty where it can.
        remark: in what its draft differs from ours; empty where it does not.
    """

    pair: Pair
    bare: Pair
    target: Any
    ends: list[int]
    assistant: Any = None
    lookup: int | None = None
    translation: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    remark: str = ""

    def engines(self, gamma: int) -> dict[str, Engine]:
        """The engine of each arm; transformers assisted is left out where it cannot take this draft.

        transformers drafts `gamma` tokens a round, as ours does: its confidence threshold is 0.
        """
        kind = Universal if self.translation else TransformersEngine
        engines: dict[str, Engine] = {
            "transformers": TransformersEngine(self.target),
            "assisted": kind(self.target, self.assistant, gamma, self.lookup, **self.translation),
            "plain": OurEngine(self.pair),
            "drafted": OurEngine(self.pair, gamma),
        }
        return {arm: engine for arm, engine in engines.items() if arm != "assisted" or not self.refusal}


class Unfit(Exception):
    """transformers' assisted generation does not take this draft."""


class Universal(TransformersEngine):
    """transformers' universal assisted decoding, with a draft of other tokens: what it raises is `Unfit`."""

    def run(self, *args: Any, **kwargs: Any) -> list[Reply]:
        try:
            return super().run(*args, **kwargs)
        except Exception as error:  # its own, of any kind
            raise Unfit(
                f"transformers' universal assisted decoding fails with this draft ({type(error).__name__}: "
                f"{first_line(error)})"
            ) from error


def prepared(contest: Contest, ids: list[int], gamma: int, temperature: float) -> Contest:
    """The contest with an assistant that may run: where the draft has other tokens, a copy for this temperature alone.

    transformers' sampling then changes the draft model for good (its embeddings and its output layer), and remembers
    by the tokenizers that it did, so each run gets a model and a tokenizer of its own.  It does so when it is first
    called, on stock layers, which are packed afterwards.

    Raises:
        Unfit: it fails on this draft.
    """
    if not contest.translation or contest.refusal:
        return contest
    own = {**contest.translation, "assistant_tokenizer": deepcopy(contest.translation["assistant_tokenizer"])}
    found = replace(contest, assistant=deepcopy(contest.assistant), translation=own)
    found.engines(gamma)["assisted"].run([ids], 2, SamplingParams(temperature))
    pack_linears(found.assistant)
    return found


def load_contest(
    target: str | os.PathLike = PACKAGED,
    draft: str | os.PathLike | Drafter | None = None,
    device: str | None = None,
    dtype: Any = None,
    tokenizers: str = "same",
    trust_remote_code: bool = False,
) -> Contest:
    """Load what the benchmark compares.  It loads by name only: the models are changed.

    Args:
        target: as in `load_pair`.
        draft: a name as in `load_pair`, an n-gram table (a .safetensors file), or a drafter.  None takes what
            `load_pair` takes.
        device, dtype, tokenizers, trust_remote_code: as in `load_pair`.

    Raises:
        SpecdecError: as in `load_pair`; for a model in memory; for a draft that was made for another target.
    """
    from transformers import GenerationConfig

    if hasattr(draft, "config") or isinstance(draft, ModelDrafter):
        raise SpecdecError("the benchmark changes the models it runs: name the draft by its folder or hub id")
    # refused, if at all, before a large target loads
    named = resolve_draft(
        draft, target, device, dtype, tokenizers=tokenizers, trust_remote_code=trust_remote_code, stock=True
    )
    drafter, assistant, own = as_drafter(named.draft), named.stock, named.tokenizer
    model = load_transformers(target, device, dtype, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    other = tokenizers != "same" or (own is not None and vocabulary_size(model) != vocabulary_size(assistant))
    if not other or is_encoder_decoder(model):
        check_vocabulary(model, assistant)
    ends = end_tokens(Pair(model, None, tokenizer))
    pair = Pair(fast(model), drafter, tokenizer, description=f"target {target}, draft {named.label}")
    translation = {"tokenizer": tokenizer, "assistant_tokenizer": own} if other else {}
    refusal, lookup, remark = "", None, ""
    if drafter.reads_target and (name := fastest_model(target)):
        assistant = load_transformers(packaged_drafts()[name], device, dtype)
        remark = f"transformers assisted drafts with {name}: its loop shows no draft the target's hidden states"
    elif isinstance(drafter, PromptLookupDrafter):
        lookup = drafter.max_ngram
    elif isinstance(drafter, ComposedDrafter) and assistant is not None:
        remark = "transformers assisted drafts with the model alone: it takes no drafter composed of several"
    elif assistant is None:
        refusal = f"transformers' assisted generation takes a model or prompt lookup, not a {type(drafter).__name__}"
    if assistant is not None and other:
        place = assistant.config.name_or_path  # not the one that ours may run
        assistant = load_transformers(place, device, dtype, trust_remote_code=trust_remote_code)
    if switched_off := shaping(model):
        remark = "; ".join(filter(None, [remark, f"the target's {listed(switched_off)} is switched off for all"]))
    for theirs in [model] if assistant is None else [model, assistant]:
        if theirs is model or not other:
            pack_linears(theirs)
        # no end of text, truncation or penalty but what a run asks for
        start = {"decoder_start_token_id": theirs.config.decoder_start_token_id} if is_encoder_decoder(theirs) else {}
        theirs.generation_config = GenerationConfig(**start)
    pair.target.generation_config = model.generation_config
    return Contest(pair, replace(pair, tokenizer=None), model, ends, assistant, lookup, translation, refusal, remark)
