"""From a draft and the target's logits to a verdict: how many tokens are kept, and the token that follows.

The verifier's two functions and the draws run on the device.  `bring_home` copies all verdicts of a round to the host
at once, and only there the host waits.  Several drafts of a text are verified level by level; there the host must know
which drafts go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import sampling
from ..distributions import Array, argmax, is_torch, softmax
from ..drafters.base import Draft, bring_all_home
from ..errors import SpecdecError
from ..models.rows import on_device
from ..models.session import class_name
from ..processing import process_block
from ..sampling import SamplingParams, in_float32
from ..verify import Verifier
from ..verify.multidraft import accepted, correction
from ..verify.token import gather_probs

if TYPE_CHECKING:
    from .loop import Plan, Text


@dataclass
class Verdict:
    """The outcome of verification for one text.

    Attributes:
        drafted: the tokens of the draft that was followed.
        accepted: how many of them are kept.
        last: the token after them.
        p, q: the probability of each drafted token under target and draft.
        passes: passes of a draft model.
        logprobs, scores: of the accepted tokens and the last one, if asked for.
        drafts: all drafts of the text, if there are several.
        followed: the index of the draft that was followed.
    """

    drafted: list[int]
    accepted: int
    last: int
    p: list[float]
    q: list[float]
    passes: int
    logprobs: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    followed: int = 0

    @property
    def parted(self) -> bool:
        """Whether another draft of the text differs from the kept tokens."""
        return any(draft[: self.accepted] != self.drafted[: self.accepted] for draft in self.drafts)


@dataclass
class Pending:
    """A verdict whose numbers are still on the device.

    Attributes:
        numbers: name -> float64 `[m]`.
        finish: makes the verdict from the same numbers as lists.
        start: the length of the text.
    """

    numbers: dict[str, torch.Tensor]
    finish: Callable[[dict[str, list[float]]], Verdict]
    start: int


def verify_chain(plan: Plan, text: Text, drafts: Sequence[Draft], logits: Sequence[torch.Tensor]) -> Pending:
    """Verify the one draft of a text.

    Args:
        logits: one tensor `[g + 1, V]`: the target's after the text's last token and after each token to verify.
    """
    rule, params, (draft,), (raw,) = plan.rule, text.params, drafts, logits
    g = len(raw) - 1
    if rule.needs_bonus_draft_probs and not len(draft):
        raise SpecdecError(
            f"{rule.name} mixes the draft's distribution into every token, but the draft gave none: "
            "use a draft model whose context is as long as the text"
        )
    ids = draft.on(raw.device)[:g]
    scores = processed(rule, params, text.tokens, ids, raw)

    # apply the rule: p and q, the number of accepted tokens, the token after them
    p = target_probs(rule, params, scores)
    q = draft.probs_like(p)
    x: Any = ids if rule.on_device else draft.bring_home()[:g]
    counts = rule.accepted(p, q, x)
    n = draw_index(rule, counts, text.random) if g else 0  # an empty draft needs no draw: n is 0
    if (
        not rule.on_device or raw.device.type == "cpu"
    ):  # reading n costs no wait here, and saves sums over the vocabulary
        n = int(n)
    last = draw_index(rule, rule.correction(p, q, x, n), text.random)

    numbers = {"n": as_row(n, raw), "last": as_row(last, raw), "highest": scores.amax(-1).double()}
    if isinstance(draft.tokens, torch.Tensor):
        numbers["drafted"] = draft.on(raw.device).double()
    if not rule.point_mass:
        numbers |= {"p": gather_probs(p, ids), "q": gather_probs(q, ids)}
    if draft.probs is not None:
        numbers["sums"] = q.sum(-1).double()
    if plan.logprobs:
        here = torch.arange(g + 1, device=raw.device) == numbers["n"]
        path = numbers["last"].long().where(here, torch.cat([ids, ids.new_zeros(1)]))
        numbers |= logprobs(params, raw, scores, path)

    def finish(found: dict[str, list[float]]) -> Verdict:
        if "drafted" in found:
            draft.tokens = [int(token) for token in found["drafted"]]  # the drafter reads them in the next round
        tokens = draft.bring_home()[:g]
        kept = int(found["n"][0])
        p_x = found.get("p", [float(i < kept) for i in range(g)])
        q_x = found.get("q", [1.0] * g)
        asked = found.get("logprobs", []), found.get("scores", [])
        return Verdict(tokens, kept, int(found["last"][0]), p_x, q_x, draft.passes, *asked)

    return Pending(numbers, finish, len(text.tokens))


def verify_several(plan: Plan, text: Text, drafts: Sequence[Draft], logits: Sequence[torch.Tensor]) -> Pending:
    """Verify several drafts of a text that were drawn independently of each other: recursive rejection.

    At each level, the next tokens of the drafts that agree with the kept tokens are candidates from one distribution,
    tried in order (`verify.multidraft`).  If a token is kept, all drafts with that token go on; if none is kept, the
    last token is drawn from the residual of the target's distribution.  The output distribution is the target's.  With
    one draft this is the token rule.

    SpecInfer's multi-step sampling (arXiv 2305.09781).  The host waits at each level.
    """
    params = text.params
    tokens = bring_all_home(drafts)
    scores = [
        processed(plan.rule, params, text.tokens, draft.on(raw.device), raw)
        for draft, raw in zip(drafts, logits, strict=True)
    ]
    p = [params.probs(each) for each in scores]
    q = [draft.probs_like(each) for draft, each in zip(drafts, p, strict=True)]
    followed, n, last = follow(p, q, tokens, text.random)
    x, raw = tokens[followed], logits[followed]
    numbers = {"last": as_row(last, raw), "highest": torch.cat([each.amax(-1).double() for each in scores])}
    numbers |= {"p": gather_probs(p[followed], x), "q": gather_probs(q[followed], x)}
    drawn = [probs for draft, probs in zip(drafts, q, strict=True) if draft.probs is not None]
    if sums := [probs.sum(-1).double() for probs in drawn]:
        numbers["sums"] = torch.cat(sums)
    if plan.logprobs:
        path = torch.cat([on_device(x[:n], raw.device), numbers["last"].long()])
        numbers |= logprobs(params, raw[: n + 1], scores[followed][: n + 1], path)

    def finish(found: dict[str, list[float]]) -> Verdict:
        return Verdict(
            x, n, int(found["last"][0]), found["p"], found["q"], sum(draft.passes for draft in drafts),
            found.get("logprobs", []), found.get("scores", []), tokens, followed,
        )  # fmt: skip

    return Pending(numbers, finish, len(text.tokens))


def follow(
    p: Sequence[Array], q: Sequence[Array], drafts: Sequence[Sequence[int]], random: Random
) -> tuple[int, int, Any]:
    """The index of the followed draft, how many of its tokens are kept, and the token after them.

    The followed draft is the longest of those that begin with all kept tokens, and the first of equally long ones.

    Args:
        p: for each draft the target's distributions `[g + 1, V]`; equal where drafts begin with the same tokens.
        q: for each draft the distributions `[g, V]` that its tokens were drawn from.
        drafts: their tokens; a draft's length may depend on its tokens.
        random: two drafts of one token take two numbers, one for the kept token and one for the last token.

    Both drafts propose 0, which the target never writes, so the last token is drawn from the residual:

    >>> p, q = np.array([[0.0, 1.0]] * 2), np.array([[0.5, 0.5]])
    >>> follow([p, p], [q, q], [[0], [0]], Random(0))
    (0, 0, 1)
    >>> follow([p, p], [q, q], [[0], [1]], Random(0))  # 1 is kept as the second candidate, and a bonus follows
    (1, 1, 1)
    """
    here, n = list(range(len(drafts))), 0
    while True:
        tried = [i for i in here if len(drafts[i]) > n]
        node, probs, candidates = p[here[0]][n], [q[i][n] for i in tried], [drafts[i][n] for i in tried]
        kept = 0
        if tried:
            chances = accepted(node, probs, candidates)
            kept = int(sampling.draw(chances if is_torch(chances) else np.array(chances, float), random))
        if kept == len(tried):
            last = sampling.draw(correction(node, probs, candidates), random)
            return max(here, key=lambda i: len(drafts[i])), n, last
        here = [i for i in tried if drafts[i][n] == candidates[kept]]
        n += 1


def bring_home(pending: Sequence[Pending], drafter: Any, target: Any) -> list[Verdict]:
    """The verdicts, copied in one transfer; refuses logits that are not finite, and q that do not sum to 1."""
    flat = torch.cat([numbers for each in pending for numbers in each.numbers.values()]).tolist()
    found, at = [], 0
    for each in pending:
        numbers: dict[str, list[float]] = {}
        for name, values in each.numbers.items():
            numbers[name] = flat[at : at + len(values)]
            at += len(values)
        for position, value in enumerate(numbers["highest"], each.start):
            if not math.isfinite(value):
                raise SpecdecError(
                    f"{class_name(target)} gave logits whose largest is {value} after {position} tokens: its weights "
                    "are damaged, or its dtype overflows (try float32 or bfloat16)"
                )
        if wrong := [value for value in numbers.get("sums", []) if not abs(value - 1) < 1e-2]:
            raise SpecdecError(
                f"{type(drafter).__name__} reports probabilities that sum to {wrong[0]:.4g}, not 1: return the "
                "distribution that each token was drawn from, not its logarithm"
            )
        found.append(each.finish(numbers))
    return found


def processed(
    rule: Verifier, params: SamplingParams, text: list[int], ids: torch.Tensor, raw: torch.Tensor
) -> torch.Tensor:
    """The target's logits `[g + 1, V]` with the processors applied, each position with its own history."""
    if not params.processors:
        return raw
    return process_block(params.processors, text, ids.tolist(), raw, possible(rule, params))


