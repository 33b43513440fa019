"""Schematics of the notebooks, drawn by functions: each returns a matplotlib Figure."""

from __future__ import annotations

from .canvas import COLOURS, INK, MUTED, Box, Canvas, faults, tint, visible

__all__ = ["COLOURS", "INK", "MUTED", "Box", "Canvas", "faults", "tint", "visible"]
