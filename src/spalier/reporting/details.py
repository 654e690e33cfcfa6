"""What is seen of one task: classes, confusions, examples, and the scores before its prune."""

from __future__ import annotations

from collections.abc import Iterator

from spalier.reporting.classes import confusion, per_class
from spalier.reporting.examples import examples
from spalier.reporting.figure import Figure
from spalier.reporting.model import Entry
from spalier.reporting.scores import scores


def details(entry: Entry, name: str) -> Iterator[Figure]:
    """All figures of a task that its files have something for."""
    part = next((p for p in ("test", "validation") if entry.confusion.get(p)), None)
    if part is not None:
        yield per_class(entry, entry.confusion[part], part, name)
    if entry.scores is not None and entry.scores.streams:
        yield scores(entry, entry.scores, name)
    if part is not None:
        yield confusion(entry, entry.confusion[part], part, name)
    if entry.examples:
        yield examples(entry, name)
