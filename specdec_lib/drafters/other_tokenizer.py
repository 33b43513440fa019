"""Drafts from a model with another tokenizer: by its text, or by the tokens that both tokenizers know.

Both re-encode the target's text in the draft's own tokens in each round.  A draft model's session then rolls back to
the longest common prefix, so that only changed tokens are read again.  No step relies on `decode(encode(x)) == x`: the
target verifies whatever is proposed, so a failed translation costs a proposal, but never the output distribution.  Text
level and shared vocabulary: Timor et al. (arXiv 2502.05202).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import torch

from ..detokenize import UNFINISHED, Detokenizer, GrowingText, bytes_of
from ..errors import SpecdecError
from ..models.pair import vocabulary_size
from ..models.rows import on_device
from ..models.session import Session, open_session
from ..sampling import SamplingParams
from .base import Draft, DraftBatch, Drafter, DraftSession, bring_all_home
from .model import (
    BatchAsSession,
    DraftSampler,
    Reader,
    VocabularyLimits,
    as_drafter,
    check_confidence,
    check_draft_model,
)

LOOKBACK = 10  # last tokens of the text that are re-encoded with the draft's text: tokens may merge
WORDS = 4  # last words of the text that are encoded again with what follows them
# after a letter or digit, before a space or a sign: no tokenizer merges across this place
BETWEEN_WORDS = re.compile(r"(?<=[^\W_])(?=[\s!-/:-@\u3000-\u303f\uff01-\uff0f])")


class TextDrafter(Drafter):
    """Proposes the text that another drafter writes in its own tokens, re-encoded in the target's tokens.

    The draft model writes its most probable tokens.  For the target the draft is deterministic, a point mass: lossless
    for greedy decoding and for sampling.  Processors and temperature apply to the target only.

    Args:
        draft: a model, or a drafter such as `NGramDrafter`, with the vocabulary of `tokenizer`.
        tokenizer: the draft's tokenizer.
        target_tokenizer: the target's tokenizer.
    """

    certain = True

    def __init__(self, draft: Any, tokenizer: Any, target_tokenizer: Any):
        check_draft_model(draft)
        self.draft: Drafter = as_drafter(draft)
        if self.draft.reads_target:
            raise SpecdecError("this draft reads the target, in the target's own tokens: give it to Pair as it is")
        self.tokenizer, self.target_tokenizer = tokenizer, target_tokenizer
        self.bridge = Bridge(target_tokenizer, tokenizer)

    @property
    def models(self) -> list[Any]:
        return self.draft.models

    def start(self, vocabulary: int) -> DraftSession:
        return BatchAsSession(self.start_batch(1, vocabulary))

    def start_batch(self, rows: int, vocabulary: int, target: Session | None = None) -> TextDrafts:
        # rows of the draft model without a token are dropped there
        return TextDrafts(self.draft.start_batch(rows, size_of(self.tokenizer)), rows, self.bridge, vocabulary)

    def with_confidence(self, threshold: float) -> TextDrafter:
        return TextDrafter(self.draft.with_confidence(threshold), self.tokenizer, self.target_tokenizer)


class TextDrafts(DraftBatch):
    """Drafts by text, for several texts of the target."""

    def __init__(self, batch: DraftBatch, rows: int, bridge: Bridge, vocabulary: int):
        self.batch, self.bridge, self.vocabulary = batch, bridge, vocabulary
        self.readings = [bridge.begin() for _ in range(rows)]

    def propose(
        self, prefixes: list[list[int]], gammas: list[int], params: list[SamplingParams], randoms: list[Random]
    ) -> list[Draft]:
        # the texts so far in the draft's tokens; a text that the draft cannot read gets an empty draft
        own = [
            reading.extend(prefix)[0] if gamma > 0 else []
            for reading, prefix, gamma in zip(self.readings, prefixes, gammas, strict=True)
        ]
        asked = [gamma if ids else 0 for ids, gamma in zip(own, gammas, strict=True)]
        greedy = [SamplingParams()] * len(own)
        drafts = self.batch.propose([ids or [0] for ids in own], asked, greedy, randoms) if any(own) else []
        written = bring_all_home(drafts) or [[] for _ in own]
        passes = [draft.passes for draft in drafts] or [0] * len(own)
        return [
            Draft(self._translated(*each)[:gamma] if gamma > 0 else [], certain=True, passes=n)
            for *each, gamma, n in zip(prefixes, own, written, asked, passes, strict=True)
        ]

    def _translated(self, prefix: list[int], own: list[int], new: list[int]) -> list[int]:
        """The target's tokens for the text by which the draft's tokens `new` continue `own`."""
        written, end = self.bridge.until_special(new)
        text, whole = self.bridge.new_text(own, written)
        tokens = self.bridge.target_tokens(prefix, text) if text else []
        if whole and end is not None and (tokens or not text):
            tokens = [*tokens, end]
        bad = next((i for i, token in enumerate(tokens) if token >= self.vocabulary), len(tokens))
        return tokens[:bad]

    def select_rows(self, rows: Sequence[int]) -> None:
        self.batch.select_rows(rows)
        self.readings = [self.readings[i] for i in rows]


class SharedVocabularyDrafter(Drafter):
    """Draws from a draft model's distribution, restricted to the tokens that both tokenizers know and renormalised.

    `q(x) = d(x) / sum over shared tokens of d`, in the target's ids.  Tokens are drawn from q and q is reported, so
    sampling is lossless; q is 0 for tokens that the draft does not know.  A token is shared if it stands for the same
    text in both.  Parts of a character are not shared, nor special tokens of different names, except the ends of a
    text.

    Args:
        model: a draft model with the vocabulary of `tokenizer`.
        tokenizer: the draft's tokenizer.
        target_tokenizer: the target's tokenizer.
        confidence: as in `ModelDrafter`, for the restricted distribution.

    Attributes:
        shared: the number of shared tokens.
    """

    def __init__(self, model: Any, tokenizer: Any, target_tokenizer: Any, confidence: float = 0.0):
        check_draft_model(model)
        self.model, self.confidence = model, check_confidence(confidence)
        self.tokenizer, self.target_tokenizer = tokenizer, target_tokenizer
        self.bridge = Bridge(target_tokenizer, tokenizer)
        own, rows = contents(tokenizer), vocabulary_size(model)
        pairs = {token: own[text] for text, token in contents(target_tokenizer).items() if text in own}
        self.own_token = {token: d for token, d in (pairs | self.bridge.specials).items() if d < rows}
        self.shared = len(self.own_token)
        if not pairs:
            raise SpecdecError("the two tokenizers share no token: draft by text, with TextDrafter")

    @property
    def models(self) -> list[Any]:
        return [self.model]

    def start(self, vocabulary: int) -> SharedSession:
        return SharedSession(self, vocabulary)

    def with_confidence(self, threshold: float) -> SharedVocabularyDrafter:
        drafter = object.__new__(SharedVocabularyDrafter)
        drafter.__dict__.update(self.__dict__, confidence=check_confidence(threshold))
        return drafter


class SharedSession(DraftSession):
    """Reads one text in the draft's own tokens, and drafts in the target's."""

    def __init__(self, drafter: SharedVocabularyDrafter, vocabulary: int):
        self.bridge, self.confidence, self.vocabulary = drafter.bridge, drafter.confidence, vocabulary
        self.reading = self.bridge.begin()
        self.own_token = {token: d for token, d in drafter.own_token.items() if token < vocabulary}
        self.session = open_session(drafter.model)
        self.limits = VocabularyLimits(drafter.model, vocabulary_size(drafter.model))
        self.reader = Reader()
        self.drafted = Draft([])  # the last draft; by the next round the loop has copied it to the host
        device = self.session.device
        self.tokens = torch.tensor(list(self.own_token), device=device)
        self.own = torch.tensor(list(self.own_token.values()), device=device)
        self.own_of = torch.zeros(vocabulary, dtype=torch.long, device=device).index_copy(0, self.tokens, self.own)

    def propose(self, prefix: list[int], gamma: int, params: SamplingParams, random: Random) -> Draft:
        own = self.own_tokens(prefix)
        if not own or (gamma := self.limits.length(own, gamma)) < 1:
            return Draft([])
        sampler = DraftSampler(prefix, gamma, params, random, self.confidence)
        wanted = sampler.step(self.restricted(self.sync(own)))
        while wanted:
            own_token = self.own_of.index_select(0, sampler.last_token)
            wanted = sampler.step(self.restricted(self.session.feed(own_token[None])[0, -1]))
        self.drafted = sampler.draft()
        return self.drafted

    def sync(self, own: list[int]) -> torch.Tensor:
        """Roll back changed tokens and feed new ones; returns the logits `[V]` after `own`."""
        self.reader.note(Draft([self.own_token[token] for token in self.drafted.bring_home()]))
        self.drafted = Draft([])
        held = self.reader.sync(own)
        self.session.rollback(held)
        self.reader.read += own[held:]
        return self.session.feed(on_device([own[held:]], self.session.device))[0, -1]

    def own_tokens(self, prefix: list[int]) -> list[int]:
        """`prefix` in the draft's tokens; empty if it cannot read it: half a character, or a token without a row."""
        own, finished = self.reading.extend(prefix)
        # the draft cannot read the first half of a character, so it cannot propose the second
        return own if finished and own and max(own) < self.limits.rows else []

    def logits(self, prefix: list[int]) -> torch.Tensor | None:
        """The draft's logits `[V]` after `prefix`, for the target's tokens; None if it cannot read `prefix`."""
        own = self.own_tokens(prefix)
        return self.restricted(self.sync(own)) if own else None

    def restricted(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[V]` for the target's tokens, from logits for the draft's own."""
        found = logits.new_full((self.vocabulary,), float("-inf"))
        found[self.tokens] = logits[self.own]
        return found


class Bridge:
    """Translates a target's tokens to a draft's, and back.

    Special tokens of the same name correspond, and so do the beginning and the end of a text; the draft does not see
    other special tokens.

    Attributes:
        specials: from the target's special tokens to the corresponding ones of the draft.
    """

    def __init__(self, target_tokenizer: Any, tokenizer: Any):
        self.target, self.draft = target_tokenizer, tokenizer
        self.target_special, self.draft_special = special_tokens(self.target), special_tokens(self.draft)
        names = {name: d for d, name in self.draft_special.items()}
        self.specials = {t: names[name] for t, name in self.target_special.items() if name in names}
        for role in ("bos_token_id", "eos_token_id"):
            t, d = getattr(self.target, role, None), getattr(self.draft, role, None)
            if t is not None and d is not None:
                self.specials[t] = d
        self.ends = {d: t for t, d in self.specials.items()}
        with_special, plain = tokenizer("a")["input_ids"], encode(tokenizer, "a")
        start = next((i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain), 0)
        self.opening: list[int] = with_special[:start]  # the tokens that the draft's tokenizer puts before any text

    def begin(self) -> Reading:
        """A `Reading` of one text of the target."""
        return Reading(self)

    def draft_tokens(self, prefix: list[int]) -> tuple[list[int], bool]:
        """The text of `prefix` in the draft's tokens, and whether it ends with a whole character."""
        return self.begin().extend(prefix)

    def until_special(self, new: list[int]) -> tuple[list[int], int | None]:
        """The draft's tokens up to the first special one, and the target's token for that one."""
        first = next((i for i, token in enumerate(new) if token in self.draft_special), len(new))
        return new[:first], self.ends.get(new[first]) if first < len(new) else None

    def new_text(self, own: list[int], new: list[int]) -> tuple[str, bool]:
        """The text that `new` adds to the draft's tokens `own`, in whole characters; whether that is all of it."""
        before, after = decode(self.draft, own[-LOOKBACK:]), decode(self.draft, own[-LOOKBACK:] + new)
        if not after.startswith(before):
            return "", False
        text, unfinished, _ = after[len(before) :].partition(UNFINISHED)
        return text, not unfinished

    def target_tokens(self, prefix: list[int], text: str) -> list[int]:
        """The target's tokens that continue `prefix` with `text`; may be empty."""
        tail = prefix[-LOOKBACK:]
        decoded = decode(self.target, tail)
        whole = decoded.rstrip(UNFINISHED)
        found = list(self._continuations(tail, whole, text))
        fitting = (tokens for tokens in found if decode(self.target, tail + tokens) == whole + text)
        # with a tokenizer that rewrites its input no candidate fits: then guess the first
        return next(fitting, found[0] if found and whole == decoded else [])

    def _continuations(self, tail: list[int], tail_text: str, text: str) -> Iterator[list[int]]:
        """Candidates for the tokens of `text`: encoded after the tail; if they merge, after a newline or nothing."""
        for before, start in ((tail_text, tail), ("\n", encode(self.target, "\n")), ("", [])):
            tokens = encode(self.target, before + text)
            if tokens[: len(start)] == start:
                yield tokens[len(start) :]


class Reading:
    """One text of the target in the draft's tokens; only new tokens and a few words before them are encoded.

    When the text between two special tokens grows, its last words are encoded again, since tokens may merge.  Tokens
    before a place where no tokenizer merges are final.

    Attributes:
        own: the draft's tokens, without the opening.
        settled: how many of them are final.
    """

    def __init__(self, bridge: Bridge):
        self.bridge = bridge
        self._is_byte = bytes_of(bridge.target)
        self._start()

    def _start(self) -> None:
        self.own: list[int] = []
        self.settled = 0
        self._read = 0  # how many of the target's tokens were read
        self._last: list[int] = []  # the last of them
        self._begin_text()

    def extend(self, prefix: list[int]) -> tuple[list[int], bool]:
        """The text of `prefix` in the draft's tokens, and whether it ends with a whole character.

        Of the tokens read before, only the last few are compared.
        """
        bridge = self.bridge
        if prefix[self._read - len(self._last) : self._read] != self._last:
            self._start()  # another text
        for token in prefix[self._read :]:
            if token not in bridge.target_special:
                self._text += self._growing.add([token])
                self._stale = True
                continue
            self._encode()
            self._begin_text()
            self.own += [bridge.specials[token]] if token in bridge.specials else []
            self.settled = len(self.own)
        self._encode()
        self._read, self._last = len(prefix), prefix[-LOOKBACK:]
        opening = [] if self.own[: len(bridge.opening)] == bridge.opening else bridge.opening
        return opening + self.own, not self._growing.open.endswith(UNFINISHED)

    def _begin_text(self) -> None:
        self._growing = GrowingText(
            Detokenizer(partial(decode, self.bridge.target), is_byte=bytes_of(self.bridge.target))
        )
        self._text = ""  # the final text from the last settled words on
        self._known: list[int] = []  # the tokens of those words
        self._stale = False

    def _encode(self) -> None:
        """Update `own` from the text, and settle its tokens up to the last place between two words."""
        if not self._stale:
            return
        self._stale = False
        tokenizer, held = self.bridge.draft, len(self._known)
        tokens = encode(tokenizer, (self._text + self._growing.open).rstrip(UNFINISHED))
        self.own[self.settled :] = tokens[held:]
        places = [m.start() for m in BETWEEN_WORDS.finditer(self._text)]
        if len(places) <= 2 * WORDS:
            return
        begin, end = places[-1 - WORDS], places[-1]
        words, known = (encode(tokenizer, self._text[i:end]) for i in (0, begin))
        again = encode(tokenizer, (self._text[begin:] + self._growing.open).rstrip(UNFINISHED))
        if words + again[len(known) :] == tokens and again[: len(known)] == known:  # else tokens merge at this place
            self.settled += len(words) - held
            self._text, self._known = self._text[begin:], known


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokens of `text` as it is, without special tokens before or after it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """The text of `tokens`, with special tokens, and spaces unchanged."""
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False) if tokens else ""


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens of a tokenizer, by id."""
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True))


def size_of(tokenizer: Any) -> int:
    """One more than the largest id."""
    return max(tokenizer.get_vocab().values()) + 1


def contents(tokenizer: Any) -> dict[str, int]:
    """The text that each ordinary token adds to a text, and its id.

    Taken from decoded text, not from token names: each kind of tokenizer spells a space differently there.  Parts of a
    character are left out.
    """
    ids = sorted(set(tokenizer.get_vocab().values()) - set(special_tokens(tokenizer)))
    # put a word before each token: some tokenizers drop the space at the beginning of a text
    anchor = next((i for i in ids if decode(tokenizer, [i]).strip().isalnum()), None)
    if anchor is None:
        return {}
    before = decode(tokenizer, [anchor])
    texts = tokenizer.batch_decode(
        [[anchor, token] for token in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    found = {}
    for token, text in zip(ids, texts, strict=True):
        if text.startswith(before) and len(text) > len(before) and UNFINISHED not in text:
            found[text[len(before) :]] = token
    return found


def difference(tokenizer: Any, target_tokenizer: Any) -> str | None:
    """The first id that stands for different tokens, as a sentence; None if the two tokenizers agree.

    Ids that only one of them has are ignored: a vocabulary may be padded, or have tokens added at its end.
    """
    own, other = ({i: name for name, i in t.get_vocab().items()} for t in (tokenizer, target_tokenizer))
    bad = next((i for i in sorted(own.keys() & other.keys()) if own[i] != other[i]), None)
    return None if bad is None else f"token {bad} is {own[bad]!r} in the draft's and {other[bad]!r} in the target's"
