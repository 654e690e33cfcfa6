"""Schedules as pure functions, and a class that steps any loop."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support import assert_unchanged, snapshot
from trained import EXAMPLE, DigitNet, accuracy, batches, train_, trained

import spalier as sp
from spalier.errors import ConfigError
from spalier.scheduling import agp, iterative, one_shot


def adapted():
    torch.manual_seed(0)
    net = DigitNet(8)
    sp.attach_(net, sp.SPLoRA(rank=2), head="fc", example=EXAMPLE)
    return net


@given(
    schedule=st.sampled_from([one_shot, iterative, agp]),
    end=st.floats(0.01, 1),
    progress=st.lists(st.floats(0, 1), min_size=2, max_size=5),
)
def test_less_and_less_is_left(schedule, end, progress):
    left = [schedule(p, end=end) for p in sorted(progress)]
    assert left == sorted(left, reverse=True)
    assert all(end - 1e-9 <= each <= 1 for each in left)
    assert schedule(1, end=end) == pytest.approx(end)


def test_the_papers_nineteen_steps():
    left = [iterative(i / 20, end=0.05) for i in range(21)]
    assert left[:20] == pytest.approx([1 - 0.05 * i for i in range(20)])
    assert left[20] == 0.05
    assert agp(0.5, end=0.1) == pytest.approx(0.2125)
    assert [agp(p, end=0.1) for p in (0, 1)] == [1, 0.1]
    assert one_shot(0, end=0.3) == 0.3


@pytest.mark.parametrize("kind", ["one_shot", "iterative", "agp", lambda p: 1 - 0.6 * p])
@pytest.mark.parametrize("ranking", ["global", "local"])
def test_a_schedule_steps_any_loop(kind, ranking):
    net = adapted()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.01, momentum=0.9)
    schedule = sp.Schedule(
        kind, end=0.4, batches=batches(1), loss=F.cross_entropy, optimizer=optimizer, steps=5, step_size=0.2,
        options={"ranking": ranking, "writers": "free"},
    )  # fmt: skip
    sizes = []
    for step in range(11):
        plan = schedule.step(net, step / 10)
        sizes.append(sp.count(net, EXAMPLE).macs)
        assert plan is None or plan.prediction.macs == sizes[-1]
        x, y = batches(1)[0]
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == {"one_shot": 1, "iterative": 4, "agp": 6}.get(kind, 11)
    kept, sizes = sp.kept_units(net), {s.name: s.size for s in net._spalier.structure.streams}
    assert all(0 < len(units) <= sizes[name] for name, units in kept["streams"].items())


def test_a_schedule_goes_on_where_the_network_is():
    """It looks at the network, so another object, after a restart say, does the same."""
    net = adapted()
    make = lambda: sp.Schedule("iterative", end=0.5, criterion="weight", step_size=0.25)  # noqa: E731
    assert make().step(net, 0.0) is None
    assert make().step(net, 0.4) is not None
    assert make().step(net, 0.4) is None
    assert make().step(net, 0.9) is not None


@pytest.mark.parametrize("budget", ["weights", "macs"])
def test_other_budgets(budget):
    net = adapted()
    schedule = sp.Schedule("one_shot", end=0.5, criterion="weight", budget=budget)
    assert schedule.step(net, 0).prediction.density[budget] <= 0.5
    assert schedule.step(net, 1) is None


@pytest.mark.slow
def test_recovery_is_the_first_move_of_every_step():
    """Down to 30% in four steps without any training: with recovery it still knows digits."""
    found = {}
    for recover in (False, sp.Recovery(batches(8), adapters=False, head=False), True):
        net = trained()
        schedule = sp.Schedule(
            "iterative", end=0.3, step_size=0.175, batches=batches(8), loss=F.cross_entropy, recover=recover
        )
        for step in range(5):
            schedule.step(net, step / 4)
        found[recover is True, bool(recover)] = accuracy(net)
    assert found[False, False] < found[False, True] < found[True, True] - 10


@pytest.mark.slow
def test_it_ends_well_with_training_between_the_steps():
    net = trained()
    schedule = sp.Schedule("iterative", end=0.3, step_size=0.35, batches=batches(8), loss=F.cross_entropy, recover=True)
    for step in range(3):
        schedule.step(net, step / 2)
        train_(net, 2, lr=0.02)
    assert accuracy(net) > 85


def test_bad_schedules_are_refused():
    for options, match in (
        ({"kind": "cubic"}, "expected one of one_shot, iterative, agp"),
        ({"end": 0}, "0 < end"),
        ({"end": 1.5}, "0 < end"),
        ({"budget": "bytes"}, "budget"),
        ({"steps": 0}, "steps"),
        ({"step_size": 0}, "step"),
        ({"criterion": "weigth"}, "criterion"),
    ):
        with pytest.raises(ConfigError, match=match):
            sp.Schedule(**options)
    net = adapted()
    before = snapshot(net)
    schedule = sp.Schedule("one_shot", end=0.5, criterion="weight", recover=True)
    for progress in (-0.1, 1.1, "half"):
        with pytest.raises(ConfigError, match="progress"):
            schedule.step(net, progress)
    with pytest.raises(ConfigError, match="needs batches"):
        schedule.step(net, 1)
    assert_unchanged(net, before)
