"""A white card to draw a schematic on: token boxes, arrows, brackets and labels, placed in inches.

    card = Canvas(6.4, 2.0, "The target keeps the first two draft tokens.")
    boxes = card.row(["a", "b", "c"], 0.4, 1.0, ["accepted", "accepted", "refused"])
    card.bracket(boxes[0].left, boxes[1].right, 0.75, "kept")
    card.figure

x grows to the right from the card's left edge, y upwards from its lower edge; `card.top` is the room under the title.
The card is white with rounded corners on a transparent page, so it reads on light and on dark pages.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#1A1A1A"
MUTED = "#5A5A5A"
# one meaning a colour, from seaborn's "colorblind" palette; `report/trace.py` and `report/plots.py` use the same ones
COLOURS = {
    "target": "#0173B2",
    "draft": "#DE8F05",
    "accepted": "#029E73",
    "refused": "#D55E00",
    "correction": "#0173B2",  # the target's own token after a refused one
    "bonus": "#56B4E9",  # the target's own token after a whole draft
    "untested": "#949494",
    "prompt": "#949494",
    "plain": "#5A5A5A",
}
Point = tuple[float, float]


def tint(role: str, strength: float = 0.2) -> tuple[float, float, float]:
    """The colour of a role mixed with white: dark text is legible on it.

    >>> tint("plain", 0.0)
    (1.0, 1.0, 1.0)
    """
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(COLOURS[role]))
    return red, green, blue


def visible(text: str) -> str:
    """Text as it is written into a box: a line break and a lone space are drawn as signs.

    >>> visible(" the"), visible(chr(10)), visible(" ")
    ('the', '⏎', '␣')
    """
    return text.replace("\n", "⏎").strip() or "␣"


@dataclass(frozen=True)
class Box:
    """Where a box lies: its middle and its size, in inches."""

    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> float:
        return self.x - self.width / 2

    @property
    def right(self) -> float:
        return self.x + self.width / 2

    @property
    def top(self) -> Point:
        """The middle of the upper edge."""
        return self.x, self.y + self.height / 2

    @property
    def bottom(self) -> Point:
        """The middle of the lower edge."""
        return self.x, self.y - self.height / 2

    @property
    def west(self) -> Point:
        """The middle of the left edge."""
        return self.left, self.y

    @property
    def east(self) -> Point:
        """The middle of the right edge."""
        return self.right, self.y


class Canvas:
    """A card of `width` by `height` inches with a title, which is a full sentence that states what the picture shows.

    Attributes:
        figure: what a diagram returns.  It is closed for pyplot, so a cell that ends with it shows it once.
        axes: one axes over the whole card, in inches.
        top: y of the lower edge of the title, where the drawing may begin.
    """

    def __init__(self, width: float, height: float, title: str):
        import matplotlib.pyplot as plt
        from matplotlib.patches import FancyBboxPatch

        self.width, self.height = width, height
        self.figure: Figure = plt.figure(figsize=(width, height), facecolor="none", layout="none")
        plt.close(self.figure)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(0, height))
        self.axes.axis("off")
        self.axes.add_patch(
            FancyBboxPatch(
                (0.02, 0.02),
                width - 0.04,
                height - 0.04,
                boxstyle="round,pad=0,rounding_size=0.12",
                facecolor="white",
                edgecolor="#D0D0D0",
                linewidth=0.8,
                zorder=-10,
            )
        )
        lines = textwrap.wrap(title, int((width - 0.4) / 0.087))
        self.axes.text(0.2, height - 0.14, "\n".join(lines), fontsize=11, color=INK, va="top", linespacing=1.2)
        self.top = height - 0.2 - 0.19 * len(lines)

    def label(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 9,
        colour: str = MUTED,
        align: Literal["left", "center", "right"] = "center",
        **style: Any,
    ) -> Any:
        """A line of text, vertically centred on `y`; `colour` is a role or any colour.  Returns matplotlib's Text."""
        return self.axes.text(
            x, y, text, fontsize=size, color=COLOURS.get(colour, colour), ha=align, va="center", **style
        )

    def token(
        self,
        x: float,
        y: float,
        text: str,
        role: str = "plain",
        width: float | None = None,
        height: float = 0.32,
        size: float = 9,
        strength: float = 0.2,
    ) -> Box:
        """A rounded box with its middle at `(x, y)`, as wide as its text unless `width` is given.

        A refused token is struck through and has a dashed edge, an untested one a dotted edge: no reading depends on
        colour alone.
        """
        from matplotlib.patches import FancyBboxPatch

        box = Box(x, y, width or text_width(text, size) + 0.2, height)
        self.axes.add_patch(
            FancyBboxPatch(
                (box.left, y - height / 2),
                box.width,
                height,
                boxstyle="round,pad=0,rounding_size=0.06",
                facecolor=tint(role, strength),
                edgecolor=COLOURS[role],
                linewidth=1.3,
                linestyle={"refused": (0, (4, 2)), "untested": (0, (1, 1.5))}.get(role, "-"),
                zorder=2,
            )
        )
        self.label(x, y, text, size, INK, zorder=3)
        if role == "refused" and text:
            half = text_width(text, size) / 2 + 0.03
            self.line((x - half, y), (x + half, y), "refused")
        return box

    def row(
        self,
        texts: Sequence[str],
        x: float,
        y: float,
        roles: str | Sequence[str] = "plain",
        width: float | None = None,
        gap: float = 0.08,
        **style: Any,
    ) -> list[Box]:
        """Token boxes side by side, the left edge of the first at `x`.

        Args:
            roles: one for all, or one each.
            width: of every box; without it each is as wide as its text.
            style: as in `token`.
        """
        each = [roles] * len(texts) if isinstance(roles, str) else list(roles)
        boxes: list[Box] = []
        for text, role in zip(texts, each, strict=True):
            wide = width or text_width(text, style.get("size", 9)) + 0.2
            boxes.append(self.token(x + wide / 2, y, text, role, wide, **style))
            x += wide + gap
        return boxes

    def line(self, start: Point, end: Point, colour: str = MUTED, width: float = 1.3, style: Any = "-") -> None:
        """A straight line."""
        self.axes.plot(
            [start[0], end[0]],
            [start[1], end[1]],
            color=COLOURS.get(colour, colour),
            linewidth=width,
            linestyle=style,
            zorder=4,
        )

    def arrow(
        self,
        start: Point,
        end: Point,
        caption: str = "",
        colour: str = MUTED,
        bend: float = 0.0,
        at: float = 0.5,
        width: float = 1.3,
        size: float = 8.5,
    ) -> None:
        """An arrow; its caption stands on a white ground on the arrow, `at` 0 to 1 of the way.

        Args:
            bend: 0 is straight; 0.3 curves to the right of the way, -0.3 to the left.
        """
        from matplotlib.patches import FancyArrowPatch

        self.axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="-|>",
                mutation_scale=9,
                shrinkA=1.5,
                shrinkB=1.5,
                connectionstyle=f"arc3,rad={bend}",
                color=COLOURS.get(colour, colour),
                linewidth=width,
                zorder=1,
            )
        )
        if caption:
            (x0, y0), (x1, y1) = start, end
            # a quadratic curve lies half as far from its chord as its control point
            aside = 2 * at * (1 - at) * bend
            x, y = x0 + at * (x1 - x0) + aside * (y1 - y0), y0 + at * (y1 - y0) - aside * (x1 - x0)
            ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            self.label(x, y, caption, size, INK, bbox=ground, zorder=3)

    def bracket(
        self,
        left: float,
        right: float,
        y: float,
        caption: str = "",
        side: Literal["below", "above"] = "below",
        colour: str = MUTED,
        size: float = 8.5,
    ) -> None:
        """A flat bracket from `left` to `right` at height `y` with a caption on its outer side."""
        tip = 0.07 if side == "below" else -0.07
        self.axes.plot(
            [left, left, right, right],
            [y + tip, y, y, y + tip],
            color=COLOURS.get(colour, colour),
            linewidth=1.2,
            linestyle="-",
            zorder=1,
        )
        if caption:
            lines = caption.count("\n") + 1
            away = 0.07 + 0.075 * lines
            self.label((left + right) / 2, y - away if side == "below" else y + away, caption, size, colour)


def text_width(text: str, size: float = 9) -> float:
    """Width of a line in inches, in the font that is set."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    drawn = text.replace("$", "")  # mathematics is wider in source than on paper
    if not drawn.strip():
        return 0.1
    return float(TextPath((0, 0), drawn, size=size, prop=FontProperties()).get_extents().width) / 72


def faults(figure: Figure) -> list[str]:
    """What a reader could not read: texts that overlap one another or leave the figure.  Empty for a good drawing.

    For tests: `assert faults(scoring_pass(...)) == []`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    # the text itself, not the white ground around it
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    places = [(t.get_text(), Text.get_window_extent(t, renderer)) for t in texts]
    page = figure.bbox
    found = [
        f"{text!r} leaves the figure"
        for text, box in places
        if box.x0 < page.x0 or box.y0 < page.y0 or box.x1 > page.x1 or box.y1 > page.y1
    ]
    for i, (text, box) in enumerate(places):
        for other, second in places[i + 1 :]:
            across = min(box.x1, second.x1) - max(box.x0, second.x0)
            up = min(box.y1, second.y1) - max(box.y0, second.y0)
            if across > 1 and up > 1:  # a pixel of ink's empty margin is no fault
                found.append(f"{text!r} overlaps {other!r}")
    return found
