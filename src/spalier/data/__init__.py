"""Data sets by name or of your own: checked, decoded once, split, and loaded in batches that repeat exactly."""

from spalier.data.data import BadFile, Data, Split
from spalier.data.loader import Loader
from spalier.data.sources import open_data
from spalier.data.texts import texts_of

__all__ = ["BadFile", "Data", "Loader", "Split", "open_data", "texts_of"]
