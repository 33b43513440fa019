"""The door in the shell: `specdec distill`."""

from __future__ import annotations

from typing import Annotated

import typer


def distill(
    out: Annotated[str, typer.Argument(help="Folder of the draft to make, for example data/drafts/small.")],
    target: Annotated[str, typer.Option(help="'packaged', a model folder, or a hub id.")] = "packaged",
    kind: Annotated[
        str,
        typer.Option(
            help="'model'; 'features' for a layer on the target's hidden states; 'tokenizer' for a model of other "
            "tokens; 'ngram' for a table."
        ),
    ] = "model",
    tokens: Annotated[int, typer.Option(help="Of the target's text to learn from.")] = 1_000_000,
    layers: Annotated[int | None, typer.Option(help="Of the draft (default: 2; of kind 'features' 1).")] = None,
    width: Annotated[int, typer.Option(help="Of the draft.")] = 256,
    heads: Annotated[int, typer.Option(help="Of the draft.")] = 4,
    shortlist: Annotated[int, typer.Option(help="How many tokens it can propose, or its own tokenizer has.")] = 8192,
    passes: Annotated[float, typer.Option(help="Over the text.")] = 10.0,
    batch: Annotated[int, typer.Option(help="Rows a step.")] = 8,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 5e-3,
    budget: Annotated[float | None, typer.Option(help="Minutes for text and training; half for the text.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    dtype: Annotated[str | None, typer.Option(help="In which the target writes.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything.")] = 0,
    work: Annotated[str | None, typer.Option(help="Folder of text and checkpoints (default: data/text).")] = None,
    prompts: Annotated[str | None, typer.Option(help="Measure on these (.jsonl) instead of the packaged ones.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a model.")
    ] = False,
) -> None:
    """Make a draft for a target: it writes text, the draft learns from it and is measured.  Interrupted, it goes on."""
    from ..interrupt import exit_status, sigterm_interrupts
    from .progress import Board
    from .recipe import Job, distill

    board = Board()
    if layers is None:
        layers = 1 if kind == "features" else 2
    job = Job(
        out, target, kind, tokens, layers, width, heads, shortlist, passes, batch, rate, budget, device, dtype, seed,
        work, prompts, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    with sigterm_interrupts():
        try:
            distill(job, board)
        except KeyboardInterrupt as interrupt:
            board.say("interrupted: the same command goes on from here")
            raise typer.Exit(exit_status(interrupt)) from None
