"""Labels: a number for every channel, and what is known of which of them live and die together.

Three kinds of facts are collected, in any order, and resolved once:

- *pairs*: two labels are one;
- *rules*: a label is gone as soon as one of several others is. A view of an axis as (heads, head size) gives such a
  rule: entry (h, d) is gone where head h or position d is gone, so an array that is split stays a rectangle;
- *frozen* labels, each with the reason.

Every fact only ever takes freedom away, so adding one that is not needed prunes less, never wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NONE = -1
"""Stands where there is no label: an entry that is always there."""


@dataclass(frozen=True)
class LabelledAxis:
    """An axis, of a parameter or made by a view, and the run of labels that it was given."""

    owner: str
    """The parameter's name; empty for an axis that a view made."""
    axis: int
    start: int
    size: int


class Labels:
    """All that is known of the labels of a network."""

    def __init__(self) -> None:
        self.axes: list[LabelledAxis] = []
        self.size = 0
        self._pairs: list[tuple[Ints, Ints]] = []
        self._rules: list[tuple[Ints, Ints]] = []
        self._frozen: list[tuple[Ints, str]] = []

    def new(self, size: int, owner: str = "", axis: int = 0) -> Ints:
        """Fresh labels for an axis."""
        self.axes.append(LabelledAxis(owner, axis, self.size, size))
        self.size += size
        return np.arange(self.size - size, self.size)

    def freeze(self, labels: Ints, reason: str) -> None:
        """These must stay."""
        labels = np.unique(labels)
        labels = labels[labels != NONE]
        if labels.size:
            self._frozen.append((labels, reason))

    def pair(self, a: Ints, b: Ints, reason: str) -> None:
        """Entry by entry, these are one; what meets no label must stay."""
        both = (a != NONE) & (b != NONE)
        if both.all():
            self._pairs.append((a, b))
            return
        self._pairs.append((a[both], b[both]))
        self.freeze(np.concatenate([a[~both], b[~both]]), reason)

    def define(self, labels: Ints, members: Ints, reason: str) -> None:
        """Entry by entry, a label is gone where any of its members (k, entries) is."""
        unlabelled = (labels == NONE) | (members == NONE).all(0)
        self.freeze(np.concatenate([labels[unlabelled], members[:, unlabelled].ravel()]), reason)
        self._rules.append((labels[~unlabelled], members[:, ~unlabelled]))

    def resolved(self) -> Resolved:
        """Which labels are one, which are free to go, and why the others are not."""
        return _Resolution(self.size, self._pairs, self._rules, self._frozen).run()


@dataclass(frozen=True)
class Resolved:
    """What became of every label."""

    root: Ints
    """The smallest label that each is one with."""
    reasons: dict[int, str]
    """Why a root must stay."""
    made: Ints
    """The roots that rules make of others."""
    members: Ints
    """The roots that each of these is gone with, (most, roots), filled up with NONE; none of them is made of others."""

    def atoms(self, labels: Ints) -> tuple[Ints, Ints]:
        """The free roots that labels are gone with: positions in ``labels``, and the root at each; a label that is made
        of several has several, one that must stay has none."""
        roots = np.where(labels == NONE, len(self.root), self.root[np.maximum(labels, 0)])
        counts = self._counts[roots]
        starts = np.repeat(self._starts[roots] - np.cumsum(counts) + counts, counts)
        positions = np.repeat(np.arange(len(labels)), counts)
        return positions, self._flat[starts + np.arange(len(positions))]

    @cached_property
    def _counts(self) -> Ints:
        """How many atoms each root has; the last entry is for what has no label."""
        counts = np.append(np.ones(len(self.root), np.int64), 0)
        counts[list(self.reasons)] = 0
        counts[self.made] = (self.members != NONE).sum(0)
        return counts

    @cached_property
    def _starts(self) -> Ints:
        return np.concatenate([[0], np.cumsum(self._counts)[:-1]])

    @cached_property
    def _flat(self) -> Ints:
        """The atoms of all roots, one after the other."""
        flat = np.repeat(np.arange(len(self._counts)), self._counts)
        counts = self._counts[self.made]
        places = np.repeat(self._starts[self.made] - np.cumsum(counts) + counts, counts) + np.arange(
            counts.sum()
        )
        flat[places] = self.members.T[self.members.T != NONE]
        return flat