def possible(rule: Verifier, params: SamplingParams) -> Callable[[torch.Tensor, int], bool]:
    """A function of the target's logits `[V]` at a position and the draft token: whether it may be kept."""
    if not rule.lossless:
        return lambda logits, token: True
    if params.greedy:
        return lambda logits, token: int(logits.argmax()) == token
    return lambda logits, token: float(logits[token]) > float("-inf")


def target_probs(rule: Verifier, params: SamplingParams, scores: torch.Tensor) -> torch.Tensor:
    """The `p` of the rule: logits for a point mass rule, temperature 1 for some rules of greedy decoding."""
    if rule.point_mass:
        return scores
    return softmax(in_float32(scores)) if rule.greedy_from_target_probs else params.probs(scores)


def draw_index(rule: Verifier, probs: Any, random: Random) -> Any:
    """An index drawn from a list or vector of probabilities; for a point mass the index of its 1."""
    if not is_torch(probs):
        probs = np.array(probs, float)
    return argmax(probs) if rule.point_mass else sampling.draw(probs, random)


def as_row(number: Any, like: torch.Tensor) -> torch.Tensor:
    """A number or a tensor `[]` as float64 `[1]`, on the device of `like`."""
    if isinstance(number, torch.Tensor):
        return number.double().reshape(1)
    return on_device([number], like.device, torch.float64)


def logprobs(
    params: SamplingParams, raw: torch.Tensor, scores: torch.Tensor, path: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Log-probabilities of the tokens `path` `[m]`: in the target's own distribution, and in the sampled one."""
    drawn = in_float32(scores).log_softmax(-1) if params.greedy else params.probs(scores).log()
    return {
        "logprobs": gather_probs(in_float32(raw).log_softmax(-1), path),
        "scores": gather_probs(drawn, path),
    }
