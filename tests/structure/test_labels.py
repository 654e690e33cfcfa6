"""Labels: whatever is said of them, taking out a unit never breaks a pair, a rule or a frozen label."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spalier.structure.labels import NONE, Labels

SIZE = 9
label = st.integers(0, SIZE - 1)
pairs = st.lists(st.tuples(label, label), max_size=6)
rules = st.lists(st.tuples(label, st.lists(label, min_size=2, max_size=3, unique=True)), max_size=4)
frozen = st.lists(label, max_size=2)


def resolve(pairs, rules, frozen):
    labels = Labels()
    labels.new(SIZE, "weight")
    for a, b in pairs:
        labels.pair(np.array([a]), np.array([b]), "met nothing")
    for a, members in rules:
        labels.define(np.array([a]), np.array(members)[:, None], "met nothing")
    for each in frozen:
        labels.freeze(np.array([each]), "asked")
    return labels.resolved()


def gone_with(resolved, atom):
    """The labels that are gone where one atom is, by the definition."""
    positions, atoms = resolved.atoms(np.arange(SIZE))
    return {int(p) for p, a in zip(positions, atoms, strict=True) if a in atom}


@settings(max_examples=300, deadline=None)
@given(pairs, rules, frozen, st.integers(0, 2**SIZE - 1))
def test_any_set_of_units_can_go(pairs, rules, frozen, chosen):
    resolved = resolve(pairs, rules, frozen)
    units = sorted({int(a) for a in resolved.atoms(np.arange(SIZE))[1]})
    gone = gone_with(resolved, {u for i, u in enumerate(units) if chosen >> i & 1})
    assert all((a in gone) == (b in gone) for a, b in pairs)
    assert all((a in gone) == bool(gone & set(members)) for a, members in rules)
    assert not gone & set(frozen)


def test_what_nothing_is_said_of_is_free():
    resolved = resolve([], [], [])
    assert [gone_with(resolved, {a}) for a in range(SIZE)] == [{a} for a in range(SIZE)]


def test_a_rule_leaves_rows_and_columns_free():
    """Six entries of a 2 x 3 array: each is gone with its row or its column, and with nothing else."""
    labels = Labels()
    array, rows, columns = labels.new(6, "weight"), labels.new(2), labels.new(3)
    grid = np.meshgrid(rows, columns, indexing="ij")
    labels.define(array, np.stack([g.ravel() for g in grid]), "")
    positions, atoms = labels.resolved().atoms(array)
    assert {a: sorted(positions[atoms == a].tolist()) for a in np.unique(atoms).tolist()} == {
        6: [0, 1, 2],
        7: [3, 4, 5],
        8: [0, 3],
        9: [1, 4],
        10: [2, 5],
    }


def test_a_frozen_row_makes_columns_plain_channels():
    labels = Labels()
    array, rows, columns = labels.new(6, "weight"), labels.new(2), labels.new(3)
    grid = np.meshgrid(rows, columns, indexing="ij")
    labels.define(array, np.stack([g.ravel() for g in grid]), "")
    labels.freeze(rows, "split by number")
    resolved = labels.resolved()
    assert resolved.root[array].tolist() == [0, 1, 2, 0, 1, 2]


def test_what_meets_no_label_must_stay():
    labels = Labels()
    one = labels.new(3, "weight")
    labels.pair(one, np.array([NONE, one[0], NONE]), "an add")
    assert set(labels.resolved().reasons.values()) == {"an add"}


def test_members_in_a_circle_are_one():
    resolved = resolve([], [(0, [1, 2]), (1, [0, 3])], [])
    assert gone_with(resolved, {int(resolved.root[0])}) >= {0, 1}
