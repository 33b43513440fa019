"""Tiny pairs in float64, where rounding decides nothing: a text is equal or it is not."""

from dataclasses import dataclass
from typing import Any

import pytest

import specdec_lib as sd
from specdec_lib.models import load_model, load_tokenizer, load_transformers
from specdec_lib.studies.both_sides import disturbed


@dataclass
class Case:
    """A pair of ours and the same target as transformers loads it."""

    pair: sd.Pair
    model: Any

    def with_draft(self, draft):
        return sd.Pair(self.pair.target, draft, self.pair.tokenizer)

    def decode(self, ids):
        return self.pair.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    """`tiny(kind, noise, **settings) -> Case`: a target and a noisy copy of it as the draft, made once."""
    made = {}

    def make(kind="llama", noise=0.3, **settings):
        key = (kind, noise, *settings.items())
        if key not in made:
            folder = tiny_folder(kind, **settings)
            draft = disturbed(load_transformers(folder, "cpu", "float64"), noise)
            pair = sd.Pair(load_model(folder, "cpu", "float64"), draft, load_tokenizer(folder))
            made[key] = Case(pair, load_transformers(folder, "cpu", "float64"))
        return made[key]

    return make
