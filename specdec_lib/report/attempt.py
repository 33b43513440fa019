"""`specdec try`: one prompt, shown while it is decoded."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from ..console import shell_console
from ..decode import Generation, Round, check_lengths, generate, generate_plain
from ..drafters import SamplingParams
from ..errors import SpecdecError
from ..load import load_pair
from .trace import KINDS, Renderer, to_plain

REPEATS = 3  # timed runs of each kind, in turn


def attempt(
    prompt: str,
    target: str,
    draft: str | None,
    gamma: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    trust_remote_code: bool = False,
) -> None:
    """Print the marked answer, the statistics, and the time of the drafted and of the plain run."""
    console = shell_console()
    check_lengths(gamma, max_new_tokens)
    SamplingParams(temperature, top_k, top_p)
    if not prompt.strip():
        raise SpecdecError("empty prompt: write at least one word")
    pair = load_pair(target, draft, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    renderer = Renderer(pair.tokenizer)

    def show(done: Round) -> None:
        for piece in renderer.pieces(done):
            if console.is_terminal:
                console.print(Text(piece.text, style=KINDS[piece.kind][0]), end="")
            else:
                console.print(to_plain(piece), end="")

    console.print(pair.description, style="dim")
    out = generate(pair, prompt, gamma=gamma, on_round=show, **options)
    console.print("\n")
    if not out.stats.emitted:
        console.print("no token was decoded, so there is nothing to time: raise --max-new-tokens")
        return
    drafted, plain = [], []
    for _ in range(REPEATS):
        plain.append(per_token(generate_plain(pair, prompt, **options)))
        drafted.append(per_token(generate(pair, prompt, gamma=gamma, **options)))
    console.print(statistics(out, median(drafted), median(plain)))
    ratios = sorted(a / b for a, b in zip(plain, drafted, strict=True))
    console.print(
        f"drafted against one by one: {median(ratios):.2f} times as fast "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f} in {REPEATS} paired runs of this prompt)"
    )


def per_token(out: Generation) -> float:
    """Milliseconds a new token."""
    return 1000 * out.stats.seconds / max(out.stats.emitted, 1)


def statistics(out: Generation, drafted: float, plain: float) -> Table:
    s = out.stats
    table = Table(show_header=False, box=None)
    rows = [
        ("new tokens", f"{s.emitted}", f"in {s.target_passes} target passes"),
        ("block efficiency", f"{s.block_efficiency:.2f}", "tokens a target pass"),
        ("acceptance rate", f"{s.acceptance_rate:.2f}", f"{s.kept} kept of {s.kept + s.rejected} tested"),
        ("accepted per drafted", f"{s.accepted_per_drafted:.2f}", f"{s.accepted} of {s.drafted}"),
        ("drafted", f"{drafted:.1f} ms", "a token"),
        ("one by one", f"{plain:.1f} ms", "a token"),
    ]
    for row in rows:
        table.add_row(*row)
    return table
