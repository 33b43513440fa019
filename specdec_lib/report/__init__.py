"""What a run leaves behind: claims with their verdicts, figures, tables, and the machine they were made on.

A notebook uses four calls: `use_style()` once, `save(fig, name)` and `save_table(frame, name)` at the end of a cell,
and `claim(id, statement, ...)` for each statement that it puts to the test.  By hand they only show; under
`specdec reproduce` they also write files.
"""

from __future__ import annotations

from ..environment import environment
from .claims import Claim, claim, collect
from .figures import save, save_light, save_table, use_style

__all__ = ["Claim", "claim", "collect", "environment", "save", "save_light", "save_table", "use_style"]
