"""Models: loading, and sessions that feed tokens, read logits and roll back."""

from .pair import Pair, load_model, load_tokenizer, load_transformers
from .session import Session, open_session

__all__ = ["Pair", "Session", "load_model", "load_tokenizer", "load_transformers", "open_session"]
