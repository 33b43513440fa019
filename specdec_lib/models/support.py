"""What a model can do, found by running it on a few tokens.

A model is tested once, when it is first decoded with: does it give a text read in pieces the same logits as the text
read at once, and can it read rows of different length together?  The answers are kept here, not on the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch

from ..errors import SpecdecError, first_line
from .rows import padded
from .session import arguments, cache_keyword, class_name, device_of, new_cache, uncompiled

UNLIMITED = 1 << 30  # the context of a model that names none
TEST_TOKENS = 24  # tokens of a test: few, but enough that a wrong position shows
# The largest relative difference of the logits of one text when other positions or rows are in the same pass.
# SmolLM2-135M: 2e-6 in float32 and 0.02 in bfloat16.  A random BERT that sees later tokens: 1e-3.
ROUNDING, COARSE = 2e-4, 0.1

_decoders: WeakSet[torch.nn.Module] = WeakSet()  # those that passed `check_decoder`
_of_rows: WeakSet[torch.nn.Module] = WeakSet()  # those that passed `check_rows`


# -- how long a text may be ----------------------------------------------------------------------------

POSITIONS = ("max_position_embeddings", "max_seq_len", "n_ctx", "max_sequence_length", "seq_length", "model_max_length")
SOURCE_POSITIONS = ("max_encoder_position_embeddings", "max_source_positions", "max_position_embeddings")
OUTPUT_POSITIONS = ("max_decoder_position_embeddings", "max_target_positions", "max_position_embeddings")
GROWING = ("yarn", "linear")  # rotary positions that reach `factor` times as far as the model was trained for
BY_LENGTH = ("dynamic", "longrope")  # rotary positions whose frequencies change once a text exceeds a length


def context_length(model: Any) -> int:
    """The most tokens of a text, for an encoder-decoder of its output; `UNLIMITED` if the config names no length.

    A rope factor counts.  If rotary frequencies change with the length of the text, the context ends where they change:
    after that a text depends on how many tokens each pass reads, and decoders disagree.
    """
    if _is_encoder_decoder(model):
        config = getattr(model.config, "decoder", None) or model.config
        return _named(config, OUTPUT_POSITIONS)
    config = model.config.get_text_config()
    context = _named(config, POSITIONS)
    for rope in _ropes(config):
        original = _original_length(config, rope)
        if rope["rope_type"] in GROWING and original < UNLIMITED:
            context = max(context, int(original * (rope.get("factor") or 1)))
        elif rope["rope_type"] in BY_LENGTH:
            context = min(context, original)
    return context


def source_length(model: Any) -> int:
    """The most tokens of an encoder-decoder's source."""
    return _named(getattr(model.config, "encoder", None) or model.config, SOURCE_POSITIONS)


def room(model: Any, ids: Sequence[int]) -> int:
    """How many tokens may follow `ids`; negative if there are too many already.

    In an encoder-decoder the source and the output have a context each; `ids` are source, start marker, output, and the
    output's first position is that of the start token.
    """
    if not _is_encoder_decoder(model):
        return context_length(model) - len(ids)
    marker = model.config.get_text_config().vocab_size
    source = ids.index(marker) if marker in ids else len(ids)
    if source > source_length(model):
        return source_length(model) - source
    return context_length(model) - max(len(ids) - source - 1, 0)


