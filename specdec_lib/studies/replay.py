"""A draft-length policy held against constants, without a clock: decoding replayed on what a drafter met.

A lossless decoder writes the target's own text, so a text tells what a draft that starts at any of its tokens would
have come to: how long it becomes, and how many of its tokens are kept.  With the costs given, every rule can be played
on the same texts, and what differs is the rule alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ..decode.draft_length import DraftLengthPolicy
from ..decode.results import Round
from ..drafters import SamplingParams, as_drafter


@dataclass(frozen=True)
class Met:
    """A text as a drafter met it: for a draft that starts at each of its tokens,

    Attributes:
        offered: how many tokens it has if as many as possible are asked for.
        kept: how many of them the target keeps, at most what is left of the text.
        by_model: whether a model drafted it; a copy costs nothing.
    """

    offered: list[int]
    kept: list[int]
    by_model: list[bool]


def meet(drafter: Any, vocabulary: int, ids: Sequence[int], text: Sequence[int], longest: int) -> Met:
    """What a drafter proposes along the target's greedy text.

    Args:
        drafter: a drafter or a draft model; none that reads the target's states.
        vocabulary: of the target.
        ids, text: the prompt and the target's text.
        longest: tokens asked for at each start.
    """
    session = as_drafter(drafter).start(vocabulary)
    met = Met([], [], [])
    for start in range(len(text)):
        draft = session.propose([*ids, *text[:start]], longest, SamplingParams(), Random(0))
        agreed = [x == y for x, y in zip(draft.bring_home(), text[start:], strict=False)]
        met.offered.append(len(draft.tokens))
        met.kept.append((*agreed, False).index(False))
        met.by_model.append(draft.passes > 0)
    return met


def replay(
    policy: DraftLengthPolicy, texts: Sequence[Met], draft_cost: float, pass_cost: Callable[[int], float]
) -> tuple[float, list[Round]]:
    """Tokens per unit of time of one call that decodes these texts in turn, and its rounds.

    Args:
        policy: for the draft length.
        texts: see `Met`.
        draft_cost: time of a token that a model drafts.
        pass_cost: time of a target pass by its number of positions, with all that belongs to a round.

    >>> from specdec_lib.decode.draft_length import Constant
    >>> text = Met(offered=[4] * 6, kept=[2, 1, 0, 2, 1, 0], by_model=[True] * 6)
    >>> speed, rounds = replay(Constant(2), [text], draft_cost=0.1, pass_cost=lambda n: 1.0)
    >>> speed, [done.accepted for done in rounds]  # two rounds of 3 tokens, each of 1.2 units
    (2.5, [2, 2])
    """
    state = policy.start()
    rounds = []
    for row, met in enumerate(texts):
        at, length = 0, len(met.offered)
        while at < length:
            drafted = min(state.next(row, length - at - 1), length - at - 1, met.offered[at])
            accepted = min(met.kept[at], drafted)
            draft = drafted * draft_cost * met.by_model[at]
            target = pass_cost(drafted + 1)
            tokens = [0] * accepted + [1]
            done = Round(row, [0] * drafted, accepted, tokens, [], [], drafted, draft, target, draft + target)
            state.update(done)
            rounds.append(done)
            at += accepted + 1
    return sum(len(done.emitted) for done in rounds) / sum(done.seconds for done in rounds), rounds
