"""Schematics: drawn from what a notebook computed, so that a picture never disagrees with its text."""