def new_tokens(model: Any, ids: Sequence[int], longest: int | None, least: int = 0) -> int:
    """How many new tokens the prompt `ids` may get: `longest`, or if that is None all that fit into the context.

    Raises:
        SpecdecError: the prompt is too long, or too long for `longest` tokens; fewer than `least` are allowed.
    """
    left, context = room(model, ids), context_length(model)
    prompt, what = len(ids), f"the target's context of {context}"
    if kind := _changes_with_length(model):
        what = f"the {context} positions after which the target's rotary frequencies change with the length ({kind})"
    if _is_encoder_decoder(model):
        prompt -= 1  # without the start marker
        if left < 0:
            raise SpecdecError(
                f"a source of {prompt} tokens exceeds the target's {source_length(model)} positions: shorten the source"
            )
        if longest is not None and longest > left:
            raise SpecdecError(
                f"{longest} new tokens exceed the target's {context} output positions: lower max_new_tokens, or give "
                "None to go on to their end"
            )
    if longest is None and context >= UNLIMITED:
        raise SpecdecError("the target names no context length: give max_new_tokens")
    if longest is None and left > 0:
        longest = left
    if longest is None or longest > left:
        wanted = f" and {longest} new ones" if longest else ""
        raise SpecdecError(
            f"a prompt of {prompt} tokens{wanted} exceed {what}: "
            "shorten the prompt, lower max_new_tokens, or give None to go on to the context's end"
        )
    if least > longest:
        raise SpecdecError(f"min_new_tokens ({least}) exceeds the {longest} new tokens that are allowed")
    return longest


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _named(config: Any, names: Sequence[str]) -> int:
    """The first length that a config names; its attribute map covers more names, such as `n_positions`."""
    found = (getattr(config, name, None) for name in names)
    return next((n for n in found if isinstance(n, int) and n > 0), UNLIMITED)


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """The rotary settings of a config: one, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return []
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    of_some = bool(nested) or hasattr(config, "rope_local_base_freq")
    found = [{**r, "rope_type": str(r.get("rope_type") or r.get("type") or "")} for r in nested or [rope]]
    return [r for r in found if not (of_some and r["rope_type"] in GROWING)]  # not true of all layers


def _original_length(config: Any, rope: Mapping[str, Any]) -> int:
    """How many positions a model knew before its rotary positions were stretched."""
    named = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return named or _named(config, POSITIONS)


def _changes_with_length(model: Any) -> str | None:
    """The kind of rotary positions whose frequencies change after `context_length`; None if they never do."""
    ropes = [] if _is_encoder_decoder(model) else _ropes(model.config.get_text_config())
    return next((rope["rope_type"] for rope in ropes if rope["rope_type"] in BY_LENGTH), None)


# -- while it decodes ----------------------------------------------------------------------------------


@contextmanager
def decoding(*models: Any) -> Iterator[None]:
    """A context in which models are ready to decode; afterwards, also after an error, they are as before.

    Within it, they are in eval mode (in training mode dropout would change the text at each call), and have no state of
    an earlier text, such as positions shifted by an image (`rope_deltas`).

    Args:
        models: transformers models; anything else is left alone.
    """
    modules: list[Any] = [
        module for model in models if isinstance(model, torch.nn.Module) for module in model.modules()
    ]
    training = [module for module in modules if module.training]
    left = [(module, module.__dict__["rope_deltas"]) for module in modules if "rope_deltas" in module.__dict__]
    try:
        for module in training:
            module.training = False
        for module, _ in left:
            module.rope_deltas = None
        yield
    finally:
        for module in training:
            module.training = True
        for module, deltas in left:
            module.rope_deltas = deltas


# -- can a model be decoded with -----------------------------------------------------------------------


def check_decoder(model: Any) -> None:
    """Refuse a model that cannot be decoded with, before any decoding; a model that passed is not tested again.

    It must take a cache that can be rolled back, and give a text read in pieces the same logits as the text read at
    once.

    Raises:
        SpecdecError: a recurrent state, an encoder that sees later tokens, a PEFT prompt, ...
    """
    bare = uncompiled(model)
    if not isinstance(bare, torch.nn.Module) or bare in _decoders:
        return
    name = class_name(model)
    hint = ": use another model" if _is_encoder_decoder(model) else ": use a decoder-only language model"
    if is_peft(bare):
        if getattr(getattr(bare, "active_peft_config", None), "is_prompt_learning", False):
            raise SpecdecError(
                f"{name} is a PEFT model with a learnt prompt, which gets lost beside a cache: use an adapter that "
                "merge_and_unload() can put into the weights, such as LoRA"
            )
        name, hint = f"{name}, a PEFT model,", ": give what its merge_and_unload() returns"
    if getattr(bare, "_is_stateful", False):
        raise SpecdecError(
            f"{name} keeps a recurrent state, which cannot be rolled back: use a model of full or sliding attention"
        )
    if cache_keyword(bare) is None:
        raise SpecdecError(f"{name} takes no cache in its forward pass{hint}")
    with decoding(bare), torch.inference_mode():
        ids = _question(bare)
        try:
            whole = _read(bare, ids, [])
            n = ids.shape[1]
            pieces = _read(bare, ids, sorted({1, min(4, n), n // 2, n - 1}), back=True)
            if differs(bare, whole, pieces):
                changed = ids.clone()
                changed[:, n // 2 :] = ids[:, n // 2 :].flip(1)
                sees_later = differs(bare, whole[:, : n // 2], _read(bare, changed, [])[:, : n // 2])
                raise SpecdecError(
                    f"{name} sees tokens that come later, as an encoder does: set is_decoder=True in its config if it "
                    "was trained to decode, or use a decoder"
                    if sees_later
                    else f"{name} scores a text read in pieces otherwise than read at once, so no draft can be "
                    f"verified with it{hint}"
                )
        except SpecdecError:
            raise
        except Exception as error:  # models raise errors of all kinds here
            raise SpecdecError(f"{name} cannot be decoded with ({first_line(error)}){hint}") from error
    _decoders.add(bare)


def check_rows(model: Any) -> None:
    """Refuse a model that cannot read rows of different length together; a model that passed is not tested again.

    A row is read alone, and as the shorter of two rows whose last tokens are in the same column of the cache.  Models
    that count positions from the cache's first column and ignore the mask give it other logits there.

    Raises:
        SpecdecError: names the model; also the errors of `check_decoder`.
    """
    bare = uncompiled(model)
    if not isinstance(bare, torch.nn.Module) or bare in _of_rows:
        return
    check_decoder(bare)
    refusal = f"{class_name(model)} cannot decode rows of different length together"
    remedy = "leave out batch_size or drafts"
    if getattr(bare.config, "expert_capacity", None):
        raise SpecdecError(f"{refusal}, its rows share the experts' capacity: {remedy}")
    with decoding(bare), torch.inference_mode():
        ids = _question(bare, rows=2)
        n = ids.shape[1]
        short, cut = ids[1:, n - n // 2 :], n - 2
        seen = torch.ones_like(ids)
        seen[1, : n - short.shape[1]] = 0
        try:
            alone = _read(bare, short, [short.shape[1] - 2], sources=_SOURCES[1:])
            beside = _read(bare, ids, [cut], seen=seen, sources=_SOURCES)[1:, n - short.shape[1] :]
            wrong = differs(bare, alone, beside)
        except Exception as error:
            raise SpecdecError(f"{refusal} ({first_line(error)}): {remedy}") from error
        if wrong:
            raise SpecdecError(f"{refusal}, it gives a row other logits beside a longer one: {remedy}")
    _of_rows.add(bare)


def is_peft(model: Any) -> bool:
    """Whether PEFT wraps this model; PEFT itself need not be installed."""
    return any(kind.__module__.split(".")[0] == "peft" for kind in type(model).__mro__)


def is_quantised(model: Any) -> bool:
    """Whether a model's weights are quantised, by any method."""
    return getattr(model.config, "quantization_config", None) is not None or bool(getattr(model, "is_quantized", False))


