"""What a round costs, measured: the draft's steps, the target's passes by their number of positions, and the rest.

The unit of the runtime analysis is one target pass over one position, T(1).  Measured here, always in turn with each
other so that a machine that slows down slows all of them:

* `v(n) = T(n) / T(1)`: what the theorem takes as 1;
* the cost coefficient c: one draft step, its draw included, over T(1);
* what lies outside both models per round: sampling, the rule, book-keeping, rolling back.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter, time
from typing import Any

import numpy as np
import torch

from ..acceptance import acceptance_by_position
from ..decode import Round, generate, generate_plain
from ..drafters import SamplingParams, as_drafter
from ..errors import SpecdecError
from ..load import resolve_draft
from ..models.pair import Pair, load_model, vocabulary_size
from ..models.session import Session, open_session
from ..models.support import context_length
from ..theory import Prediction, predict

SWEEPS = 3  # times that each cost is taken on one text
FEWEST = 6  # of n values the extremes enclose the median with probability 1 - 2^(1-n): 95 % from n = 6 on


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval; `low` and `high` are None where there are too few values for one."""

    value: float
    low: float | None = None
    high: float | None = None


def median(values: Sequence[float] | np.ndarray) -> Estimate:
    """The median; its interval are the order statistics that enclose it with at least 95 %, whatever the law.

    >>> median([3.0, 1.0, 2.0])
    Estimate(value=2.0, low=None, high=None)
    >>> median([float(i) for i in range(1, 11)])  # the second and the last but one: Conover, 3.2
    Estimate(value=5.5, low=2.0, high=9.0)
    """
    from scipy.stats import quantile_test

    x = np.asarray(values, float)
    if len(x) < FEWEST:
        return Estimate(float(np.median(x)))
    interval = quantile_test(x, p=0.5).confidence_interval(0.95)
    return Estimate(float(np.median(x)), float(interval.low), float(interval.high))


def synchronise(device: torch.device) -> None:
    """Wait for an accelerator, of whatever kind; on a CPU nothing is under way."""
    if device.type == "mps":  # there is one, and it takes no name
        torch.mps.synchronize()
    elif device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def pass_seconds(session: Session, positions: Sequence[int], order: random.Random, batch: int = 1) -> list[float]:
    """Time one pass over each number of positions, in random order; the session is left as it was.

    Args:
        session: holds a text, of `batch` rows.
        positions: each >= 1.
        order: shuffles them, so that no length always follows the same one.
        batch: rows of the session.

    Returns:
        Seconds `[len(positions)]`.
    """
    held = session.length
    seconds = [0.0] * len(positions)
    for i in order.sample(range(len(positions)), len(positions)):
        ids = torch.ones(batch, positions[i], dtype=torch.long, device=session.device)
        synchronise(session.device)
        start = perf_counter()
        session.feed(ids, last=positions[i])
        synchronise(session.device)
        seconds[i] = perf_counter() - start
        session.rollback(held)
    return seconds


@dataclass(frozen=True)
class Costs:
    """What a round is made of; all but `target_pass` in target passes over one position.

    Attributes:
        gamma: draft length.
        target_pass: T(1) in seconds.
        verification_cost: v(1), v(2), ...
        cost_coefficient: c.
        overhead_plain, overhead_per_round: outside the models, per round of plain and of drafted decoding.
        prefill_target, prefill_draft: mean time of reading a prompt.
    """

    gamma: int
    target_pass: Estimate
    verification_cost: list[Estimate]
    cost_coefficient: Estimate
    overhead_plain: Estimate
    overhead_per_round: Estimate
    prefill_target: float
    prefill_draft: float

    def predict(self, trace: Sequence[Round], texts: Sequence[int]) -> Prediction:
        """Speed of drafting against *our own* plain loop: the theorem, then the terms it leaves out, one by one.

        Args:
            trace: the drafted rounds; they give the acceptance by position.  Only rounds with room for `gamma` tokens
                count (all, if no round had it).  What a drafter was asked for and did not propose is refused, and
                costs no position of the pass.
            texts: the number of new tokens of each text; `trace` holds their rounds in order.
        """
        rounds = rounds_with_room(trace, self.gamma, texts) or list(trace)
        accepted = [r.accepted for r in rounds]
        alphas = np.zeros(self.gamma)  # 0 where no round came so far: what cannot be reached does not matter
        found = acceptance_by_position(accepted, [int(a < self.gamma) for a in accepted])
        alphas[: len(found)] = found
        lengths = np.array([len(r.drafted) for r in rounds])
        v = np.array([e.value for e in self.verification_cost])
        checked = np.array([v[np.minimum(lengths, n)].mean() for n in range(self.gamma + 1)])
        c = self.cost_coefficient.value
        finite: dict[str, Any] = {"tokens": round(float(np.mean(texts)))}
        finite |= {"prefill_target": self.prefill_target, "prefill_draft": self.prefill_draft}
        bare = predict(alphas, self.gamma, c, checked, **finite)
        # a plain round becomes the unit: its pass and what lies outside it
        unit = 1 + self.overhead_plain.value
        checked = np.r_[1, (checked[1:] + self.overhead_per_round.value) / unit]
        finite |= {"prefill_target": self.prefill_target / unit, "prefill_draft": self.prefill_draft / unit}
        full = predict(alphas, self.gamma, c / unit, checked, **finite)
        factors = bare.factors | {"outside the models": full.extended}
        return replace(bare, factors=factors)


