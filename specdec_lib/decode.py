"""The two loops: plain decoding, one token a target pass, and speculative decoding, several.

A round of the speculative loop: the drafter proposes `(draft, q)`, the target scores all of it in one pass (`p`),
the verifier gives the law of the number of accepted tokens and of the token that follows, one draw from each.
Between rounds the target's session holds the whole text but its last token, which is fed with the next draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any

import torch

from .distributions import inverse_cdf
from .drafters import Drafter, Sampling, as_drafter
from .errors import SpecdecError
from .models.pair import Pair, context_length, end_tokens, vocabulary_size
from .models.session import open_session
from .verify import VERIFIERS, Verifier, get_verifier
from .verify.token import at

TOKEN, GREEDY = VERIFIERS["token"], VERIFIERS["greedy"]


@dataclass(frozen=True)
class Round:
    """One target pass and what came of it.

    Attributes:
        row: index of the prompt.
        drafted: the proposed tokens.
        accepted: how many of them the verifier kept, 0 to `len(drafted)`.
        emitted: the tokens that joined the text: the accepted ones and one more, less what was trimmed at the end.
        q: the draft's probability of each drafted token (1 where the draft was certain).
        p: the target's probability of each drafted token (0 or 1 at temperature 0).
        draft_passes: how often a draft model ran.
        draft_seconds, target_seconds, seconds: time in the drafter, in the target's pass, and of the whole round.
    """

    row: int
    drafted: list[int]
    accepted: int
    emitted: list[int]
    q: list[float]
    p: list[float]
    draft_passes: int
    draft_seconds: float
    target_seconds: float
    seconds: float

    @property
    def trimmed(self) -> int:
        """How many tokens of the round lay past the end of the text and were dropped."""
        return self.accepted + 1 - len(self.emitted)

    @property
    def kept(self) -> int:
        """How many draft tokens joined the text."""
        return min(self.accepted, len(self.emitted))

    @property
    def rejected(self) -> int:
        """1 if a draft token was tested and refused before the text ended, else 0."""
        return int(self.accepted < len(self.drafted) and not self.trimmed)


@dataclass(frozen=True)
class Stats:
    """The accounting of a run, summed over its rounds.

    Identities, asserted in the tests: `sum(histogram) = rounds`; `emitted = accepted + rounds - trimmed`;
    `drafted = ` the sum of the drafts' lengths.

    Attributes:
        rounds: target passes that ended in a draw, one a round; `target_passes` is the same number.
        emitted: new tokens.
        drafted: proposed tokens.
        accepted: proposed tokens that the verifier kept.
        kept: those of them that joined the text (fewer where an end-of-sequence token cut a round).
        rejected: proposed tokens that were tested and refused; what follows a refused token was never tested.
        trimmed: tokens dropped because they lay past the end.
        draft_passes: passes of a draft model.
        prefill_passes: target passes over prompts, which emit nothing.
        histogram: `histogram[n]` rounds accepted `n` tokens.
        draft_seconds, target_seconds, seconds: time in the drafter, in the target, in all (prefill included).
    """

    rounds: int
    emitted: int
    drafted: int
    accepted: int
    kept: int
    rejected: int
    trimmed: int
    draft_passes: int
    prefill_passes: int
    histogram: list[int]
    draft_seconds: float
    target_seconds: float
    seconds: float

    @property
    def target_passes(self) -> int:
        return self.rounds

    @property
    def acceptance_rate(self) -> float:
        """Estimate of the paper's alpha: kept / (kept + rejected), over draft tokens that were tested.

        NaN where nothing was tested.
        """
        tested = self.kept + self.rejected
        return self.kept / tested if tested else float("nan")

    @property
    def accepted_per_drafted(self) -> float:
        """Accepted / drafted, the number that many tools call acceptance rate; it falls with gamma, alpha does not."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def block_efficiency(self) -> float:
        """Emitted tokens per target pass, the correction or bonus token included."""
        return self.emitted / self.rounds if self.rounds else float("nan")

    @property
    def tokens_per_second(self) -> float:
        return self.emitted / self.seconds if self.seconds else float("nan")


