"""Several settings of our decoder over the same prompts, in turns: draft lengths, text lengths, drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from ..decode import Generation, generate, generate_plain
from ..errors import SpecdecError
from ..models.pair import Pair
from .costs import Estimate
from .speed import ratio_of_totals

Arm = TypeVar("Arm", bound=Hashable)


def in_turns(
    pair: Pair,
    prompts: Sequence[Any],
    arms: Mapping[Arm, Mapping[str, Any]],
    seed: int = 0,
    between: Callable[[Any, Generation], Any] | None = None,
    **options: Any,
) -> dict[Arm, list[Generation]]:
    """Decode each prompt with every arm, in an order that is shuffled anew for each prompt.

    A slow minute of the machine so meets all arms, and none always follows the same other one.  Each arm decodes a few
    tokens after the end of the first prompt before any clock runs.

    Args:
        pair: target and draft, and the tokenizer or not.
        prompts: token ids; or lists of prompts, each decoded together (`batch_size`).
        arms: what distinguishes the arms: options of `generate`, and `draft`, where it is not the pair's own.  An arm
            without `gamma` decodes one token a pass.
        seed: of the order, and of every draw.
        between: called after each prompt with its ids and its first arm's result, for measurements in between.
        options: of `generate` and `generate_plain`, the same for all arms.

    Returns:
        The results of each arm, one a prompt.

    Raises:
        SpecdecError: no prompt, no arm; otherwise as `generate`.
    """
    if not prompts or not arms:
        raise SpecdecError("nothing to compare: give at least one prompt and one arm")

    def decode(ids: Any, arm: Arm, **more: Any) -> Generation:
        own = {"seed": seed, **options, **arms[arm], **more}
        with_draft = Pair(pair.target, own.pop("draft", pair.draft), pair.tokenizer)
        return (generate if "gamma" in own else generate_plain)(with_draft, ids, **own)

    for arm in arms:
        decode(prompts[0][-16:], arm, max_new_tokens=4)
    order = random.Random(seed)
    found: dict[Arm, list[Generation]] = {arm: [] for arm in arms}
    for ids in prompts:
        for arm in order.sample(list(arms), len(arms)):
            found[arm].append(decode(ids, arm))
        if between is not None:
            between(ids, found[next(iter(arms))][-1])
    return found


def speedup(slow: Sequence[Generation], fast: Sequence[Generation], seed: int = 0) -> Estimate:
    """How many times as fast `fast` is as `slow` on the same prompts: a ratio of total seconds with its interval."""
    return ratio_of_totals([g.stats.seconds for g in slow], [g.stats.seconds for g in fast], seed)
