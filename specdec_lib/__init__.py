"""A laboratory for lossless draft-then-verify decoding (speculative decoding).

>>> import specdec_lib as sd
>>> sorted(sd.__all__)[:3]
['ComposedDrafter', 'Drafter', 'EarlyExitDrafter']
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decode import Generation, generate, generate_plain
    from .drafters import (
        ComposedDrafter,
        Drafter,
        EarlyExitDrafter,
        FeatureDrafter,
        ModelDrafter,
        NGramDrafter,
        PromptLookupDrafter,
        SharedVocabularyDrafter,
        TextDrafter,
    )
    from .errors import SpecdecError
    from .generation_settings import processors_of
    from .load import load_pair
    from .models import Pair

# Names are imported on first use: torch and transformers take seconds, `import specdec_lib` must not.
_HOME = {
    "ComposedDrafter": "drafters",
    "Drafter": "drafters",
    "EarlyExitDrafter": "drafters",
    "FeatureDrafter": "drafters",
    "Generation": "decode",
    "ModelDrafter": "drafters",
    "NGramDrafter": "drafters",
    "Pair": "models",
    "PromptLookupDrafter": "drafters",
    "SharedVocabularyDrafter": "drafters",
    "SpecdecError": "errors",
    "TextDrafter": "drafters",
    "generate": "decode",
    "generate_plain": "decode",
    "load_pair": "load",
    "processors_of": "generation_settings",
}
__all__ = [
    "ComposedDrafter",
    "Drafter",
    "EarlyExitDrafter",
    "FeatureDrafter",
    "Generation",
    "ModelDrafter",
    "NGramDrafter",
    "Pair",
    "PromptLookupDrafter",
    "SharedVocabularyDrafter",
    "SpecdecError",
    "TextDrafter",
    "generate",
    "generate_plain",
    "load_pair",
    "processors_of",
]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
