"""Timing loops by a clock of our own, statistics by slow oracles."""

import gc
import itertools
import math
import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Clock

from spalier.timing import (
    MIN_ROUNDS,
    interval,
    interval_rank,
    quartiles,
    take_turns,
)

# statistics


@pytest.mark.parametrize("count", range(1, 13))
def test_the_rank_is_the_innermost_that_covers(count):
    """By trying every way in which values can lie below and above the true median."""

    def coverage(at):
        below = [sum(signs) for signs in itertools.product((0, 1), repeat=count)]
        return sum(at <= n <= count - at for n in below) / len(below)

    fitting = [at for at in range(1, count // 2 + 1) if coverage(at) >= 0.95]
    assert interval_rank(count) == max(fitting, default=0)
    assert (interval_rank(count) > 0) == (count >= MIN_ROUNDS)


def test_intervals_hold_the_true_median_as_often_as_they_say():
    drawn = random.Random(0)
    held = 0
    for _ in range(2000):
        _, low, high = interval([drawn.expovariate(1) for _ in range(15)])
        held += low <= math.log(2) <= high
    assert held / 2000 > 0.95 - 0.015  # 0.965 is expected; three deviations of 2000 draws


@given(st.lists(st.floats(0.1, 10), min_size=MIN_ROUNDS, max_size=40))
def test_intervals_are_order_statistics(values):
    middle, low, high = interval(values)
    assert low <= middle <= high
    assert middle == median(values)
    assert sum(v < low for v in values) < interval_rank(len(values))
    assert sum(v > high for v in values) < interval_rank(len(values))
    first, last = quartiles(values)
    assert min(values) <= first <= middle <= last <= max(values)


# turns


def test_contenders_take_turns_and_each_begins_a_round():
    clock = Clock()
    runs = {name: clock.worker(name, 1.0) for name in "abc"}
    found = take_turns(runs, rounds=6, seconds=0.5, clock=clock)
    assert "".join(clock.log[6:]) == "abcbcacab" * 2  # after two calls of each to see how long they take
    assert found == {name: [1.0] * 6 for name in "abc"}


@settings(max_examples=12)
@given(st.floats(1e-4, 3.0), st.floats(0, 0.1))
def test_a_turn_takes_long_enough(each, least):
    clock = Clock()
    times = take_turns({"a": clock.worker("a", each)}, rounds=1, seconds=least, clock=clock)["a"]
    calls = max(1, len(clock.log) - (3 if least else 2))  # without those that see how long it takes, and warm up
    assert calls == 1 or (calls - 1) * each < least * 1.01
    assert calls * each >= least * 0.99 or calls == 10_000
    assert times == [pytest.approx(each)]


def test_garbage_is_not_collected_while_timing_and_is_after_an_interrupt():
    seen = []

    def interrupted():
        seen.append(gc.isenabled())
        if len(seen) > 4:
            raise KeyboardInterrupt

    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        take_turns({"a": interrupted}, rounds=9, seconds=0, clock=Clock())
    assert seen == [True, False, False, False, False]  # the first is not timed
    assert gc.isenabled()
