"""What objects say of themselves, and what wrong names are answered with."""

import copy

import pytest
import torch
from support import awaken_, tiny_cnn

import spalier as sp
from spalier.errors import ConfigError, PlanError, ScoreError, TargetError, TaskFileError
from spalier.text import InNotebooks, close_names, near


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One object of each kind, by its name."""
    torch.manual_seed(0)
    base = tiny_cnn().eval()
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), head="8", example=torch.zeros(2, 3, 8, 8))
    scores = sp.score(awaken_(net), None, "weight")
    plan = sp.select(net, scores, channels=0.5)
    sp.prune_(net, plan)
    store = sp.Store(tmp_path_factory.mktemp("printing"))
    task = sp.Task.of(net, "birds", metrics={"accuracy": 0.5})
    store.add(task)
    store.add(task, "bees")
    switcher = sp.Switcher(base, store)
    switcher.activate("birds")
    kinds = (plan, scores, scores.structure, store, switcher, task)
    return {type(each).__name__: each for each in kinds}


@pytest.mark.parametrize("kind", ["Plan", "Scores", "Structure", "Store", "Switcher", "Task"])
def test_a_repr_is_one_line_and_print_gives_more(made, kind):
    shown = repr(made[kind])
    assert shown.startswith(f"{kind}(")
    assert "\n" not in shown
    assert len(shown) < 160
    assert len(str(made[kind]).splitlines()) > 2
    assert made[kind]._repr_html_().startswith("<pre>")


def test_a_repr_has_the_numbers_that_one_looks_for(made):
    plan = made["Plan"]
    kept = sum(map(len, plan.keep.values()))
    assert f"{kept:,} of {made['Structure'].units:,} units" in repr(plan)
    assert f"{100 * plan.prediction.density['macs']:.1f}% of macs" in repr(plan)
    assert repr(made["Scores"]).startswith("Scores(weight, ")
    assert "1 of 2 tasks ready" in repr(made["Switcher"])
    assert "'birds' active" in repr(made["Switcher"])
    assert [line.split()[:2] for line in str(made["Switcher"]).splitlines()[2:]] == [
        ["bees", "on"],
        ["birds", "active"],
    ]


def test_a_plan_by_hand_has_a_repr_too(made):
    structure = made["Structure"]
    name = structure.streams[0].name
    assert repr(sp.Plan(structure, {name: [0]})) == f"Plan(1 of {structure.streams[0].size} units in 1 streams)"
    assert repr(sp.Plan(structure, {}, ranks={"0": [0]})) == "Plan(0 of 0 units in 0 streams, ranks of 1 adapters)"


def test_names_of_strangers_are_text_in_notebooks():
    class Named(InNotebooks):
        def __str__(self):
            return "<script>alert(1)</script>\n\u202ebad & \x1b[31m"

    shown = Named()._repr_html_()
    assert shown == "<pre>&lt;script&gt;alert(1)&lt;/script&gt;\n\ufffdbad &amp; \ufffd[31m</pre>"


def test_names_that_are_close():
    assert near("layer", ["layer1", "layer2", "fc"]) == "'layer2', 'layer1'"
    assert near("x", []) == "none: there is nothing to name"
    assert close_names("TAYLOR", ["weight", "taylor"]) == ["taylor"]
    assert near(3, ["0", "4"]) == "'0', '4'"


def test_wrong_names_are_answered_with_names_of_the_right_kind(made):
    structure, scores, store = made["Structure"], made["Scores"], made["Store"]
    net = torch.nn.Sequential()
    net.conv1, net.fc = torch.nn.Conv2d(3, 4, 1), torch.nn.Linear(4, 2)
    stream = structure.streams[0].name
    wrong = [
        (lambda: structure[f"{stream}x"], PlanError, f"is no stream .* such as '{stream}'"),
        (lambda: sp.Plan(structure, {f"{stream}x": [0]}), PlanError, f"is no stream .* such as '{stream}'"),
        (lambda: scores.of(f"{stream}x"), ScoreError, f"no stream .* such as '{stream}'"),
        (lambda: scores[f"{stream}x"], ScoreError, f"no layer .* such as '{stream}'"),
        (lambda: sp.score(net, None, "taylr"), ConfigError, r"'taylr', did you mean 'taylor'\? expected one of weight"),
        (lambda: sp.attach_(net, sp.LoRA(rank=1), head="fcc"), TargetError, "head 'fcc' .* such as 'fc'"),
        (lambda: store.load("brids"), TaskFileError, r"no task 'brids'; did you mean 'birds'\?"),
        (lambda: store.remove("Birds!"), TaskFileError, "Birds"),
        (lambda: made["Switcher"].activate("bee"), TaskFileError, r"did you mean 'bees'\?"),
        (lambda: store.load("zzz"), TaskFileError, "it has bees, birds"),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind, match=message):
            call()
    assert sorted(store) == ["bees", "birds"]
