"""Several drafts of one text: chains drawn independently of each other, verified together by recursive rejection.

A round: the drafter proposes `k` chains for the same prefix, the target scores all of them in one pass, as rows of a
batch that hold the same text.  From level to level, the next tokens of the chains that go on are candidates drawn
from the same law, and tried in order (`verify.multidraft`).  A kept token keeps all chains that have it there; where
none is kept the law that is left gives the last token.  So no chain is ever tested against what another one was kept
for, and the output law is the target's.  With one chain this is the token rule.  Then all rows go on from the chain
that was followed.

SpecInfer's multi-step sampling (arXiv 2305.09781), on chains that were drawn independently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from time import perf_counter
from typing import Any

import torch

from .distributions import Array, inverse_cdf
from .drafters.base import Draft, Drafter, Sampling, reads_target, start_rows
from .errors import SpecdecError
from .models.batch import open_batch
from .models.pair import vocabulary_size
from .processing import process_block
from .results import Round
from .rounds import Call, Row, draw_count, possible, write
from .verify import VERIFIERS, Verifier
from .verify.multidraft import accepted, correction
from .verify.token import at


def check_several(drafter: Drafter, sampling: Sampling, rule: Verifier, batch_size: int) -> None:
    """Refuse what several drafts cannot be combined with."""
    name = type(drafter).__name__
    if sampling.greedy:
        raise SpecdecError("at temperature 0 all drafts are the same one: leave out drafts, or set temperature above 0")
    if rule is not VERIFIERS["token"]:
        raise SpecdecError(f"several drafts have a rule of their own, not {rule.name!r}: leave out verifier or drafts")
    if batch_size != 1:
        raise SpecdecError("several drafts of one text are a batch already: leave out batch_size or drafts")
    if getattr(drafter, "one_text", False):
        raise SpecdecError(f"{name} drafts in the target's own session, one chain at a time: leave out drafts")
    if getattr(drafter, "certain", False):
        raise SpecdecError(f"{name} leaves nothing to chance, all its drafts are the same one: leave out drafts")


def decode_several(call: Call, row: Row, drafts: int) -> Iterator[Round]:
    """Decode one text with so many drafts a round, yielding each round."""
    if not row.remaining:
        return
    assert call.drafter is not None
    start = perf_counter()
    batch = open_batch(call.target, 1, len(row.prefix) + row.remaining)
    repeated = reads_target(call.drafter)  # such a drafter starts with the target, and its row is repeated with it
    drafting = start_rows(call.drafter, 1 if repeated else drafts, vocabulary_size(call.target), batch)
    if len(row.prefix) > 1:
        batch.feed([row.prefix[:-1]], [0])
    batch.keep([0] * drafts)
    if repeated:
        drafting.keep([0] * drafts)
    row.read_seconds = perf_counter() - start
    while row.remaining:
        start = perf_counter()
        gamma = min(call.schedule.next(row.index), row.remaining - 1)
        # the chains draw from one stream, one after the other: that makes them independent
        chains = drafting.propose(
            [row.prefix] * drafts, [gamma] * drafts, [row.sampling] * drafts, [row.random] * drafts
        )
        drafted = perf_counter()
        blocks = [[row.prefix[-1], *chain.tokens] for chain in chains]
        logits = batch.feed(blocks, [len(block) for block in blocks])
        scored = perf_counter()
        followed, found = settle(call, row, chains, logits)
        shared = chains[followed].tokens[: found["accepted"]]
        if any(chain.tokens[: len(shared)] != shared for chain in chains):
            batch.keep([followed] * drafts)
        batch.rollback([len(row.prefix) - 1] * drafts)
        done = Round(
            **found,
            draft_seconds=drafted - start,
            target_seconds=scored - drafted,
            seconds=perf_counter() - start,
        )
        call.schedule.update(done)
        yield done


def settle(call: Call, row: Row, chains: Sequence[Draft], logits: Sequence[torch.Tensor]) -> tuple[int, dict[str, Any]]:
    """Verify the chains and let the row have what comes of it; which chain was followed, and the fields of its `Round`.

    Args:
        logits: the target's, for each chain as in `rounds.settle`.
    """
    sampling, raw = row.sampling, logits
    if sampling.processors:
        asked = possible(call.rule, sampling)
        logits = [
            process_block(sampling.processors, row.prefix, chain.tokens, of_chain, asked)
            for chain, of_chain in zip(chains, logits, strict=True)
        ]
    p = [sampling.law(of_chain) for of_chain in logits]
    q = [chain.q(of_chain) for chain, of_chain in zip(chains, p, strict=True)]
    tokens = [chain.tokens for chain in chains]
    followed, n, last = follow(p, q, tokens, row.random)
    x = tokens[followed]
    return followed, {
        "drafted": x,
        "accepted": n,
        "q": at(q[followed], x),
        "p": at(p[followed], x),
        "draft_passes": sum(chain.passes for chain in chains),
        "drafts": tokens,
        **write(call, row, [*x[:n], last], raw[followed], logits[followed]),
    }


def follow(
    p: Sequence[Array], q: Sequence[Array], drafts: Sequence[Sequence[int]], random: Random
) -> tuple[int, int, int]:
    """Which draft is followed, how many of its tokens are kept, and the token after them.

    Of the drafts that have all kept tokens, the longest is the one that was followed, the first of equals.

    Args:
        p: for each draft the target's laws `[g + 1, V]`; equal where drafts begin with the same tokens.
        q: for each draft the laws `[g, V]` that its tokens were drawn from.
        drafts: their tokens; how many may depend on the tokens themselves.
        random: two drafts of one token take two numbers, one for what is kept and one for the last token.

    Both drafts say 0, which the target never writes, so what is left of it is drawn:

    >>> import numpy as np
    >>> p, q = np.array([[0.0, 1.0]] * 2), np.array([[0.5, 0.5]])
    >>> follow([p, p], [q, q], [[0], [0]], Random(0))
    (0, 0, 1)
    >>> follow([p, p], [q, q], [[0], [1]], Random(0))  # 1 is kept as the second candidate, and a bonus follows
    (1, 1, 1)
    """
    here, n = list(range(len(drafts))), 0
    while True:
        tried = [i for i in here if len(drafts[i]) > n]
        node, laws, candidates = p[here[0]][n], [q[i][n] for i in tried], [drafts[i][n] for i in tried]
        kept = draw_count(accepted(node, laws, candidates), random)
        if kept == len(tried):
            last = inverse_cdf(correction(node, laws, candidates), random.random())
            return max(here, key=lambda i: len(drafts[i])), n, last
        here = [i for i in tried if drafts[i][n] == candidates[kept]]
        n += 1
