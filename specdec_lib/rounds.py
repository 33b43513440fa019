"""The loop that plain and speculative decoding share, several texts at a time.

A round: the drafter proposes `(draft, q)`, the target scores all of it in one pass (`p`), the verifier gives the law
of the number of accepted tokens and of the token that follows, one draw from each.  Without a draft that is plain
decoding.  Between rounds the target holds each text but its last token, which is fed with the next draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from time import perf_counter
from typing import Any

import torch

from .distributions import inverse_cdf, softmax
from .drafters.base import Draft, DraftBatch, Drafter, NoDrafts, Sampling, start_rows
from .errors import SpecdecError
from .lengths import Schedule
from .models.batch import Batch, OneRow, open_batch
from .models.pair import vocabulary_size
from .models.session import open_session
from .processing import process_block
from .results import Round
from .stopping import Stopping
from .verify import VERIFIERS, Verifier
from .verify.token import at

GREEDY = VERIFIERS["greedy"]


@dataclass(frozen=True)
class Call:
    """What is the same for all rows: see `generate`.  Without a drafter it decodes plainly.

    A rule that wants the draft's law after its last token, too (`next_law`), has one more drafted, and only the law of
    that is used.
    """

    target: Any
    drafter: Drafter | None
    schedule: Schedule
    rule: Verifier
    stopping: Stopping
    logprobs: bool


@dataclass
class Row:
    """One text on its way.

    Attributes:
        index: of the prompt.
        prefix: the text so far, new from position `start` on.
        remaining: how many tokens may still come.
        sampling: with the processors of this row.
        random: the row's own.
        at_end: why the text ends when nothing remains.
        ended: why it ended; empty while it goes on.
        read_seconds: time that reading the prompt took.
    """

    index: int
    prefix: list[int]
    start: int
    remaining: int
    sampling: Sampling
    random: Random
    at_end: str
    ended: str = ""
    read_seconds: float = 0.0

    @property
    def tokens(self) -> list[int]:
        return self.prefix[self.start :]


def decode_together(call: Call, rows: list[Row]) -> Iterator[Round]:
    """Decode rows together, yielding each round of each row."""
    rows = [row for row in rows if row.remaining]
    if not rows:
        return
    start = perf_counter()
    capacity = max(len(row.prefix) + row.remaining for row in rows)
    batch: Batch
    if len(rows) == 1:
        batch = OneRow(open_session(call.target, capacity=capacity))
    else:
        batch = open_batch(call.target, len(rows), capacity)
    drafting: DraftBatch = NoDrafts()
    if call.drafter is not None:
        drafting = start_rows(call.drafter, len(rows), vocabulary_size(call.target), batch)
    if any(len(row.prefix) > 1 for row in rows):
        batch.feed([row.prefix[:-1] for row in rows], [0] * len(rows))
    for row in rows:
        row.read_seconds = (perf_counter() - start) / len(rows)
    while rows:
        start = perf_counter()
        # a round emits one token more than it accepts
        gammas = [min(call.schedule.next(row.index), row.remaining - 1) + call.rule.next_law for row in rows]
        drafts = drafting.propose(
            [row.prefix for row in rows], gammas, [row.sampling for row in rows], [row.random for row in rows]
        )
        drafted = perf_counter()
        blocks = [[row.prefix[-1], *to_verify(call, draft)] for row, draft in zip(rows, drafts, strict=True)]
        logits = batch.feed(blocks, [len(block) for block in blocks])
        scored = perf_counter()
        settled = [settle(call, *each) for each in zip(rows, drafts, logits, strict=True)]
        batch.rollback([min(len(row.prefix) - 1, held) for row, held in zip(rows, batch.lengths, strict=True)])
        share = len(rows)
        seconds: dict[str, Any] = {
            "draft_seconds": (drafted - start) / share,
            "target_seconds": (scored - drafted) / share,
            "seconds": (perf_counter() - start) / share,
        }
        for found in settled:
            done = Round(**found, **seconds)
            call.schedule.update(done)
            yield done
        going = [i for i, row in enumerate(rows) if row.remaining]
        rows = [rows[i] for i in going]
        if rows and len(rows) < share:
            batch.keep(going)
            drafting.keep(going)


def settle(call: Call, row: Row, draft: Draft, logits: torch.Tensor) -> dict[str, Any]:
    """Verify a draft and let the row have what comes of it; returns the fields of its `Round`, times left out.

    Args:
        logits: the target's, after the last token of the text and after each token to verify.
    """
    rule, x, sampling = call.rule, to_verify(call, draft), row.sampling
    raw = logits
    if sampling.processors:
        logits = process_block(sampling.processors, row.prefix, x, logits, possible(rule, sampling))
    p = logits if rule is GREEDY else softmax(logits) if rule.at_zero else sampling.law(logits)
    q = draft.q(p) if rule is not GREEDY else None
    n = draw_count(rule.accepted(p, q, x), row.random)
    if rule is GREEDY:
        last = int(p[n].argmax())
        p_x, q_x = [float(i < n) for i in range(len(x))], [1.0] * len(x)
    else:
        last = inverse_cdf(rule.correction(p, q, x, n), row.random.random())
        p_x, q_x = at(p, x), at(q, x)
    return {
        "drafted": x,
        "accepted": n,
        "q": q_x,
        "p": p_x,
        "draft_passes": draft.passes,
        **write(call, row, [*x[:n], last], raw, logits),
    }


def write(call: Call, row: Row, tokens: list[int], raw: torch.Tensor, logits: torch.Tensor) -> dict[str, Any]:
    """Let the row have `tokens`, as far as its text goes; the fields of a `Round` that tell what was written.

    Args:
        raw, logits: the target's before each of the tokens `[>= len(tokens), V]`, as they came and processed.
    """
    emitted = []
    for token in tokens:
        emitted.append(token)
        row.prefix.append(token)
        row.remaining -= 1
        if reason := call.stopping.reason(row.prefix, row.start):
            row.remaining, row.ended = 0, reason
            break
    if not row.remaining:
        row.ended = row.ended or row.at_end
    found: dict[str, Any] = {"row": row.index, "emitted": emitted}
    if call.logprobs:
        new = len(emitted)
        sampling = row.sampling
        drawn_from = logits[:new].log_softmax(-1) if sampling.greedy else sampling.law(logits[:new]).log()
        found |= {"logprobs": at(raw[:new].log_softmax(-1), emitted), "scores": at(drawn_from, emitted)}
    return found


def to_verify(call: Call, draft: Draft) -> list[int]:
    """The draft, or all but its last token where that was only drawn for its law."""
    if not call.rule.next_law:
        return draft.tokens
    if not draft.tokens:
        raise SpecdecError(
            f"{call.rule.name} mixes the draft's law into every token, and the draft had none to give: "
            "use a draft model whose context is as long as the text"
        )
    return draft.tokens[:-1]


def possible(rule: Verifier, sampling: Sampling) -> Callable[[torch.Tensor, int], bool]:
    """Whether a draft token may be kept, seen from the target's logits `[V]` at its position."""
    if not rule.lossless:
        return lambda logits, token: True
    if sampling.greedy:
        return lambda logits, token: int(logits.argmax()) == token
    return lambda logits, token: float(logits[token]) > float("-inf")


def draw_count(law: list, random: Random) -> int:
    """Draw n from its law; no uniform is spent where the law is certain."""
    if len(law) == 1:
        return 0
    u, cumulated = random.random(), 0.0
    total = sum(law)
    for n, probability in enumerate(law):
        cumulated += probability
        if u * total < cumulated:
            return n
    return max(n for n, probability in enumerate(law) if probability > 0)
