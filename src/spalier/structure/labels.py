"""Labels: a number for every channel, and the facts that say which channels can only go together.

Every axis of every parameter and buffer gets one label per index. The walk over the graph (`walk`) collects three
kinds of facts about them:

- *pairs*: two labels are one;
- *rules*: a label is gone as soon as one of several others is. A view of an axis as (heads, head size) gives such a
  rule: entry (h, d) is gone where head h or position d is gone. So what is split stays a rectangle, and whole heads and
  positions in every head can both be pruned;
- *frozen* labels, each with the reason.

Facts are resolved once, when all of them are known, so nothing depends on the order of the walk. Every fact takes
freedom away and none gives any: one too many prunes less, never wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
NONE = -1
"""Stands where there is no label: an entry that always stays."""


@dataclass(frozen=True)
class LabelledAxis:
    """An axis and its labels, which are consecutive numbers."""

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
        """Entry by entry, these are one; a label that is paired with none must stay."""
        both = (a != NONE) & (b != NONE)
        if both.all():  # mostly: no copies then
            self._pairs.append((a, b))
            return
        self._pairs.append((a[both], b[both]))
        self.freeze(np.concatenate([a[~both], b[~both]]), reason)

    def define(self, labels: Ints, members: Ints, reason: str) -> None:
        """Entry by entry, a label is gone where any of its members (k, entries) is."""
        # without a label on one side there is nothing to be gone with, so the other side must stay
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
    """For each label, the smallest one that it is paired with, directly or through others."""
    reasons: dict[int, str]
    """Why a root must stay."""
    derived: Ints
    """The roots that rules define by others."""
    members: Ints
    """The roots that each of these is gone with, (most, derived), filled up with NONE; none of them is derived."""

    def atoms(self, labels: Ints) -> tuple[Ints, Ints]:
        """The *atoms*, free roots that no rule defines, that labels are gone with.

        Returns positions in ``labels``, and the atom at each. A label that is derived from several atoms has a position
        for each; one that must stay has none.
        """
        # a ragged gather: the atoms of root r are _flat[_starts[r]:][:_counts[r]]
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
        counts[self.derived] = (self.members != NONE).sum(0)
        return counts

    @cached_property
    def _starts(self) -> Ints:
        return np.concatenate([[0], np.cumsum(self._counts)[:-1]])

    @cached_property
    def _flat(self) -> Ints:
        """The atoms of all roots, one after the other."""
        flat = np.repeat(np.arange(len(self._counts)), self._counts)  # a plain root is its own atom
        counts = self._counts[self.derived]
        starts = np.repeat(self._starts[self.derived] - np.cumsum(counts) + counts, counts)
        flat[starts + np.arange(counts.sum())] = self.members.T[self.members.T != NONE]
        return flat


class _Resolution:
    """Applies pairs, rules and frozen labels until nothing changes.

    All of it is array arithmetic over labels: networks have up to a million of them.
    """

    def __init__(
        self, size: int, pairs: list[tuple[Ints, Ints]], rules: list[tuple[Ints, Ints]], frozen: list[tuple[Ints, str]]
    ) -> None:
        empty = np.empty(0, np.int64)
        self.root = np.arange(size)
        self.left = np.concatenate([a for a, _ in pairs] or [empty])
        self.right = np.concatenate([b for _, b in pairs] or [empty])
        self.labels, self.members = _table(rules)
        self.reason = np.full(size, -1)
        """For a root that must stay, the index of the first reason in ``texts``; else -1."""
        self.texts = [text for _, text in frozen]
        self._connect()
        for index, (labels, _) in enumerate(frozen):
            self._hold(self.root[labels], np.full(len(labels), index))

    def run(self) -> Resolved:
        while True:
            live = self._live()
            if self._follow(live):
                continue
            derived, members = self._definitions(live)
            expanded = _expanded(derived, members, len(self.root))
            if expanded is not None:
                return Resolved(self.root, self._reasons(), derived, expanded)
            circle = _circle({int(d): tuple(m[m != NONE]) for d, m in zip(derived, members.T, strict=True)})
            # each is gone with the next, so all of a circle are one
            self._merge(np.array(circle[:-1]), np.array(circle[1:]))

    def _live(self) -> Mask:
        """Which members of each rule count: those that may go, each once."""
        roots = self.root[np.maximum(self.members, 0)]  # (most, rules); what NONE finds is masked out below
        live: Mask = (self.members != NONE) & (self.reason[roots] < 0)
        for index in range(1, len(roots)):
            for earlier in range(index):
                live[index] &= ~(live[earlier] & (roots[index] == roots[earlier]))
        return live

    def _follow(self, live: Mask) -> bool:
        """Draw the conclusions of every rule as things stand; False where there are none."""
        if not self.labels.size:
            return False
        own = self.root[self.labels]  # (rules,)
        members = self.root[np.maximum(self.members, 0)]  # (most, rules)
        roots = np.where(live, members, NONE)
        count = live.sum(0)  # how many members of each rule may go
        held = self.reason[own] >= 0
        emptied, several = (count == 0) & ~held, (count > 1) & ~held
        # a label that stays keeps all its members; one whose members all stay, stays
        self._hold(roots[:, held], np.broadcast_to(self.reason[own[held]], roots[:, held].shape))
        self._hold(own[emptied], self.reason[members[:, emptied]].max(0))
        # gone with one other label alone: the two are one. A member of itself: all its members are one
        single = (count == 1) & ~held
        inside = (roots == own).any(0) & several
        pairs = [(own[single], roots[:, single].max(0))]
        pairs += [(own[inside], np.where(live[k], roots[k], own)[inside]) for k in range(len(roots))]
        agreed, misfits = self._agree(own, roots, live, several & ~inside)
        pairs += agreed
        left, right = np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])
        news = left != right
        if news.any():
            self._merge(left[news], right[news])
        return bool((held & (count > 0)).any() or emptied.any() or misfits or news.any())

    def _agree(self, own: Ints, roots: Ints, live: Mask, chosen: Mask) -> tuple[list[tuple[Ints, Ints]], bool]:
        """Two rules for one label: their members are the same, one by one. If they cannot be, all of them stay.

        Returns the pairs, and whether some rules did not fit.
        """
        # rules of one label are neighbours once they are sorted; neighbours are compared, and the rest follows in turn
        order = np.flatnonzero(chosen)
        order = order[np.argsort(own[order], kind="stable")]
        same = own[order[:-1]] == own[order[1:]]
        first, second = order[:-1][same], order[1:][same]
        unlike = (live[:, first] != live[:, second]).any(0)
        if unlike.any():
            self.texts.append("it is split in two ways that do not fit")
            for part in (first[unlike], second[unlike]):
                self._hold(roots[:, part], np.full(roots[:, part].shape, len(self.texts) - 1))
        pairs = zip(roots[:, first[~unlike]], roots[:, second[~unlike]], strict=True)
        return [(a[a != NONE], b[a != NONE]) for a, b in pairs], bool(unlike.any())

    def _hold(self, roots: Ints, reasons: Ints) -> None:
        """These must stay; the first reason of each counts."""
        roots, reasons = roots.ravel(), reasons.ravel()
        free = (roots != NONE) & (self.reason[np.maximum(roots, 0)] < 0)
        self.reason[roots[free]] = reasons[free]

    def _merge(self, left: Ints, right: Ints) -> None:
        self.left, self.right = np.concatenate([self.left, left]), np.concatenate([self.right, right])
        self._connect()

    def _connect(self) -> None:
        """Connected components: hook the larger root to the smaller, shorten all paths, carry the reasons along."""
        a, b, root = self.left, self.right, self.root
        while True:
            low, high = np.minimum(root[a], root[b]), np.maximum(root[a], root[b])
            if np.array_equal(low, high):
                break
            np.minimum.at(root, high, low)  # several may want the same root: the smallest wins
            while not np.array_equal(root, root[root]):
                root = root[root]
        self.root = root
        held = np.flatnonzero(self.reason >= 0)
        self._hold(root[held], self.reason[held])

    def _reasons(self) -> dict[int, str]:
        roots = np.flatnonzero((self.root == np.arange(len(self.root))) & (self.reason >= 0))
        return {int(root): self.texts[self.reason[root]] for root in roots}

    def _definitions(self, live: Mask) -> tuple[Ints, Ints]:
        """The roots that rules define, and the members of each; its rules agree by now, so the first one does."""
        several = live.sum(0) > 1
        derived, first = np.unique(self.root[self.labels[several]], return_index=True)
        roots = np.where(live, self.root[np.maximum(self.members, 0)], NONE)
        return derived, roots[:, several][:, first]


def _table(rules: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """All rules as one table: labels, and the members of each (most, labels), filled up with NONE."""
    if not rules:
        return np.empty(0, np.int64), np.empty((1, 0), np.int64)
    most = max(len(members) for _, members in rules)
    filled = [np.concatenate([members, np.full((most - len(members), members.shape[1]), NONE)]) for _, members in rules]
    return np.concatenate([labels for labels, _ in rules]), np.concatenate(filled, axis=1)


def _expanded(derived: Ints, members: Ints, size: int) -> Ints | None:
    """Members that are derived themselves give way to their own members; None if that has no end."""
    place = np.full(size + 1, NONE)  # the last entry is what NONE finds, as index -1
    place[derived] = np.arange(len(derived))
    table = members
    for _ in range(32):  # deeper than views of views ever are, so there is a circle
        inner = place[table]
        if (inner == NONE).all():
            table = np.sort(table, axis=0)
            table[1:][table[1:] == table[:-1]] = NONE  # the same member twice counts once
            return table
        deeper = np.where(inner == NONE, NONE, members[:, inner]).reshape(-1, len(derived))
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
