"""Drafters: a draft model, an n-gram table, prompt lookup, early exit, several composed, and other tokenizers."""

from .base import Draft, Drafter, DraftSession, Sampling
from .composed import ComposedDrafter
from .early_exit import EarlyExitDrafter
from .lookup import PromptLookupDrafter
from .model import ModelDrafter, as_drafter
from .ngram import NGramDrafter
from .other_tokenizer import SharedVocabularyDrafter, TextDrafter

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
    "SharedVocabularyDrafter",
    "TextDrafter",
    "as_drafter",
]
