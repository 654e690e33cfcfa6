"""The experiments of the paper, run again: ``python3 dev.py paper --help``."""