@dataclass(frozen=True)
class Generation:
    """The result of `generate` or `generate_plain`.

    Attributes:
        texts: the new text of each prompt (empty strings where the pair has no tokenizer).
        tokens: the new ids of each prompt, an end-of-sequence token included.
        trace: every round of every prompt, in order.
        stats: the sums.
    """

    texts: list[str]
    tokens: list[list[int]]
    trace: list[Round]
    stats: Stats


@dataclass
class _Row:
    """One text on its way."""

    index: int
    prefix: list[int]
    remaining: int
    random: Random
    tokens: list[int] = field(default_factory=list)


def generate(
    pair: Pair,
    prompts: Any,
    gamma: int = 5,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    verifier: str | Verifier = "token",
    seed: int = 0,
    eos: list[int] | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> Generation:
    """Decode speculatively: the draft proposes up to `gamma` tokens a round, the target verifies them in one pass.

    Args:
        pair: target, draft, tokenizer.
        prompts: a text, a list of texts, chat messages, a list of those, ids, or a tensor of ids.
        gamma: draft length, >= 1.  The last rounds draft less: never more than can still be used.
        max_new_tokens: >= 0; exactly so many unless an end-of-sequence token comes first.
        temperature, top_k, top_p, min_p: see `Sampling`; the same for target and draft.
        verifier: a name in `specdec_lib.verify.VERIFIERS`, or a `Verifier`.
        seed: of a generator of its own; row `i` draws from stream `(seed, i)`, so that a text does not depend on
            its neighbours.  The same seed gives the same text; plain decoding with it draws another one.
        eos: ids that end a text; None takes the model's, `[]` runs to `max_new_tokens`.
        on_round: called after each round, for example to show it.

    Raises:
        SpecdecError: for input that cannot be used, before any decoding.
    """
    if pair.draft is None:
        raise SpecdecError("this pair has no draft: set Pair(draft=...), or call generate_plain")
    check_lengths(gamma, max_new_tokens)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    rule = get_verifier(verifier)
    if rule is GREEDY and not sampling.greedy:
        raise SpecdecError(
            "the greedy verifier decodes the most probable token: set temperature=0, or use verifier='token'"
        )
    if rule is TOKEN and sampling.greedy:
        rule = GREEDY  # the same law at temperature 0, without computing probabilities
    drafter = as_drafter(pair.draft)
    return _run(pair, prompts, drafter, gamma, max_new_tokens, sampling, rule, seed, eos, on_round)


def generate_plain(
    pair: Pair,
    prompts: Any,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    eos: list[int] | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> Generation:
    """Decode one token a target pass: the baseline of the same target.  Arguments as in `generate`."""
    check_lengths(1, max_new_tokens)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    rule = GREEDY if sampling.greedy else TOKEN
    return _run(pair, prompts, None, 0, max_new_tokens, sampling, rule, seed, eos, on_round)


def check_lengths(gamma: int, max_new_tokens: int) -> None:
    """Refuse a draft length below 1 and a negative number of tokens."""
    if isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 1:
        raise SpecdecError(
            f"gamma must be a whole number >= 1, got {gamma!r}: use generate_plain to decode without drafts"
        )
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise SpecdecError(f"max_new_tokens must be a whole number >= 0, got {max_new_tokens!r}")


def _run(
    pair: Pair,
    prompts: Any,
    drafter: Drafter | None,
    gamma: int,
    max_new_tokens: int,
    sampling: Sampling,
    rule: Verifier,
    seed: int,
    eos: list[int] | None,
    on_round: Callable[[Round], None] | None,
) -> Generation:
    encoded = [pair.encode(p) for p in as_list(prompts)]
    limit = context_length(pair.target)
    for ids in encoded:
        if len(ids) + max_new_tokens > limit:
            raise SpecdecError(
                f"a prompt of {len(ids)} tokens and {max_new_tokens} new ones exceed the target's context of {limit}: "
                "shorten the prompt or lower max_new_tokens"
            )
    ends = set(end_tokens(pair) if eos is None else eos)
    start = perf_counter()
    trace: list[Round] = []
    rows = []
    prefills = 0
    for index, ids in enumerate(encoded):
        row = _Row(index, list(ids), max_new_tokens, Random(f"{seed}/{index}"))
        prefills += len(ids) > 1 and max_new_tokens > 0
        for done in _rounds(pair.target, drafter, row, gamma, sampling, rule, ends):
            trace.append(done)
            if on_round is not None:
                on_round(done)
        rows.append(row)
    seconds = perf_counter() - start
    tokens = [row.tokens for row in rows]
    decode = getattr(pair.tokenizer, "decode", lambda ids, **_: "")
    texts = [decode(t, skip_special_tokens=True) for t in tokens]
    return Generation(texts, tokens, trace, summarise(trace, prefills, seconds))


def _rounds(
    target: Any,
    drafter: Drafter | None,
    row: _Row,
    gamma: int,
    sampling: Sampling,
    rule: Verifier,
    ends: set[int],
) -> Iterator[Round]:
    """Decode one row, yielding each round."""
    if row.remaining == 0:
        return
    session = open_session(target, capacity=len(row.prefix) + row.remaining)
    draft_session = drafter.start(vocabulary_size(target)) if drafter is not None else None
    device = session.device
    if len(row.prefix) > 1:
        session.feed(torch.tensor([row.prefix[:-1]], device=device), last=0)
    while row.remaining:
        start = perf_counter()
        longest = min(gamma, row.remaining - 1)  # a round emits one token more than it accepts
        if draft_session is not None and longest > 0:
            draft = draft_session.propose(row.prefix, longest, sampling, row.random)
            x, passes = draft.tokens, draft.passes
        else:
            draft, x, passes = None, [], 0
        drafted = perf_counter()
        logits = session.feed(torch.tensor([[row.prefix[-1], *x]], device=device), last=len(x) + 1)[0]
        scored = perf_counter()

        p = logits if rule is GREEDY else sampling.law(logits)
        q = draft.q(p) if draft is not None and rule is not GREEDY else None
        accepted_law = rule.accepted(p, q, x)
        n = _draw_count(accepted_law, row.random)
        if rule is GREEDY:
            last = int(p[n].argmax())
            p_x, q_x = [float(i < n) for i in range(len(x))], [1.0] * len(x)
        else:
            last = inverse_cdf(rule.correction(p, q, x, n), row.random.random())
            p_x, q_x = at(p, x), at(q, x) if q is not None else []

        emitted = [*x[:n], last]
        cut = next((i + 1 for i, token in enumerate(emitted) if token in ends), None)
        row.remaining = 0 if cut else row.remaining - len(emitted)
        emitted = emitted[:cut]
        row.tokens += emitted
        row.prefix += emitted
        session.rollback(min(session.length, len(row.prefix) - 1))
        end = perf_counter()
        yield Round(
            row.index, x, n, emitted, q_x, p_x, passes, drafted - start, scored - drafted, end - start
        )  # fmt: skip


def _draw_count(law: list, random: Random) -> int:
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


def summarise(trace: list[Round], prefill_passes: int = 0, seconds: float = float("nan")) -> Stats:
    """Sum a trace."""
    histogram = [0] * (max((r.accepted for r in trace), default=0) + 1)
    for r in trace:
        histogram[r.accepted] += 1
    total = lambda get: sum(get(r) for r in trace)  # noqa: E731
    return Stats(
        rounds=len(trace),
        emitted=total(lambda r: len(r.emitted)),
        drafted=total(lambda r: len(r.drafted)),
        accepted=total(lambda r: r.accepted),
        kept=total(lambda r: r.kept),
        rejected=total(lambda r: r.rejected),
        trimmed=total(lambda r: r.trimmed),
        draft_passes=total(lambda r: r.draft_passes),
        prefill_passes=prefill_passes,
        histogram=histogram if trace else [],
        draft_seconds=total(lambda r: r.draft_seconds),
        target_seconds=total(lambda r: r.target_seconds),
        seconds=seconds,
    )


def as_list(prompts: Any) -> list:
    """A list of prompts from one prompt or several."""
    if isinstance(prompts, torch.Tensor):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (list, tuple)) and prompts:
        if isinstance(prompts[0], (int, dict)):
            return [list(prompts)]
        return list(prompts)
    raise SpecdecError("no prompt: give a text, chat messages, token ids, or a list of them")
