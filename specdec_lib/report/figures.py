"""Figures and tables: one look, shown once in the notebook, kept as files when a runner asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .folder import file_for

if TYPE_CHECKING:
    from IPython.display import Image
    from matplotlib.figure import Figure
    from pandas import DataFrame

STYLE = Path(__file__).with_name("specdec.mplstyle")


def use_style() -> None:
    """The laboratory's look for every figure that follows in this process."""
    import matplotlib.pyplot as plt

    plt.style.use(STYLE)


def save(fig: Figure, name: str) -> Figure:
    """Write `figures/<name>.png` and `.svg` under a runner; return the figure, so that a cell which ends with it
    shows it once.

    The figure is closed: pyplot would otherwise show it a second time when the cell ends.
    The SVG carries no date, and under `use_style` no random ids: the same drawing gives the same bytes.

    Raises:
        SpecdecError: the name is not made of lower-case letters, digits, '-' and '_'.
    """
    import matplotlib.pyplot as plt

    path = file_for("figures", name)
    if path:
        fig.savefig(path.with_suffix(".png"))
        fig.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(fig)
    return fig


def save_light(fig: Figure, name: str, colours: int = 64) -> Image:
    """As `save`, and return an image of few colours: lines need no more, and a notebook is a third as heavy.

    Args:
        colours: 2 to 256.
    """
    from io import BytesIO

    import PIL.Image
    from IPython.display import Image

    png, small = BytesIO(), BytesIO()
    save(fig, name).savefig(png, dpi=100, format="png")
    PIL.Image.open(png).convert("RGB").quantize(colours).save(small, "png", optimize=True)
    return Image(small.getvalue())


def save_table(frame: DataFrame, name: str) -> DataFrame:
    """Write `tables/<name>.csv` under a runner, row labels included when there are any; return the frame.

    Raises:
        SpecdecError: as in `save`.
    """
    import pandas as pd

    path = file_for("tables", name)
    if path:
        counter = isinstance(frame.index, pd.RangeIndex) and frame.index.name is None
        frame.to_csv(path.with_suffix(".csv"), index=not counter)
    return frame
