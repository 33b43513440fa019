"""A target and who drafts for it, by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .decode.draft_length import DraftLengthPolicy
from .drafters import (
    ComposedDrafter,
    ModelDrafter,
    NGramDrafter,
    PromptLookupDrafter,
    SharedVocabularyDrafter,
    TextDrafter,
    as_drafter,
)
from .drafters.on_disk import has_own_tokenizer, is_draft, load_draft, packaged_drafts, read_manifest, target_hash
from .drafters.other_tokenizer import difference
from .errors import SpecdecError
from .models import Pair, load_model, load_tokenizer
from .models.fast import FastLlama
from .models.pair import (
    AUTO,
    PACKAGED,
    device_and_dtype,
    fast,
    is_encoder_decoder,
    load_transformers,
    resolve,
    vocabulary_size,
)

LOOKUP = "lookup"
TRANSLATORS: dict[str, Any] = {"text": TextDrafter, "shared": SharedVocabularyDrafter}
TOKENIZERS = ("same", *TRANSLATORS)
FIRST_LOOKUP = PromptLookupDrafter(min_ngram=2, max_ngram=6)  # before another drafter: one token repeats by chance


def load_pair(
    target: str | os.PathLike = PACKAGED,
    draft: Any = None,
    device: str | None = None,
    dtype: Any = None,
    *,
    tokenizers: str = "same",
    trust_remote_code: bool = False,
) -> Pair:
    """Load a target and who drafts for it.

    Args:
        target: `"packaged"`, a model folder, or a hub id (resolved only when named).
        draft: a drafter, a model in memory, or a name: of a packaged draft, a folder, a hub id, `"lookup"`, or
            `"lookup+small"`, where the first that has a proposal wins.  None takes `default_draft(target)`.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`; None takes the GPU if there is one.  `"auto"` lets accelerate spread a
            target that is larger than one GPU; its draft goes where None would put it.
        dtype: `"float32"`, `"bfloat16"`, ...; None means float32 on a CPU, bfloat16 on a GPU.
        tokenizers: `"same"` refuses a draft whose tokens are not the target's; `"text"` drafts with its text
            (`TextDrafter`), `"shared"` with the tokens that both know (`SharedVocabularyDrafter`).
        trust_remote_code: run Python code that comes with a model, where it names some; such a model is refused
            otherwise.

    Raises:
        SpecdecError: for what is no model, a draft of another target or other tokens, a device that is not there.
    """
    device_and_dtype(device, dtype)  # refused, if at all, before anything is read
    beside = None if device == AUTO else device
    named = resolve_draft(draft, target, beside, dtype, tokenizers=tokenizers, trust_remote_code=trust_remote_code)
    model = load_model(target, device, dtype, trust_remote_code=trust_remote_code)
    drafter = named.draft
    if named.tokenizer is not None and hasattr(drafter, "config"):
        two = is_encoder_decoder(drafter) or is_encoder_decoder(model)
        drafter = drafter if two or vocabulary_size(drafter) == vocabulary_size(model) else ModelDrafter(drafter)
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    return Pair(model, drafter, tokenizer, description=f"target {target}, draft {named.label}")


@dataclass(frozen=True)
class ResolvedDraft:
    """Who drafts, loaded.

    Attributes:
        draft: a drafter, or a model of the target's tokens.
        label: its name, or its class.
        tokenizer: of a draft model that has one of its own, which was compared with the target's; else None.
        stock: the transformers model behind it, where it was asked for and there is exactly one; else None.
    """

    draft: Any
    label: str
    tokenizer: Any = None
    stock: Any = None


def resolve_draft(
    draft: Any = None,
    target: str | os.PathLike = PACKAGED,
    device: str | None = None,
    dtype: Any = None,
    *,
    tokenizers: str = "same",
    trust_remote_code: bool = False,
    stock: bool = False,
) -> ResolvedDraft:
    """Load a draft by its name, for `load_pair` and the benchmark alike.

    Args:
        draft: as in `load_pair`; also an n-gram table, a .safetensors file.
        target: by name; packaged drafts know the target that they were made for.
        device, dtype, tokenizers, trust_remote_code: as in `load_pair`.
        stock: keep the transformers model beside the fast one that is made of it.

    Raises:
        SpecdecError: for what is no draft, a draft of another target or other tokens, a choice of `tokenizers` that
            would be ignored.
    """
    check_tokenizers(tokenizers)
    draft = default_draft(target) if draft is None else draft
    check_draft(draft)
    if not isinstance(draft, (str, os.PathLike)):
        check_used(tokenizers, type(draft).__name__)
        return ResolvedDraft(draft, type(draft).__name__)
    target_tokenizer = cache(lambda: load_tokenizer(target, trust_remote_code=trust_remote_code))
    found: dict[str, list[Any]] = {"stock": [], "own": []}

    def load(name: str) -> Any:
        if name.endswith(".safetensors"):
            return NGramDrafter.load(Path(name).expanduser())
        source, own = draft_source(name), None
        ours = is_draft(source)
        if not ours or has_own_tokenizer(source):
            own = own_tokenizer(name, source, target_tokenizer, tokenizers, trust_remote_code)
        model = load_draft(source, target_hash(target), device, dtype) if ours else None
        if model is not None and not isinstance(model, FastLlama):  # a drafter that is no model
            return model
        if stock:
            found["stock"].append(load_transformers(source, device, dtype, trust_remote_code=trust_remote_code))
            model = fast(found["stock"][-1])
        elif model is None:
            model = load_model(source, device, dtype, trust_remote_code=trust_remote_code)
        if own is None:
            return model
        found["own"].append(own)
        return model if tokenizers == "same" else TRANSLATORS[tokenizers](model, own, target_tokenizer())

    drafter = load_drafter(draft, load)
    if not found["own"]:
        check_used(tokenizers, str(draft))
    only = found["stock"][0] if len(found["stock"]) == 1 else None
    return ResolvedDraft(drafter, str(draft), found["own"][-1] if found["own"] else None, only)


def check_draft(draft: Any) -> None:
    """Refuse a class where one of it is meant, and a policy for the draft length."""
    if isinstance(draft, type):
        raise SpecdecError(f"the draft is the class {draft.__name__}: make one of it, {draft.__name__}(...)")
    if isinstance(draft, DraftLengthPolicy):
        raise SpecdecError(f"the draft is a policy for the draft length, {type(draft).__name__}: give it as gamma")


def check_tokenizers(tokenizers: str) -> None:
    if tokenizers not in TOKENIZERS:
        raise SpecdecError(f"unknown tokenizers {tokenizers!r}: use one of {', '.join(TOKENIZERS)}")


def check_used(tokenizers: str, label: str) -> None:
    """Refuse a choice that would be ignored: there is no draft model whose tokenizer could be looked at."""
    if tokenizers != "same":
        raise SpecdecError(
            f"tokenizers={tokenizers!r} is for a draft model with a tokenizer of its own, not for {label}: leave it out"
        )


def own_tokenizer(
    name: str,
    source: str | os.PathLike,
    target_tokenizer: Callable[[], Any],
    tokenizers: str,
    trust_remote_code: bool = False,
) -> Any:
    """The draft's tokenizer, compared with the target's by what the tokens are, not by how many there are.

    Raises `SpecdecError` for a draft without one, or whose files are damaged: whose tokens it has cannot be known.
    """
    try:
        own = load_tokenizer(source, trust_remote_code=trust_remote_code)
    except SpecdecError as error:
        raise SpecdecError(
            f"{error}: without it nobody knows what its tokens are; save its tokenizer in its folder"
        ) from error
    if tokenizers == "same" and (differs := difference(own, target_tokenizer())):
        raise SpecdecError(
            f"{name} has another vocabulary than the target ({differs}): tokenizers='text' re-encodes its "
            "text, tokenizers='shared' drafts with the tokens that both know"
        )
    return own


def default_draft(target: str | os.PathLike) -> str:
    """The fastest draft by measurement for the packaged target, `"lookup"` for any other.

    Drafts of other tokens stand aside: they are for who asks for `tokenizers`.
    """
    if str(target) != PACKAGED:
        return LOOKUP
    return fastest({n: folder for n, folder in packaged_drafts().items() if not has_own_tokenizer(folder)}) or LOOKUP


def draft_source(name: str) -> str | Path:
    """The folder or the hub id behind one drafter's name.

    Raises:
        SpecdecError: at once, with what there is, for a name that is neither packaged nor a folder nor `owner/name`.
    """
    there = packaged_drafts()
    if name in there:
        return there[name]
    try:
        return resolve(name)
    except SpecdecError as error:
        known = ", ".join([LOOKUP, *there])
        raise SpecdecError(
            f"there is no draft {name!r}: use one of {known}, a folder, or owner/name ({error})"
        ) from None


def fastest(drafts: dict[str, Path]) -> str | None:
    """The draft with the best speed-up measured at temperatures 0 and 1; None if none was measured.

    A manifest keeps the speeds by the name that was measured: `"small"`, `"lookup+small"`.
    """
    speeds: dict[str, dict] = {}
    for folder in drafts.values():
        speeds |= read_manifest(folder).get("speed", {})
    return max(speeds, key=lambda name: total(speeds[name]), default=None)


def fastest_model(target: str | os.PathLike) -> str | None:
    """The packaged draft model of this target that ran fastest on its own; None if there is none.

    It is what transformers can draft with: its loop takes a model, no lookup before it, and shows none the target's
    hidden states.
    """
    drafts = packaged_drafts("model")
    if not drafts:
        return None
    wanted, notes = target_hash(target), {name: read_manifest(folder) for name, folder in drafts.items()}
    mine = {name: note.get("speed", {}) for name, note in notes.items() if note["target_hash"] == wanted}
    return max(mine, key=lambda name: total(mine[name].get(name, {})), default=None)


def total(speed: dict) -> float:
    """What drafts are ranked by: the sum of the kept speed-ups at all temperatures, 0 where none was measured."""
    return sum(speed.get("speedup", {}).values())


def names_of(draft: str | os.PathLike) -> list[str]:
    """The drafters that a name is made of, in the order in which they are asked.

    >>> names_of("lookup+small"), names_of("small")
    (['lookup', 'small'], ['small'])
    """
    return [str(draft)] if Path(draft).expanduser().exists() else str(draft).split("+")


def load_drafter(draft: str | os.PathLike, load: Callable[[str], Any]) -> Any:
    """What a name stands for; `load(name)` loads each part of it that is not lookup."""
    names = names_of(draft)
    if "" in names or LOOKUP in names[1:]:
        raise SpecdecError(f"{draft!r} is no draft: write lookup first and a name after each +, as in lookup+small")
    if names == [LOOKUP]:
        return PromptLookupDrafter()
    loaded = [FIRST_LOOKUP if name == LOOKUP else load(name) for name in names]
    if len(loaded) == 1:
        return loaded[0]
    return ComposedDrafter([as_drafter(part) for part in loaded], [kept_length(name) for name in names])


def kept_length(name: str) -> int | None:
    """The draft length with which a draft's own speed was measured and kept, None where none was."""
    folder = packaged_drafts().get(name, name)
    if name == LOOKUP or not is_draft(folder):
        return None
    return read_manifest(folder).get("speed", {}).get(name, {}).get("setting", {}).get("gamma")
