"""Tasks: one tiny, safe file each; a folder of them; one base that becomes any of them in milliseconds."""

from spalier.tasks.format import SUFFIX, check_name
from spalier.tasks.store import Store, StoreReport, TaskCost
from spalier.tasks.switcher import Switcher
from spalier.tasks.task import Task, TaskInfo

__all__ = ["SUFFIX", "Store", "StoreReport", "Switcher", "Task", "TaskCost", "TaskInfo", "check_name"]
