"""`specdec bench`: whether drafting pays, by how much, and what the runtime analysis says of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ..errors import SpecdecError

if TYPE_CHECKING:  # heavy modules are imported on use: the shell's other doors import this one too
    from rich.console import Console
    from rich.table import Table

    from .settings import Setting

SECONDS_BETWEEN_LINES = 30  # of progress, where there is no terminal
LOADED = {"libraries": "import", "target": "target", "draft": "draft"}


def bench(
    target: Annotated[str, typer.Option(help="'packaged', a model folder, or a hub id.")] = "packaged",
    draft: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="A packaged draft, a folder, a hub id, 'lookup' or 'lookup+NAME' (default: the fastest packaged); "
            "may be repeated."
        ),
    ] = None,
    gamma: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(help="Tokens drafted a round (default: 5); may be repeated."),
    ] = None,
    temperature: Annotated[Optional[list[float]], typer.Option(help="0 is greedy; may be repeated.")] = None,  # noqa: UP045
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer; shorter ones end where they end.")] = 64,
    limit: Annotated[int, typer.Option(help="Prompts of each kind.")] = 4,
    prompts: Annotated[Optional[str], typer.Option(help="A .jsonl file, a folder of them, or a hub data set.")] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option(help="Of the choice of prompts and of all draws.")] = 0,
    tokenizers: Annotated[
        str,
        typer.Option(
            help="'same', or for a draft of other tokens 'text' (its text is re-encoded) or 'shared' (the tokens that "
            "both know)."
        ),
    ] = "same",
    json_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--json",
            help="Write all numbers to this file; of several settings, those that it holds unchanged are not "
            "measured again.",
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Note the speed in the draft's manifest, for load_pair.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A first look: 1 prompt of each kind, 32 tokens.")] = False,
    jobs: Annotated[
        int,
        typer.Option(
            help="Measure so many settings at a time here; they share the cores, so trust no speed of theirs."
        ),
    ] = 1,
    scheduler: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="ADDRESS",
            help="Measure on the workers of this dask scheduler, a setting at a time on each: start one worker a "
            "machine, since those on one machine share its cores.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a model.")
    ] = False,
) -> None:
    """Time drafting against transformers' own decoding, plain and assisted, and against what theory predicts.

    Several drafts or lengths make a sweep: each pair of them is a setting of its own, timed in turns within itself.
    Interrupted, by Ctrl-C or SIGTERM, it shows and writes what is done; the exit status is then 130 or 143.
    """
    from ..console import shell_console
    from ..load import default_draft
    from ..validate import workers as check_workers
    from .settings import Setting

    if quick:
        limit, max_new_tokens = 1, min(max_new_tokens, 32)
    temperatures = tuple(temperature or [0.0])
    check_workers(jobs, scheduler)
    settings = [
        Setting(
            target,
            name,
            length,
            max_new_tokens,
            temperatures,
            prompts,
            limit,
            seed,
            tokenizers,
            1 if quick else 3,
            trust_remote_code,
        )
        for name in dict.fromkeys(draft or [default_draft(target)])
        for length in dict.fromkeys(gamma or [5])
    ]
    for setting in settings:
        setting.check()
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise SpecdecError(f"there is no folder {json_file.absolute().parent}: make it, or name another --json file")
    alone = len(settings) == 1 and jobs == 1 and not scheduler
    if keep and not alone:
        raise SpecdecError("--keep notes one speed, measured here: name one draft and one gamma, without other workers")
    kept_in = manifest_of(settings[0].draft) if keep else None

    console, waiting = shell_console(), shell_console(stderr=True)
    results, status = measured(settings, json_file, alone, jobs, scheduler)
    if len(settings) == 1 and results:
        show_setting(results[0], console)
    elif results:
        console.print(sweep_table(results))
    if kept_in is not None and not status:
        keep_speed(kept_in, results[0])
    if json_file is not None and results:
        console.print(f"all numbers: {json_file}", style="dim")
    if status:
        waiting.print(told_of_interrupt(len(results), len(settings), alone, json_file))
    if status or len(results) < len(settings):
        raise typer.Exit(status or 1)


def measured(
    settings: list[Setting], json_file: Path | None, alone: bool, jobs: int, scheduler: str | None
) -> tuple[list[dict[str, Any]], int]:
    """Measure settings with progress on the terminal; the numbers of those that ended, and the exit status."""
    from rich.markup import escape
    from rich.progress import Progress

    from ..console import shell_console
    from ..files import json_text, write_text
    from ..interrupt import Terminated, exit_status, sigterm_interrupts
    from .settings import measure_setting, sweep

    console, waiting = shell_console(), shell_console(stderr=True)
    done: dict[Setting, dict[str, Any]] = {}
    status = 0
    with (
        sigterm_interrupts() as terminated,
        Progress(console=waiting, transient=True, disable=not waiting.is_terminal) as progress,
    ):

        def ticks(what: str, steps: int | None) -> Callable[[], None]:
            if not waiting.is_terminal:
                return lines(what, steps, waiting.print)
            return partial(progress.advance, progress.add_task(escape(what), total=steps))

        try:
            if alone:
                done[settings[0]] = found = measure_setting(settings[0], ticks)
                if json_file is not None:
                    write_text(json_file, json_text(found))
                if "interrupted" in found["runs"][-1]:
                    raise KeyboardInterrupt
            else:
                sweep(settings, json_file, jobs, scheduler, console.print, ticks, done)
        except KeyboardInterrupt as interrupt:
            status = exit_status(Terminated() if terminated.is_set() else interrupt)
    return [done[setting] for setting in settings if setting in done], status


def told_of_interrupt(measured: int, asked: int, alone: bool, json_file: Path | None) -> str:
    """What an interrupt has left, in a line."""
    if not measured:
        return "interrupted before anything was measured"
    if alone:
        return "interrupted: the numbers are of what was done"
    on = "; the same command goes on from there" if json_file is not None else ""
    return f"interrupted: {measured} of {asked} settings are measured{on}"


def lines(what: str, steps: int | None, say: Callable[[str], Any]) -> Callable[[], None]:
    """Progress for a log: a line as it begins, and one now and then as steps end."""
    said, ended = time.monotonic(), 0
    say(what if steps is None else f"{what}: {steps} prompts")

    def tick() -> None:
        nonlocal said, ended
        ended += 1
        if time.monotonic() - said >= SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            say(f"{what}: {ended} of {steps}")

    return tick


def manifest_of(draft: str) -> Path:
    """The folder of the draft of this name, which has a manifest."""
    from ..drafters.on_disk import is_draft, packaged_drafts
    from ..load import names_of

    folders = [packaged_drafts().get(name, Path(name)) for name in names_of(draft)]
    if not any(map(is_draft, folders)):
        raise SpecdecError(f"--keep writes to a draft's manifest, and {draft} has none: name a draft of data/drafts")
    return [folder for folder in folders if is_draft(folder)][-1]


def keep_speed(folder: Path, result: dict[str, Any]) -> None:
    """Note the measured speed in the manifest in `folder`."""
    from ..drafters.on_disk import note_speed

    note_speed(
        folder,
        result["setting"]["draft"],
        {
            "speedup": {f"{run['temperature']:g}": round(run["own_speedup"], 3) for run in result["runs"]},
            "against": "this package's own loop of one token a pass",
            "setting": result["setting"],
            "cpu_use_before": result["cpu_use_before"],
            "environment": result["environment"],
        },
    )


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


def show_setting(result: dict[str, Any], console: Console) -> None:
    """Print all numbers of one setting."""
    asked = result["setting"]
    console.print(
        f"\ntarget {asked['target']}, draft {asked['draft']}, gamma {asked['gamma']}, "
        f"at most {asked['max_new_tokens']} new tokens a prompt",
        style="bold",
    )
    for run in result["runs"]:
        show(run, console)
    if result["memory"]:
        console.print(footprint_table(result["memory"], result["loading"]))


def sweep_table(results: list[dict[str, Any]]) -> Table:
    """A line for each draft, length and temperature, the fastest first."""
    rows = [(result["setting"], run) for result in results for run in result["runs"]]
    heads = ("draft", "gamma", "T", "measured", "all terms", "vs assisted", "alpha", "c")
    made = table("\nTimes as fast as transformers plain, and what it is made of", *heads)
    for asked, run in sorted(rows, key=lambda row: (row[1]["temperature"], -row[1]["speedup"])):
        made.add_row(
            asked["draft"],
            str(asked["gamma"]),
            f"{run['temperature']:g}",
            estimate(run, "speedup"),
            *(number(run[name]) for name in ("predicted_extended", "vs_assisted", "alpha", "cost_coefficient")),
        )
    return made


def show(run: dict[str, Any], console: Console) -> None:
    """Print one temperature's numbers."""
    from .contest import ARMS

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


def footprint_table(memory: dict[str, Any], loading: dict[str, float]) -> Table:
    """Memory with and without the draft, and loading times."""
    made = table("\nMemory and loading, in processes of their own", "", "peak", "after decoding", "on the GPU")
    for name, label in (("plain", "without the draft"), ("drafted", "with the draft")):
        sizes = [memory[name][key] for key in ("peak_mib", "resident_mib", "gpu_mib")]
        made.add_row(label, *("-" if size is None else f"{size:.0f} MiB" for size in sizes))
    seconds = [f"{name} {loading[f'{key}_seconds']:.2f}" for name, key in LOADED.items()]
    made.caption = f"Seconds: {', '.join(seconds)}"
    made.caption_justify = "left"
    return made
