"""What the shell's doors print with: text as it is written, on terminals of every code page."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def shell_console(stderr: bool = False) -> Console:
    """A console that shows what users wrote as they wrote it: no markup, no emoji codes, no highlighting."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)


def tolerate_code_pages() -> None:
    """Let the standard streams print a mark for a character that their encoding lacks, where they would raise."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