class _Resolution:
    """Apply pairs, rules and frozen labels until nothing changes."""

    def __init__(
        self,
        size: int,
        pairs: list[tuple[Ints, Ints]],
        rules: list[tuple[Ints, Ints]],
        frozen: list[tuple[Ints, str]],
    ) -> None:
        empty = np.empty(0, np.int64)
        self.root = np.arange(size)
        self.left = np.concatenate([a for a, _ in pairs] or [empty])
        self.right = np.concatenate([b for _, b in pairs] or [empty])
        self.rules = rules
        self.reason: npt.NDArray[Any] = np.full(size, -1)
        """For a root, the index of the first reason why it must stay."""
        self.texts = [text for _, text in frozen]
        self._connect()
        for index, (labels, _) in enumerate(frozen):
            roots = self.root[labels]
            self.reason[roots[self.reason[roots] < 0]] = index

    def run(self) -> Resolved:
        labels, members = self._flat_rules()
        while True:
            live = self._live(members)
            if self._follow(labels, members, live):
                continue
            made, table = self._members(labels, members, live)
            expanded = _expanded(made, table, len(self.root))
            if expanded is not None:
                return Resolved(self.root, self._reasons(), made, expanded)
            circle = _circle({int(m): tuple(row[row != NONE]) for m, row in zip(made, table.T, strict=True)})
            self._merge(
                np.array(circle[:-1]), np.array(circle[1:])
            )  # each is gone with the next: all are one

    def _flat_rules(self) -> tuple[Ints, Ints]:
        """All rules as one table, filled up with NONE."""
        if not self.rules:
            return np.empty(0, np.int64), np.empty((1, 0), np.int64)
        most = max(len(members) for _, members in self.rules)
        filled = [
            np.concatenate([members, np.full((most - len(members), members.shape[1]), NONE)])
            for _, members in self.rules
        ]
        return np.concatenate([labels for labels, _ in self.rules]), np.concatenate(filled, axis=1)

    def _live(self, members: Ints) -> npt.NDArray[np.bool_]:
        roots = self.root[np.maximum(members, 0)]
        live: npt.NDArray[np.bool_] = (members != NONE) & (self.reason[roots] < 0)
        for index in range(1, len(members)):  # the same member twice counts once
            for earlier in range(index):
                live[index] &= ~(live[earlier] & (roots[index] == roots[earlier]))
        return live

    def _follow(self, labels: Ints, members: Ints, live: npt.NDArray[np.bool_]) -> bool:
        """Draw the conclusions of every rule as things stand; False where there are none."""
        if not labels.size:
            return False
        own, roots = self.root[labels], np.where(live, self.root[np.maximum(members, 0)], NONE)
        count = live.sum(0)
        held = self.reason[own] >= 0
        self._hold(roots[:, held], np.broadcast_to(self.reason[own[held]], roots[:, held].shape))
        emptied = (count == 0) & ~held
        all_roots = self.root[np.maximum(members, 0)]
        self._hold(own[emptied], self.reason[all_roots[:, emptied]].max(0))
        single = (count == 1) & ~held
        pairs = [(own[single], roots[:, single].max(0))]
        inside = ((roots == own) & live).any(0) & (count > 1) & ~held  # part of itself: all of it is one
        pairs += [(own[inside], np.where(live[k], roots[k], own)[inside]) for k in range(len(roots))]
        pairs += self._agree(own, roots, live, (count > 1) & ~held & ~inside)
        left, right = np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])
        news = left != right
        frozen = bool((held & (count > 0)).any() or emptied.any())
        if news.any():
            self._merge(left[news], right[news])
        return frozen or bool(news.any()) or self._froze

    def _agree(
        self, own: Ints, roots: Ints, live: npt.NDArray[np.bool_], chosen: npt.NDArray[np.bool_]
    ) -> list[tuple[Ints, Ints]]:
        """Two rules of one label have the same members, one by one; of another number, all of them stay."""
        self._froze = False
        order = np.flatnonzero(chosen)
        order = order[np.argsort(own[order], kind="stable")]
        first, second = order[:-1], order[1:]
        same = own[first] == own[second]
        first, second = first[same], second[same]
        unlike = (live[:, first] != live[:, second]).any(0)
        if unlike.any():
            self.texts.append("it is split in two ways that do not fit")
            for part in (first[unlike], second[unlike]):
                self._hold(roots[:, part], np.full(roots[:, part].shape, len(self.texts) - 1))
            self._froze = True
        first, second = first[~unlike], second[~unlike]
        return [(a[a != NONE], b[a != NONE]) for a, b in zip(roots[:, first], roots[:, second], strict=True)]

    def _hold(self, roots: Ints, reasons: Ints) -> None:
        roots, reasons = roots.ravel(), reasons.ravel()
        free = (roots != NONE) & (self.reason[np.maximum(roots, 0)] < 0)
        self.reason[roots[free]] = reasons[free]

    def _merge(self, left: Ints, right: Ints) -> None:
        self.left, self.right = np.concatenate([self.left, left]), np.concatenate([self.right, right])
        self._connect()

    def _connect(self) -> None:
        """Hook the larger root to the smaller, shorten all paths, and carry the reasons along."""
        a, b, root = self.left, self.right, self.root
        while True:
            low, high = np.minimum(root[a], root[b]), np.maximum(root[a], root[b])
            if np.array_equal(low, high):
                break
            np.minimum.at(root, high, low)
            while not np.array_equal(root, root[root]):
                root = root[root]
        self.root = root
        held = np.flatnonzero(self.reason >= 0)
        free = self.reason[root[held]] < 0
        self.reason[root[held][free]] = self.reason[held][free]

    def _reasons(self) -> dict[int, str]:
        roots = np.flatnonzero((self.root == np.arange(len(self.root))) & (self.reason >= 0))
        return {int(root): self.texts[self.reason[root]] for root in roots}

    def _members(self, labels: Ints, members: Ints, live: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
        several = live.sum(0) > 1
        made, first = np.unique(self.root[labels[several]], return_index=True)
        roots = np.where(live, self.root[np.maximum(members, 0)], NONE)
        return made, roots[:, several][:, first]


def _expanded(made: Ints, members: Ints, size: int) -> Ints | None:
    """Members that are made of others give way to these, until none is; None if that has no end."""
    place = np.full(size + 1, NONE)  # the last entry is what NONE finds
    place[made] = np.arange(len(made))
    table = members
    for _ in range(32):
        inner = place[table]
        if (inner == NONE).all():
            table = np.sort(table, axis=0)
            table[1:][table[1:] == table[:-1]] = NONE  # the same member twice counts once
            return table
        deeper = np.where(inner == NONE, NONE, members[:, inner]).reshape(-1, len(made))
        table = np.concatenate([np.where(inner == NONE, table, NONE), deeper])
        table = table[(table != NONE).any(1)]
    return None


def _circle(members: dict[int, tuple[int, ...]]) -> list[int]:
    """Labels of which each is a member of the one before, from a label back to itself; empty if there are none."""
    done: set[int] = set()
    for start in members:
        path: list[int] = []
        stack = [(start, 0)]
        while stack:
            label, depth = stack.pop()
            del path[depth:]
            if label in path:
                return [*path[path.index(label) :], label]
            if label in done or label not in members:
                continue
            path.append(label)
            stack += [(member, depth + 1) for member in members[label]]
        done.update(members[start], (start,))
    return []
