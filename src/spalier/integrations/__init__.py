"""Pruning inside of other libraries' training loops; each module needs its library."""
