"""Drafters: a model, a table, lookup, early exit, the target's features, several composed, other tokenizers."""

from ..sampling import SamplingParams
from .base import Draft, DraftBatch, Drafter, DraftSession
from .composed import ComposedDrafter
from .early_exit import EarlyExitDrafter
from .features import FeatureDrafter
from .lookup import PromptLookupDrafter
from .model import ModelDrafter, as_drafter
from .ngram import NGramDrafter
from .other_tokenizer import SharedVocabularyDrafter, TextDrafter

__all__ = [
    "ComposedDrafter",
    "Draft",
    "DraftBatch",
    "DraftSession",
    "Drafter",
    "EarlyExitDrafter",
    "FeatureDrafter",
    "ModelDrafter",
    "NGramDrafter",
    "PromptLookupDrafter",
    "SamplingParams",
    "SharedVocabularyDrafter",
    "TextDrafter",
    "as_drafter",
]
