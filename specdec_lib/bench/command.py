"""`specdec bench`: whether drafting pays, by how much, and what the runtime analysis says of it."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ..errors import SpecdecError

if TYPE_CHECKING:  # heavy modules are imported on use: the shell's other doors import this one too
    from rich.console import Console
    from rich.table import Table

LOADED = {"libraries": "import", "target": "target", "draft": "draft"}
BUSY = 0.2  # the share of the CPU that others may use before a note says so


def bench(
    target: Annotated[str, typer.Option(help="'packaged', a model folder, or a hub id.")] = "packaged",
    draft: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="A packaged draft, a folder, a hub id, 'lookup' or 'lookup+NAME' (default: the fastest packaged)."
        ),
    ] = None,
    gamma: Annotated[int, typer.Option(help="Tokens drafted a round.")] = 5,
    temperature: Annotated[Optional[list[float]], typer.Option(help="0 is greedy; may be repeated.")] = None,  # noqa: UP045
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer; shorter ones end where they end.")] = 64,
    limit: Annotated[int, typer.Option(help="Prompts of each kind.")] = 4,
    prompts: Annotated[Optional[str], typer.Option(help="A .jsonl file, a folder of them, or a hub data set.")] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option(help="Of the choice of prompts and of all draws.")] = 0,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write all numbers to this file.")] = None,  # noqa: UP045
    keep: Annotated[
        bool, typer.Option("--keep", help="Note the speed in the draft's manifest, for load_pair.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A first look: 1 prompt of each kind, 32 tokens.")] = False,
) -> None:
    """Time drafting against transformers' own decoding, plain and assisted, and against what theory predicts."""
    from rich.console import Console
    from rich.progress import Progress

    from ..decode import check_lengths
    from ..drafters import Sampling
    from ..load import default_draft, names_of
    from ..models.drafts import is_draft, note_speed, packaged_drafts
    from ..report.environment import environment
    from ..report.folder import write_text
    from .costs import footprint
    from .packed import load_contest
    from .prompts import load_prompts
    from .summary import measure

    if quick:
        limit, max_new_tokens = 1, min(max_new_tokens, 32)
    temperatures = temperature or [0.0]
    check_lengths(gamma, max_new_tokens)
    for t in temperatures:
        Sampling(t)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise SpecdecError(f"there is no folder {json_file.absolute().parent}: make it, or name another --json file")
    chosen = load_prompts(prompts, limit=limit, seed=seed)
    draft = draft or default_draft(target)
    folders = [packaged_drafts().get(name, Path(name)) for name in names_of(draft)]
    kept_in = [folder for folder in folders if is_draft(folder)][-1:]
    if keep and not kept_in:
        raise SpecdecError(f"--keep writes to a draft's manifest, and {draft} has none: name a draft of data/drafts")
    contest = load_contest(target, draft)
    busy = cpu_use()

    console = Console(highlight=False, soft_wrap=True)
    runs: list[dict[str, Any]] = []
    memory, remarks = None, []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for t in temperatures:
            task = progress.add_task(f"decoding at temperature {t:g}", total=len(chosen))
            tick = partial(progress.advance, task)
            runs.append(measure(contest, chosen, gamma, max_new_tokens, t, seed, tick))
            if "interrupted" in runs[-1]:
                break
        progress.add_task("memory and loading", total=None)
        try:
            memory = footprint(target, draft, gamma, repeats=1 if quick else 3)
        except (SpecdecError, KeyboardInterrupt) as error:
            remarks = [f"memory and loading times were not measured: {error or 'interrupted'}"]

    if busy > BUSY:
        remarks.append(f"other programs used {busy:.0%} of the CPU before the start: repeat this on a quiet machine")
    for run in runs:
        run["notes"] += remarks
    result = {
        **runs[0],
        "setting": {"target": target, "draft": draft, "gamma": gamma, "max_new_tokens": max_new_tokens}
        | {"prompts": prompts or "packaged", "limit": limit, "seed": seed},
        "memory": memory and {name: memory[name] for name in ("plain", "drafted")},
        "loading": memory and memory["loading"],
        "cpu_use_before": busy,
        "environment": environment(),
        "runs": runs,
    }
    console.print(
        f"\n{contest.pair.description}, gamma {gamma}, at most {max_new_tokens} new tokens a prompt", style="bold"
    )
    for run in runs:
        show(run, console)
    if memory:
        console.print(footprint_table(memory))
    if keep:
        note_speed(
            kept_in[0],
            draft,
            {
                "speedup": {f"{run['temperature']:g}": round(run["own_speedup"], 3) for run in runs},
                "against": "this package's own loop of one token a pass",
                "setting": result["setting"],
                "cpu_use_before": busy,
                "environment": result["environment"],
            },
        )
    if json_file is not None:
        write_text(json_file, json.dumps(finite(result), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        console.print(f"all numbers: {json_file}", style="dim")


def cpu_use() -> float:
    """The share of the CPU in use during one second in which this process sleeps."""
    import psutil

    return psutil.cpu_percent(interval=1.0) / 100


def finite(value: Any) -> Any:
    """The value with NaN and infinity as None: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- what a person reads -------------------------------------------------------------------------------


def number(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """Three digits, and the interval where there is one."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.3g}" + ("" if low is None or high is None else f" [{low:.3g}, {high:.3g}]")


def series(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "-"


def estimate(run: dict[str, Any], name: str) -> str:
    return number(run[name], run[f"{name}_low"], run[f"{name}_high"])


def table(title: str, *heads: str) -> Table:
    from rich.table import Table

    made = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=any(heads)
    )
    for i, head in enumerate(heads):
        made.add_column(head, justify="right" if i and any(heads) else "left", overflow="fold")
    return made


def verdict(run: dict[str, Any]) -> str:
    """The one sentence that the run comes down to."""
    speed, low, high = run["speedup"], run["speedup_low"], run["speedup_high"]
    told = f"{speed:.2f} times as fast as transformers' own decoding of this target"
    if low is None:
        return f"{told}, from too few prompts for a verdict."
    told += f" (95 %: {low:.2f} to {high:.2f})"
    if low > 1:
        return f"Drafting pays here: {told}."
    if high < 1:
        return f"Drafting does not pay here: {told}."
    return f"No verdict, the interval encloses 1: {told}."


def show(run: dict[str, Any], console: Console) -> None:
    """Print one temperature's numbers."""
    from .speed import ARMS

    console.print(f"\nTemperature {run['temperature']:g}. {verdict(run)}\n", style="bold")

    speeds = table("Times as fast", "", "measured", "theorem", "all terms")
    for label, name, *predicted in [
        ("ours drafted : transformers plain", "speedup", "predicted", "predicted_extended"),
        ("ours drafted : transformers assisted", "vs_assisted"),
        ("ours drafted : ours plain", "own_speedup", "own_predicted", "own_predicted_extended"),
        ("ours plain : transformers plain", "plain_ratio"),
    ]:
        speeds.add_row(label, estimate(run, name), *(number(run[key]) for key in predicted))
    console.print(speeds)
    console.print(
        "The analysis predicts the third line; times the fourth, as measured, it predicts the first.\n", style="dim"
    )

    terms = table("Predicted, ours drafted : ours plain, as the terms are added", "", "")
    for i, (name, factor) in enumerate(run["factors"].items()):
        terms.add_row(("+ " if i else "  ") + name, number(factor))
    terms.add_row("  measured", estimate(run, "own_speedup"))
    console.print(terms, "")

    costs = table("What it is made of (in target passes over one position, where nothing else is said)", "", "")
    for label, value in [
        ("acceptance rate alpha, of tested tokens", estimate(run, "alpha")),
        ("alpha by position in the draft", series(run["alpha_by_position"])),
        ("block efficiency, tokens a target pass", number(run["block_efficiency"])),
        ("cost coefficient c, a draft step", estimate(run, "cost_coefficient")),
        ("pass over 1, 2, ... positions, v(n)", series(run["verification_cost"])),
        ("outside the models, a round", estimate(run, "overhead_per_round")),
        ("reading a prompt, target and draft", f"{number(run['prefill_target'])} and {number(run['prefill_draft'])}"),
        ("one target pass, milliseconds", number(1000 * run["target_pass_seconds"])),
    ]:
        costs.add_row(label, value)
    console.print(costs, "")

    decoders = table("Decoders", "", "tokens/s", "first token", "all prompts")
    for arm, d in run["decoders"].items():
        first, whole = f"{1000 * d['first_token_seconds']:.0f} ms", f"{d['seconds']:.1f} s"
        decoders.add_row(ARMS[arm], f"{d['tokens_per_second']:.1f}", first, whole)
    console.print(decoders, "")

    kinds = table("By kind of prompt", "", "prompts", "times as fast", "vs assisted", "alpha", "tokens a pass")
    for kind, k in run["kinds"].items():
        others = [number(k[name]) for name in ("vs_assisted", "alpha", "block_efficiency")]
        kinds.add_row(kind.replace("_", " "), str(k["prompts"]), estimate(k, "speedup"), *others)
    console.print(kinds, "")
    for note in run["notes"]:
        console.print(f"Note: {note}.", style="yellow")


def footprint_table(memory: dict[str, Any]) -> Table:
    """Memory with and without the draft, and loading times."""
    made = table("\nMemory and loading, in processes of their own", "", "peak", "after decoding", "on the GPU")
    for name, label in (("plain", "without the draft"), ("drafted", "with the draft")):
        sizes = [memory[name][key] for key in ("peak_mib", "resident_mib", "gpu_mib")]
        made.add_row(label, *("-" if size is None else f"{size:.0f} MiB" for size in sizes))
    seconds = [f"{name} {memory['loading'][f'{key}_seconds']:.2f}" for name, key in LOADED.items()]
    made.caption = f"Seconds: {', '.join(seconds)}"
    made.caption_justify = "left"
    return made
