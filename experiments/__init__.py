"""Experiments with Spalier, and what came out of them."""
