"""Paired timing of decoders over a set of prompts, and what the runtime analysis needs from it."""
