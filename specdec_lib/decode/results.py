"""What decoding returns: every round, the sums over them, and the texts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from ..errors import SpecdecError

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Round:
    """One target pass over one text, with its draft and its result.

    Attributes:
        row: index of the prompt.
        drafted: the draft tokens; with several drafts, those of the draft that was followed.
        accepted: how many of them the verifier kept, 0 to `len(drafted)`.
        emitted: the tokens that joined the text: the accepted ones and one more, without those trimmed at the end.
        q: the draft's probability of each drafted token (1 if the draft was deterministic).
        p: the target's probability of each drafted token (0 or 1 at temperature 0).
        draft_passes: how often a draft model ran; for several drafts, once for each of them.
        draft_seconds, target_seconds, seconds: time in the drafter, in the target's pass, and of the whole round;
            an equal share if several rows were decoded together.
        logprobs, scores: see `Generation`; empty unless asked for.
        drafts: all drafts of the round, in the order in which they were tried; empty if there was only one.
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
    logprobs: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)

    @property
    def trimmed(self) -> int:
        """How many tokens of the round were after the end of the text and were dropped."""
        return self.accepted + 1 - len(self.emitted)

    @property
    def kept(self) -> int:
        """How many draft tokens joined the text.

        One more than `accepted` if the token that follows is the next draft token: `ensemble(w, "none")` keeps the last
        draft token in this way.
        """
        n = min(self.accepted, len(self.emitted))
        return n + (self.drafted[n : n + 1] == self.emitted[n : n + 1] != [])

    @property
    def rejected(self) -> int:
        """1 if the round ended with a rejected draft token (with several drafts, all tried tokens), else 0."""
        return int(self.kept < len(self.drafted) and not self.trimmed)

    @property
    def rescued(self) -> int:
        """How many kept tokens were not the first tried at their position: another draft's was rejected before."""
        count = 0
        for n in range(self.kept if self.drafts else 0):
            tried = (draft[n] for draft in self.drafts if len(draft) > n and draft[:n] == self.drafted[:n])
            count += next(tried) != self.drafted[n]
        return count


@dataclass(frozen=True)
class Stats:
    """Counts and times of a run, summed over its rounds.

    Identities, asserted in the tests: `sum(histogram) = rounds`; `emitted = accepted + rounds - trimmed`;
    `drafted = ` the sum of the drafts' lengths.

    Attributes:
        rounds: target passes that emitted tokens, one a round; `target_passes` is the same number.  A pass over several
            texts counts once for each text; a pass over several drafts of a text counts once.
        emitted: new tokens.
        drafted: draft tokens, of all drafts.
        accepted: draft tokens that the verifier kept.
        kept: draft tokens that joined the text (fewer if an end-of-sequence token cut a round).
        rejected: rounds that ended with a rejected token; tokens after a rejected one were never tested.
        rescued: kept tokens at whose position another draft's token was rejected before; 0 with one draft.
        trimmed: tokens that were dropped because they came after the end of the text.
        draft_passes: passes of a draft model.
        prefill_passes: target passes over prompts, which emit nothing.
        histogram: `histogram[n]` rounds accepted `n` tokens.
        draft_seconds, target_seconds, seconds: time in the drafter, in the target, and in total (prefill included).
    """

    rounds: int
    emitted: int
    drafted: int
    accepted: int
    kept: int
    rejected: int
    rescued: int
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

        With several drafts it counts the first token tried at each position: (kept - rescued) / (kept + rejected).  The
        next candidates are tested against a residual, not the target's distribution, and count in `block_efficiency`
        only.  NaN if nothing was tested.
        """
        tested = self.kept + self.rejected
        return (self.kept - self.rescued) / tested if tested else float("nan")

    @property
    def accepted_per_drafted(self) -> float:
        """Accepted / drafted, which many tools call acceptance rate; unlike alpha it falls when gamma grows."""
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
        texts: the new text of each prompt, without the stop string that ended it (empty strings if the pair has no
            tokenizer).
        tokens: the new ids of each prompt, an end-of-sequence token included, a stop string's tokens too.
        trace: every round of every prompt, in order.
        stats: the sums.
        rows: the sums of each prompt; its `seconds` are those of its prefill and its rounds.
        ended: why each text ended: "end token", "stop string", "criterion", "length", or "context" if the
            target's context is full.
    """

    texts: list[str]
    tokens: list[list[int]]
    trace: list[Round]
    stats: Stats
    rows: list[Stats] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    @property
    def logprobs(self) -> list[list[float]]:
        """Per prompt and new token: log-probability in the target's own distribution (temperature 1, no processors)."""
        return self._of_each_token("logprobs")

    @property
    def scores(self) -> list[list[float]]:
        """Per prompt and new token: log-probability in the distribution after processors, temperature and truncation.

        At temperature 0 that distribution is a point mass, so temperature 1 is used.
        """
        return self._of_each_token("scores")

    def _of_each_token(self, name: str) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in self.tokens]
        for r in self.trace:
            found[r.row] += getattr(r, name)
        if any(len(a) < len(b) for a, b in zip(found, self.tokens, strict=True)):
            raise SpecdecError(f"{name} were not asked for: decode with logprobs=True")
        return found

    def frame(self) -> pandas.DataFrame:
        """The trace as a pandas frame, one line a round.

        Columns: the fields of `Round`, `round` (counted in its row), and `kept`, `rejected`, `rescued`, `trimmed`.
        """
        import pandas

        columns = [f.name for f in fields(Round)] + ["kept", "rejected", "rescued", "trimmed"]
        frame = pandas.DataFrame([[getattr(r, c) for c in columns] for r in self.trace], columns=columns)
        frame.insert(1, "round", frame.groupby("row").cumcount())
        return frame


def summarise(trace: list[Round], prefill_passes: int = 0, seconds: float = float("nan")) -> Stats:
    """Sum a trace."""
    histogram = [0] * (max((r.accepted for r in trace), default=0) + 1)
    for r in trace:
        histogram[r.accepted] += 1
    total = lambda get: sum(get(r) for r in trace)  # noqa: E731
    return Stats(
        rounds=len(trace),
        emitted=total(lambda r: len(r.emitted)),
        drafted=total(lambda r: sum(map(len, r.drafts or [r.drafted]))),
        accepted=total(lambda r: r.accepted),
        kept=total(lambda r: r.kept),
        rejected=total(lambda r: r.rejected),
        rescued=total(lambda r: r.rescued),
        trimmed=total(lambda r: r.trimmed),
        draft_passes=total(lambda r: r.draft_passes),
        prefill_passes=prefill_passes,
        histogram=histogram if trace else [],
        draft_seconds=total(lambda r: r.draft_seconds),
        target_seconds=total(lambda r: r.target_seconds),
        seconds=seconds,
    )
