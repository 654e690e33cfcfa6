"""Axes: ticks are round, inside and apart; labels keep their distance."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from spalier.reporting.draw import density, fitted, linear, linear_ticks, log_ticks, logarithmic, spread_out
from spalier.text import clean, short_number

numbers = st.floats(-1e9, 1e9, allow_nan=False)
positive = st.floats(1e-9, 1e15)


@given(st.lists(numbers, min_size=1, max_size=8))
def test_a_linear_axis_holds_its_values_and_ticks(values):
    axis = linear("x", values)
    assert axis.low < axis.high
    assert all(-1e-9 <= axis.share(v) <= 1 + 1e-9 for v in values)
    assert all(-1e-6 <= axis.share(t) <= 1 + 1e-6 for t, _ in axis.ticks)
    assert len({text for _, text in axis.ticks}) == len(axis.ticks)


@given(st.lists(positive, min_size=1, max_size=8))
def test_a_logarithmic_axis_holds_its_values_and_ticks(values):
    axis = logarithmic("x", values)
    assert 0 < axis.low < axis.high
    assert all(0 < axis.share(v) < 1 for v in values)
    assert all(-1e-6 <= axis.share(t) <= 1 + 1e-6 for t, _ in axis.ticks)
    assert len(axis.ticks) <= 9


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 8))
def test_linear_ticks_are_multiples_of_a_round_step(low, span, count):
    ticks = linear_ticks(low, low + span, count)
    assert ticks == sorted(ticks)
    assert len(ticks) <= count + 2
    if len(ticks) > 2:
        steps = [b - a for a, b in itertools.pairwise(ticks)]
        first = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9)
        assert min(abs(first - nice) for nice in (1, 2, 2.5, 5, 10)) < 0.02
        assert max(steps) - min(steps) < 1e-3 * steps[0] + 1e-9


@given(positive, st.floats(1.01, 1e6))
def test_logarithmic_ticks_rise(low, factor):
    ticks = log_ticks(low, low * factor)
    assert ticks == sorted(set(ticks))
    assert all(low * 0.999 <= t <= low * factor * 1.001 for t in ticks)


@given(st.lists(st.floats(0, 200), max_size=12), st.floats(1, 15))
def test_labels_keep_their_distance(wanted, gap):
    places = spread_out(wanted, gap, 0, 200)
    ordered = sorted(places)
    assert all(b - a >= gap - 1e-6 for a, b in itertools.pairwise(ordered))
    assert all(-1e-6 <= p <= 200 + 1e-6 for p in places)
    by_wanted = [p for _, p in sorted(zip(wanted, places, strict=True))]
    assert all(a <= b or math.isclose(a, b) for a, b in itertools.pairwise(by_wanted))


def test_labels_with_room_stay_where_they_are():
    assert spread_out([10, 50, 90], 13, 0, 100) == [10, 50, 90]


@given(st.text(), st.floats(10, 300))
def test_texts_fit_and_can_be_seen(text, room):
    found = fitted(text, room)
    assert found.isprintable() or any(c in "\u200c\u200d\u3000\xa0" or c.isspace() for c in found)
    assert clean(found) == found
    assert len(found) <= len(text)


def test_numbers_are_short():
    assert [short_number(v) for v in (0, 1, 12.345, 999, 1000, 25_557_032, 4.1e9)] == [
        "0",
        "1",
        "12.3",
        "999",
        "1 k",
        "25.6 M",
        "4.1 G",
    ]
    assert [density(v) for v in (1, 0.05, 0.333)] == ["100%", "5%", "33.3%"]
