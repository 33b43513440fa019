"""Proofs by enumeration: tabular models with rational probabilities, and the exact law of the output of any rule."""

from .law import OutputLaw, accepted_law, cut_after_end, distance, output_law, round_law, target_law
from .models import KINDS, Draft, TabularModel, constant_model, fractions, random_model, random_pair

__all__ = [
    "KINDS",
    "Draft",
    "OutputLaw",
    "TabularModel",
    "accepted_law",
    "constant_model",
    "cut_after_end",
    "distance",
    "fractions",
    "output_law",
    "random_model",
    "random_pair",
    "round_law",
    "target_law",
]
