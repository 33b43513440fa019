"""What decoding returns: every round, the sums over them, and the texts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from ..errors import SpecdecError

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Round:
    """One target pass over one text, and what came of it.

    Attributes:
        row: index of the prompt.
        drafted: the proposed tokens; of several drafts, those of the one that was followed.
        accepted: how many of them the verifier kept, 0 to `len(drafted)`.
        emitted: the tokens that joined the text: the accepted ones and one more, less what was trimmed at the end.
        q: the draft's probability of each drafted token (1 where the draft was certain).
        p: the target's probability of each drafted token (0 or 1 at temperature 0).
        draft_passes: how often a draft model ran; for several drafts, once for each of them.
        draft_seconds, target_seconds, seconds: time in the drafter, in the target's pass, and of the whole round;
            an equal share of it where several rows were decoded together.
        logprobs, scores: see `Generation`; empty unless asked for.
        drafts: all drafts of the round, in the order in which they were tried; empty where there was one only.
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
        """How many tokens of the round lay past the end of the text and were dropped."""
        return self.accepted + 1 - len(self.emitted)

    @property
    def kept(self) -> int:
        """How many draft tokens joined the text.

        One more than were accepted where the token that follows is the draft's own: `ensemble(w, "none")` keeps the
        last draft token by writing it there.
        """
        n = min(self.accepted, len(self.emitted))
        return n + (self.drafted[n : n + 1] == self.emitted[n : n + 1] != [])

    @property
    def rejected(self) -> int:
        """1 if the round ended with a draft token refused (of several drafts, all that were tried there), else 0."""
        return int(self.kept < len(self.drafted) and not self.trimmed)

    @property
    def rescued(self) -> int:
        """How many kept tokens were not the first to be tried at their place: another draft's was refused before."""
        count = 0
        for n in range(self.kept if self.drafts else 0):
            tried = (draft[n] for draft in self.drafts if len(draft) > n and draft[:n] == self.drafted[:n])
            count += next(tried) != self.drafted[n]
        return count


@dataclass(frozen=True)
class Stats:
    """The accounting of a run, summed over its rounds.

    Identities, asserted in the tests: `sum(histogram) = rounds`; `emitted = accepted + rounds - trimmed`;
    `drafted = ` the sum of the drafts' lengths.

    Attributes:
        rounds: target passes that ended in a draw, one a round; `target_passes` is the same number.  A pass over
            several texts counts once for each of them, one over several drafts of a text once.
        emitted: new tokens.
        drafted: proposed tokens, of all drafts.
        accepted: proposed tokens that the verifier kept.
        kept: those of them that joined the text (fewer where an end-of-sequence token cut a round).
        rejected: rounds that ended with a token refused; what follows a refused token was never tested.
        rescued: kept tokens in whose place another draft's token had been refused; 0 with one draft.
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

        With several drafts, of the first token tried at each place: (kept - rescued) / (kept + rejected).  What is
        tried after it is tested against another law than the target's, and counts in `block_efficiency` only.
        NaN where nothing was tested.
        """
        tested = self.kept + self.rejected
        return (self.kept - self.rescued) / tested if tested else float("nan")

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
        texts: the new text of each prompt, without the stop string that ended it (empty strings where the pair has no
            tokenizer).
        tokens: the new ids of each prompt, an end-of-sequence token included, a stop string's tokens too.
        trace: every round of every prompt, in order.
        stats: the sums.
        rows: the sums of each prompt; its `seconds` are those of its prefill and its rounds.
        ended: why each text ended: "end token", "stop string", "criterion", "length", or "context" where the
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
        """Per prompt and new token: log-probability in the target's own law (temperature 1, nothing processed)."""
        return self._of_each_token("logprobs")

    @property
    def scores(self) -> list[list[float]]:
        """Per prompt and new token: log-probability in the law after processors, temperature and truncation.

        At temperature 0, where that law is a point mass, the temperature is taken as 1.
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
