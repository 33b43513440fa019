"""Drafters: a draft model, an n-gram table, prompt lookup."""

from .base import Draft, Drafter, DraftSession, Sampling, as_drafter
from .lookup import PromptLookupDrafter
from .model import ModelDrafter
from .ngram import NGramDrafter

__all__ = [
    "Draft",
    "DraftSession",
    "Drafter",
    "ModelDrafter",
    "NGramDrafter",
    "PromptLookupDrafter",
    "Sampling",
    "as_drafter",
]
