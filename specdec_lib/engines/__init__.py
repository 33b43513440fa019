"""Who decodes, behind one protocol: our decoder, and transformers' own."""

from .base import Engine, Reply
from .hf import TransformersEngine
from .ours import OurEngine

__all__ = ["Engine", "OurEngine", "Reply", "TransformersEngine"]