def rounds_with_room(trace: Sequence[Round], gamma: int, texts: Sequence[int]) -> list[Round]:
    """The rounds that could use `gamma` draft tokens; the last ones of a text draft less."""
    found, left = [], iter(texts)
    remaining = 0
    for r in trace:
        remaining = remaining or next(left)
        if remaining > gamma:
            found.append(r)
        remaining -= len(r.emitted)
    return found


class CostMeter:
    """Collects one measurement a text: all pass lengths and a draft, in turn.

    Args:
        pair: target and draft.
        gamma: draft length.
        sampling: as in the decoding that is to be predicted; a draft's step includes its draw.
        longest: passes are timed over 1, ..., `longest` positions; None is the larger of gamma + 1 and 8.
        seed: of the order.
        drafts: several drafts by name, timed beside the same passes; None is the pair's own.
    """

    def __init__(
        self,
        pair: Pair,
        gamma: int,
        sampling: SamplingParams,
        longest: int | None = None,
        seed: int = 0,
        drafts: Mapping[Any, Any] | None = None,
    ):
        self.target, self.gamma, self.sampling = pair.target, gamma, sampling
        self.drafts = {None: pair.draft} if drafts is None else dict(drafts)
        self.positions = range(1, (longest or max(gamma + 1, 8)) + 1)
        self.order = random.Random(seed)
        self.passes: list[list[float]] = []
        self.reads: list[float] = []
        self.proposals: dict[Any, list[float]] = {name: [] for name in self.drafts}
        self.draft_reads: dict[Any, list[float]] = {name: [] for name in self.drafts}

    def measure(self, prompt: list[int], text: list[int]) -> None:
        """Measure at a quarter, half and three quarters of `text`, as long as the context is while it is written."""
        if not self.passes:
            self._measure(prompt, text)  # the first pass of each length prepares it
        passes, read, proposals, draft_reads = self._measure(prompt, text)
        self.passes.append(passes)
        self.reads.append(read)
        for name in self.drafts:
            self.proposals[name].append(proposals[name])
            self.draft_reads[name].append(max(draft_reads[name] - proposals[name], 0.0))

    def _measure(
        self, prompt: list[int], text: list[int]
    ) -> tuple[list[float], float, dict[Any, float], dict[Any, float]]:
        room = context_length(self.target) - max(self.positions)
        whole = [*prompt, *text][:room]
        prompt = prompt[:room]
        target = open_session(self.target, capacity=len(whole) + max(self.positions))
        vocabulary, device = vocabulary_size(self.target), target.device
        drafting = {name: as_drafter(draft).start_batch(1, vocabulary, target) for name, draft in self.drafts.items()}

        def propose(name: Any, prefix: list[int], gamma: int = self.gamma) -> float:
            synchronise(device)
            start = perf_counter()
            drafting[name].propose([prefix], [gamma], [self.sampling], [self.order])
            synchronise(device)
            return perf_counter() - start

        synchronise(device)
        start = perf_counter()
        if len(prompt) > 1:
            target.feed(torch.tensor([prompt[:-1]], device=device), last=0)
            synchronise(device)
        read = perf_counter() - start
        draft_reads = {name: propose(name, prompt) for name in drafting}
        sweeps: list[list[float]] = []
        proposals: dict[Any, list[float]] = {name: [] for name in drafting}
        for sweep in range(1, SWEEPS + 1):
            # a lookup finds something here and nothing there, so all is timed all along the text
            here = whole[: len(prompt) + max(len(text) * sweep // (SWEEPS + 1), 1)]
            if new := here[target.length : -1]:
                target.feed(torch.tensor([new], device=device), last=0)
            sweeps.append(pass_seconds(target, self.positions, self.order))
            for name in self.order.sample(list(drafting), len(drafting)):
                propose(name, here, 1)  # reads what is new
                pass_seconds(target, [1], self.order)  # as in a round: the draft's weights have left the caches
                proposals[name].append(propose(name, here))
        typical = {name: float(np.mean(seconds)) for name, seconds in proposals.items()}
        return np.median(sweeps, axis=0).tolist(), read, typical, draft_reads

    def costs(self, plain: Sequence[Round], drafted: Sequence[Round], draft: Any = None) -> Costs:
        """The medians; what lies outside the models comes from the rounds of plain and of drafted decoding.

        `draft` names one of `drafts`; None is the pair's own.
        """
        if not self.passes:
            raise SpecdecError("nothing was measured: call measure(prompt, text) for at least one text")
        passes, proposals = np.array(self.passes), np.array(self.proposals[draft])
        one = passes[:, 0]
        typical = np.median(passes, axis=0)
        asynchronous = self.target.device.type != "cpu"
        outside = [outside_seconds(rounds, typical if asynchronous else None) for rounds in (plain, drafted)]
        return Costs(
            self.gamma,
            target_pass=median(one),
            verification_cost=[median(passes[:, i] / one) for i in range(passes.shape[1])],
            cost_coefficient=median(proposals / self.gamma / one),
            overhead_plain=median(np.array(outside[0]) / typical[0]),
            overhead_per_round=median(np.array(outside[1]) / typical[0]),
            prefill_target=float(np.mean(self.reads) / typical[0]),
            prefill_draft=float(np.mean(self.draft_reads[draft]) / typical[0]),
        )


def outside_seconds(trace: Sequence[Round], passes: Sequence[float] | None = None) -> list[float]:
    """Per round: its time less the drafter's and the target's.

    Args:
        trace: rounds.
        passes: T(1), T(2), ... in seconds, used for the target's share where a round cannot tell it: on a GPU a pass
            returns before it is done.
    """
    target = [r.target_seconds if passes is None else float(passes[len(r.drafted)]) for r in trace]
    return [max(r.seconds - r.draft_seconds - t, 0.0) for r, t in zip(trace, target, strict=True)]


# -- loading and memory --------------------------------------------------------------------------------


def footprint(
    target: str,
    draft: str,
    gamma: int,
    repeats: int = 3,
    tokenizers: str = "same",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Memory with and without the draft, and loading times; every measurement in a process of its own, in turn.

    Returns:
        `plain` and `drafted`: `peak_mib` (the most the process held, loading included), `resident_mib` (after
        decoding), `gpu_mib` (the most torch held on the GPU; None without one); `loading`: `import_seconds` (torch,
        transformers and the library), `target_seconds`, `draft_seconds`.  Medians over `repeats`.
    """
    found: dict[str, list[dict]] = {"plain": [], "drafted": []}
    for _ in range(repeats):
        for name, given in (("plain", ""), ("drafted", draft)):
            command = [sys.executable, "-m", __name__, target, given, str(gamma), tokenizers]
            command += ["trust"] * trust_remote_code
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise SpecdecError(
                    f"the process that measures memory failed ({reason}): is there memory for a second copy?"
                )
            found[name].append(json.loads(done.stdout.splitlines()[-1]))

    def typical(runs: list[dict], key: str) -> float | None:
        values = [run[key] for run in runs]
        return None if None in values else round(float(np.median(values)), 3)

    memory = {
        name: {k: typical(runs, k) for k in ("peak_mib", "resident_mib", "gpu_mib")} for name, runs in found.items()
    }
    both = found["plain"] + found["drafted"]
    loading = {key: typical(both, key) for key in ("import_seconds", "target_seconds")}
    return {**memory, "loading": {**loading, "draft_seconds": typical(found["drafted"], "draft_seconds")}}


def _footprint_of_this_process(
    target: str, draft: str, gamma: int, tokenizers: str, imported: float, trust_remote_code: bool = False
) -> dict[str, float | None]:
    import psutil

    start = perf_counter()
    model = load_model(target, trust_remote_code=trust_remote_code)
    loaded = perf_counter()
    drafter = None
    if draft:
        drafter = resolve_draft(draft, target, tokenizers=tokenizers, trust_remote_code=trust_remote_code).draft
    pair = Pair(model, drafter)
    ready = perf_counter()
    prompt = [i % vocabulary_size(model) for i in range(min(128, context_length(model) // 2))]
    if draft:
        generate(pair, prompt, gamma=gamma, max_new_tokens=2 * gamma, eos=[])
    else:
        generate_plain(pair, prompt, max_new_tokens=2 * gamma, eos=[])
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {
        "peak_mib": peak_bytes() / 2**20,
        "resident_mib": psutil.Process().memory_info().rss / 2**20,
        "gpu_mib": None if gpu is None else gpu / 2**20,
        "import_seconds": imported,
        "target_seconds": loaded - start,
        "draft_seconds": ready - loaded,
    }


def peak_bytes() -> int:
    """The most memory this process has held.  On Linux `ru_maxrss` would not do: it starts at the parent's."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    import psutil
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401  (imported on use otherwise)

    alive = time() - psutil.Process(os.getpid()).create_time()
    _, _target, _draft, _gamma, _tokenizers, *_trust = sys.argv
    print(json.dumps(_footprint_of_this_process(_target, _draft, int(_gamma), _tokenizers, alive, bool(_trust))))
