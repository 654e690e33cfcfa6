"""How much may stay: rankings, budgets, and the plans that meet them."""

from spalier.budget.select import select

__all__ = ["select"]
