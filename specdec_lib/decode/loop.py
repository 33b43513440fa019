"""The loop: plain and speculative decoding, of one text and of several together, with one draft each or several.

A round drafts, scores, verifies, copies the outcome to the host, and keeps what was accepted.  Between rounds the
target's cache holds each text without its last token, which is fed with the next draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from time import perf_counter
from typing import Any

import torch

from ..drafters.base import Draft, DraftBatch, Drafter, DraftSession, check_draft
from ..models.pair import vocabulary_size
from ..models.rows import on_device
from ..models.session import Session, open_session
from ..sampling import SamplingParams
from ..verify import Verifier
from .draft_length import PolicyState
from .results import Round
from .stopping import EndCheck
from .verification import bring_home, verify_chain, verify_several

ROOM = 256  # the target's cache has room for this many new tokens at first, and grows when needed


@dataclass(frozen=True)
class Plan:
    """What is the same for all texts of a call.

    Attributes:
        drafter: None for plain decoding.
        lengths: gives the draft length.
        drafts: how many drafts of a text are made in a round.
    """

    target: Any
    drafter: Drafter | None
    lengths: PolicyState
    rule: Verifier
    logprobs: bool = False
    drafts: int = 1

    def gamma(self, text: Text) -> int:
        """How many tokens to draft: a round emits one token more than it accepts, and some rules need one more."""
        if self.drafter is None:
            return 0
        room = text.remaining - 1
        return min(self.lengths.next(text.index, room), room) + self.rule.needs_bonus_draft_probs


@dataclass
class Text:
    """One text while it is decoded.

    Attributes:
        index: the index of the prompt.
        tokens: the text so far; new tokens begin at position `start`.
        remaining: how many tokens may still come.
        params: how it is sampled, processors included.
        random: its own generator.
        ending: checks each new token for the end of the text.
        at_end: the reason to report when no tokens remain.
        ended: why it ended; empty while it goes on.
        read_seconds: prefill time.
    """

    index: int
    tokens: list[int]
    start: int
    remaining: int
    params: SamplingParams
    random: Random
    ending: EndCheck
    at_end: str
    ended: str = ""
    read_seconds: float = 0.0

    @property
    def new(self) -> list[int]:
        return self.tokens[self.start :]


def decode_texts(plan: Plan, texts: list[Text]) -> Iterator[Round]:
    """Decode texts together, yielding each round of each text.  With `k` drafts a text has `k` rows in the target."""
    texts = [text for text in texts if text.remaining]
    if not texts:
        return
    k, start = plan.drafts, perf_counter()

    # the target and the drafter read the prompts; the last token of each is left for the first round
    session, drafting = open_both(plan, texts)
    for text in texts:
        text.read_seconds = (perf_counter() - start) / len(texts)

    while texts:
        start = perf_counter()
        rows = [text for text in texts for _ in range(k)]

        # 1. draft: up to gamma tokens for each row, and the distributions that they were drawn from
        gammas = [gamma for text in texts for gamma in [plan.gamma(text)] * k]
        drafts = drafting.propose(
            [row.tokens for row in rows], gammas, [row.params for row in rows], [row.random for row in rows]
        )
        if plan.drafter is not None:
            for draft, gamma, row in zip(drafts, gammas, rows, strict=True):
                check_draft(draft, plan.drafter, gamma, row.params, vocabulary_size(plan.target))
        drafted = perf_counter()

        # 2. score: one pass of the target over the last token and the draft, so over g + 1 positions
        blocks = blocks_of(plan, rows, drafts, session.device)
        logits = session.feed_rows(blocks, [len(each) for each in blocks])
        scored = perf_counter()

        # 3. verify: how many draft tokens are kept, and the token that follows them
        verify = verify_chain if k == 1 else verify_several
        verdicts = [
            verify(plan, text, drafts[i * k : i * k + k], logits[i * k : i * k + k]) for i, text in enumerate(texts)
        ]

        # 4. copy the outcome to the host: here the host waits for the device, once a round
        found = bring_home(verdicts, plan.drafter, plan.target)

        # 5. keep: append the accepted tokens, roll back the rejected ones
        share, done = len(texts), []
        for text, verdict in zip(texts, found, strict=True):
            done.append(write(plan, text, verdict))
        if any(verdict.parted for verdict in found):  # the rows of a text go on from the followed draft
            session.select_rows([i * k + verdict.followed for i, verdict in enumerate(found) for _ in range(k)])
        held = [len(row.tokens) - 1 for row in rows]
        session.rollback([min(n, has) for n, has in zip(held, session.lengths, strict=True)])
        seconds: dict[str, Any] = {
            "draft_seconds": (drafted - start) / share,
            "target_seconds": (scored - drafted) / share,
            "seconds": (perf_counter() - start) / share,
        }
        for fields in done:
            finished = Round(**fields, **seconds)
            plan.lengths.update(finished)
            yield finished

        # remove finished texts
        going = [i for i, text in enumerate(texts) if text.remaining]
        texts = [texts[i] for i in going]
        if texts and len(texts) < share:
            kept = [i * k + j for i in going for j in range(k)]
            session.select_rows(kept)
            drafting.select_rows(kept)


def open_both(plan: Plan, texts: list[Text]) -> tuple[Session, DraftBatch]:
    """The target's session, which has read each prompt without its last token, and the drafter's batch."""
    k = plan.drafts
    capacity = max(len(text.tokens) + min(text.remaining, ROOM) for text in texts)
    session = open_session(plan.target, len(texts), capacity)
    drafting: DraftBatch = DraftBatch([DraftSession()] * len(texts))
    if plan.drafter is not None:
        rows = len(texts) if plan.drafter.reads_target else len(texts) * k
        drafting = plan.drafter.start_batch(rows, vocabulary_size(plan.target), session)
    session.feed_rows([text.tokens[:-1] for text in texts], [0] * len(texts))
    if k > 1:
        repeated = [i for i in range(len(texts)) for _ in range(k)]
        session.select_rows(repeated)
        if plan.drafter is not None and plan.drafter.reads_target:
            drafting.select_rows(repeated)
    return session, drafting


def blocks_of(plan: Plan, rows: list[Text], drafts: list[Draft], device: torch.device) -> list[Any]:
    """The input of the target for each row: the text's last token, and the tokens to verify."""
    tokens = [draft.tokens[: len(draft) - plan.rule.needs_bonus_draft_probs] if len(draft) else [] for draft in drafts]
    if not any(isinstance(each, torch.Tensor) for each in tokens):
        return [[row.tokens[-1], *each] for row, each in zip(rows, tokens, strict=True)]
    last = on_device([row.tokens[-1:] for row in rows], device)
    return [
        torch.cat([last[i], each.to(device) if isinstance(each, torch.Tensor) else on_device(each, device)])
        for i, each in enumerate(tokens)
    ]


def write(plan: Plan, text: Text, verdict: Any) -> dict[str, Any]:
    """Append the accepted tokens and the one after them, until the text ends; returns the fields of its `Round`."""
    emitted: list[int] = []
    for token in [*verdict.drafted[: verdict.accepted], verdict.last]:
        emitted.append(token)
        text.tokens.append(token)
        text.remaining -= 1
        if reason := text.ending.reason(token):
            text.remaining, text.ended = 0, reason
            break
    if not text.remaining:
        text.ended = text.ended or text.at_end
    return {
        "row": text.index,
        "drafted": verdict.drafted,
        "accepted": verdict.accepted,
        "emitted": emitted,
        "q": verdict.q,
        "p": verdict.p,
        "draft_passes": verdict.passes,
        "logprobs": verdict.logprobs[: len(emitted)],
        "scores": verdict.scores[: len(emitted)],
        "drafts": verdict.drafts,
    }
