"""Algorithms that one notebook needs and a test must reach.  The product does not import them."""
