"""Tasks: one tiny, safe file each; a folder of them; one base that becomes any of them in milliseconds."""

from spalier.tasks.format import SUFFIX, check_name
from spalier.tasks.store import Store
from spalier.tasks.switcher import Switcher
from spalier.tasks.task import Task

__all__ = ["SUFFIX", "Store", "Switcher", "Task", "check_name"]
