"""Reports: one page, and figures for papers, of a run, a sweep, a store or a folder of runs."""

from spalier.reporting.page import report

__all__ = ["report"]
