"""`make bench`: three small benchmarks with a goal each, written to `results/bench/small.json`.

What a round spends outside the two models, as a share of a target pass over one position, on the packaged target;
how long `import specdec_lib` takes in a new process; and how many rounds of the token rule are simulated a second on
one core, for audits of tabular models, against a plain loop of the same rule.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import numpy as np

from .. import paths
from ..audit.simulate import one_round, simulate
from ..decode import Round, generate, generate_plain
from ..drafters import SamplingParams
from ..environment import environment
from ..files import write_text
from ..load import load_pair
from ..models.pair import Pair
from ..verify import VERIFIERS
from .costs import CostMeter, Estimate, median
from .prompts import load_prompts

GOALS = {"overhead_per_round": 0.03, "import_seconds": 0.2, "simulated_rounds_per_second": 2e6}
RESULTS = paths.RESULTS / "bench" / "small.json"
CLOCK = "import time; start = time.perf_counter(); import specdec_lib; print(time.perf_counter() - start)"


def overheads(pair: Pair, prompts: list[list[int]], temperature: float, gamma: int = 5, new_tokens: int = 16) -> dict:
    """Time outside the models per round, in target passes: `{"plain": Estimate, "drafted": Estimate}`."""
    meter = CostMeter(pair, gamma, SamplingParams(temperature))
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": temperature, "eos": []}
    plain: list[Round] = []
    drafted: list[Round] = []
    for ids in prompts:
        one_by_one = generate_plain(pair, ids, **settings)
        plain += one_by_one.trace
        drafted += generate(pair, ids, gamma=gamma, **settings).trace
        meter.measure(ids, one_by_one.tokens[0])
    costs = meter.costs(plain, drafted)
    return {"plain": costs.overhead_plain, "drafted": costs.overhead_per_round}


def import_seconds(repeats: int = 9) -> Estimate:
    """Seconds of `import specdec_lib`, each in a new process; the first, which may fill caches, is dropped."""
    runs = [
        subprocess.run([sys.executable, "-c", CLOCK], capture_output=True, text=True, check=True)
        for _ in range(repeats + 1)
    ]
    return median([float(run.stdout) for run in runs[1:]])


def simulation(vocabulary: int = 50, gamma: int = 4, repeats: int = 9) -> dict[str, Estimate]:
    """Rounds of the token rule a second, vectorised on one core, and how often the plain loop's time that saves.

    A round verifies a draft of `gamma` tokens.  The two are timed in turn; the table look-ups are part of the time.
    """
    rng, random = np.random.default_rng(0), Random(0).random
    p, q = (rng.dirichlet(np.full(vocabulary, 0.5), size) for size in (gamma + 1, gamma))
    rule, many, few = VERIFIERS["token"], 100_000, 200
    looped, at_once = [], []
    for _ in range(repeats):
        start = perf_counter()
        for _ in range(few):
            one_round(rule, p, q, random)
        middle = perf_counter()
        simulate(rule, p, q, many, rng)
        looped.append((middle - start) / few)
        at_once.append((perf_counter() - middle) / many)
    ratios = [a / b for a, b in zip(looped, at_once, strict=True)]
    return {"rounds_per_second": median([1 / seconds for seconds in at_once]), "times_the_loop": median(ratios)}


def main(path: Path = RESULTS) -> None:
    pair = load_pair()
    prompts = [pair.encode(prompt.messages) for prompt in load_prompts(limit=1)]
    shares = {f"{t:g}": overheads(pair, prompts, t) for t in (0.0, 1.0)}
    imported = import_seconds()
    simulated = simulation()
    worst = max(estimate.value for at in shares.values() for estimate in at.values())
    for temperature, at in shares.items():
        for name, estimate in at.items():
            print(
                f"outside the models, temperature {temperature}, {name}: {estimate.value:.2%} of a target pass a round"
            )
    print(f"import specdec_lib: {imported.value:.3f} s")
    rate, ratio = simulated["rounds_per_second"].value, simulated["times_the_loop"].value
    print(f"simulated rounds: {rate / 1e6:.1f} million a second on one core, {ratio:,.0f} times the plain loop")
    result = {
        "pair": pair.description,
        "overhead_per_round": {t: {name: asdict(e) for name, e in at.items()} for t, at in shares.items()},
        "import_seconds": asdict(imported),
        "simulation": {name: asdict(e) for name, e in simulated.items()},
        "goals": GOALS,
        "within_goals": {
            "overhead_per_round": worst < GOALS["overhead_per_round"],
            "import_seconds": imported.value < GOALS["import_seconds"],
            "simulated_rounds_per_second": rate >= GOALS["simulated_rounds_per_second"],
        },
        "environment": environment(),
    }
    write_text(path, json.dumps(result, indent=1) + "\n")
    print(f"written to {path.name} in {path.parent.name}")


if __name__ == "__main__":
    main()