def differs(model: Any, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether logits `[rows, n, V]` differ by more than rounding.

    More than a quarter of the positions must differ: rounding may route a few tokens to another expert, while a wrong
    position or a token seen too early changes many.  NaN does not count as a difference; decoding itself refuses it.
    """
    if a.shape != b.shape:
        raise ValueError(f"logits of {a.shape[1]} positions, expected {b.shape[1]}")
    a, b = (x.double() - x.double().mean(-1, keepdim=True) for x in (a, b))
    apart = (a - b).norm(dim=-1) / torch.maximum(a.norm(dim=-1), b.norm(dim=-1)).clamp(min=1e-9)
    exact = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters()) and not is_quantised(model)
    exact = exact and torch.get_float32_matmul_precision() == "highest"
    return bool(apart.flatten().cpu().quantile(0.75) > (ROUNDING if exact else COARSE))


_SOURCES = ((2, 3, 5, 7, 4, 6), (3, 4))  # of an encoder-decoder, one a row: indices into `_ordinary`


def _ordinary(config: Any) -> list[int]:
    """Ids without a special meaning (end of text, place of an image, ...); all ids if none is ordinary."""
    named = [value for name, value in config.to_dict().items() if name.endswith(("_id", "_index"))]
    special = {one for value in named for one in (value if isinstance(value, list) else [value])}
    vocabulary = range(config.get_text_config().vocab_size)
    few = vocabulary[: 16 * TEST_TOKENS]
    return [i for i in few if i not in special] or list(few)


def _question(model: Any, rows: int = 1) -> torch.Tensor:
    """Ids `[rows, n]` to test a model with."""
    n = min(TEST_TOKENS, context_length(model))
    ids = _ordinary(model.config)
    question = [[ids[(5 * i * (row + 1) + i // 3 + row) % len(ids)] for i in range(n)] for row in range(rows)]
    return torch.tensor(question, device=device_of(model))


def _read(
    model: Any,
    ids: torch.Tensor,
    cuts: Sequence[int],
    seen: torch.Tensor | None = None,
    back: bool = False,
    sources: Sequence[Sequence[int]] = _SOURCES[:1],
) -> torch.Tensor:
    """Logits `[rows, n, V]` of `ids` [rows, n], read in pieces.

    Args:
        cuts: where a new piece begins.
        seen: the attention mask, 0 left of a row's tokens.
        back: whether wrong tokens are read after the first piece and rolled back.
        sources: for an encoder-decoder, one for each row.
    """
    two = _is_encoder_decoder(model)
    given: dict[str, Any] = {"use_cache": True}
    if two:
        given |= _encoded(model, sources, ids.device)
        from .seq2seq import new_cache as new_pair_of_caches

        cache = new_pair_of_caches()
    else:
        cache = new_cache(model)
    given[cache_keyword(model) or "past_key_values"] = cache
    known, prefix = arguments(model), "decoder_" if two else ""

    def feed(start: int, piece: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {f"{prefix}input_ids": piece}
        if seen is not None:
            mask = seen[:, : start + piece.shape[1]]
            options[f"{prefix}attention_mask"] = mask
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
            if not two and "position_ids" in known:
                options["position_ids"] = positions
        return model(**given, **options).logits

    logits = []
    edges = [0, *cuts, ids.shape[1]]
    for start, end in pairwise(edges):
        if start == end:
            continue
        logits.append(feed(start, ids[:, start:end]))
        if back and start == 0 and 2 * end < ids.shape[1]:
            feed(end, ids[:, -end:])
            cache.crop(-end)
    return torch.cat(logits, 1)


def _encoded(model: Any, sources: Sequence[Sequence[int]], device: torch.device) -> dict[str, Any]:
    """The encoder's output and mask for sources, padded on the right."""
    ordinary = _ordinary(model.config)
    rows = [[ordinary[i % len(ordinary)] for i in source] for source in sources]
    real = padded([[1] * len(row) for row in rows], device)
    encoded = model.get_encoder()(input_ids=padded(rows, device), attention_mask=real)
    return {"encoder_outputs": encoded, "attention_mask": real}
