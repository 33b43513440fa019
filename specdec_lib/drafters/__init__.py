"""Drafters: a draft model, an n-gram table, prompt lookup, early exit, and several composed."""

from .base import Draft, Drafter, DraftSession, Sampling
from .composed import ComposedDrafter
from .early_exit import EarlyExitDrafter
from .lookup import PromptLookupDrafter
from .model import ModelDrafter, as_drafter
from .ngram import NGramDrafter

__all__ = [
    "ComposedDrafter",
    "Draft",
    "DraftSession",
    "Drafter",
    "EarlyExitDrafter",
    "ModelDrafter",
    "NGramDrafter",
    "PromptLookupDrafter",
    "Sampling",
    "as_drafter",
]
