"""Runs that learn all kept weights, and write what they have learned in narrow forms at each density."""

import copy
import json

import numpy as np
import pytest
import torch
from running import quick
from torch import nn

import spalier as sp
from spalier import errors
from spalier.data import open_data
from spalier.networks import open_network
from spalier.refitting.approximate import round_factors_
from spalier.runs import Sweep, narrow
from spalier.runs.checkpoint import RunFolder
from spalier.runs.narrow import form_of

WIDE = {"learn": "wide", "refit_epochs": 1, "densities": (0.5,), "lr": 3e-3}
CODES = ("splora-r2", "spdelta-1bit", "bytes-1/3", "wide")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide") / "run"
    return quick(**WIDE, codes=CODES).run(folder, progress=False)


def test_one_run_leaves_several_codes_at_each_density(done):
    assert [row["code"] for row in done.rows] == [*CODES, *CODES]
    assert [row["target"] for row in done.rows] == [1.0] * 4 + [0.5] * 4
    assert sorted(done.tasks) == sorted(
        f"digits-{code.replace('/', 'of')}-{density}" for code in CODES for density in (100, 50)
    )
    kinds = [sp.Task.load(done.tasks.path(row["task"])).info.adapter["kind"] for row in done.rows]
    assert kinds == ["SPLoRA", "SPDelta", "ByLayer", "FineTune"] * 2
    for row in done.rows:
        assert row["bytes"] == done.tasks.path(row["task"]).stat().st_size
    assert not (done.folder / "wide.task.safetensors").exists()


def test_all_codes_of_a_density_keep_the_same_channels(done):
    for rows in (done.rows[:4], done.rows[4:]):
        assert len({(row["channels"], row["macs_left"], row["epochs"]) for row in rows}) == 1
        sizes = {row["code"]: row["bytes"] for row in rows}
        whole = next(done.tasks.load(row["task"]) for row in rows if row["code"] == "wide").stored_as("fp32")
        assert sizes["bytes-1/3"] <= max(len(whole.to_bytes()) / 3, 2_700)  # the least that this network takes
        assert max(sizes[code] for code in CODES[:3]) < sizes["wide"]


def test_what_is_measured_is_what_the_file_holds(done):
    base = open_network("running:small", classes=10, seed=0)
    test = open_data("digits").test
    images, labels = test.fetch(np.arange(len(test)), None)
    for row in done.rows:
        task = done.tasks.load(row["task"])
        with torch.no_grad():
            right = (task.build(base)(images).argmax(1) == labels).float().mean()
        assert task.info.storage == "int8-all"
        assert task.info.provenance["code"] == row["code"]
        assert float(right) == pytest.approx(row["test"], abs=0.003)  # other batches round otherwise


def test_the_wide_network_does_not_depend_on_the_codes(done, tmp_path):
    alone = quick(**WIDE, codes=("wide",)).run(tmp_path / "run", progress=False)
    several = {row["target"]: row["test_loss"] for row in done.rows if row["code"] == "wide"}
    assert {row["target"]: row["test_loss"] for row in alone.rows} == several


def test_narrow_forms_learn_on_from_the_wide_network(done, tmp_path):
    untrained = quick(**{**WIDE, "refit_epochs": 0}, codes=CODES[:2]).run(tmp_path / "run", progress=False)
    before = {row["task"]: row["test_loss"] for row in untrained.rows}
    after = {row["task"]: row["test_loss"] for row in done.rows}
    assert all(before[name] != after[name] for name in before)
    lines = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    forms = [(line["block"], line["form"]) for line in lines if line["kind"] == "epoch"]
    assert forms == [(0, 0), (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_a_task_of_any_adapter_goes_on_wide(done, tmp_path):
    start = done.tasks.path("digits-splora-r2-100")
    config = quick(**{**WIDE, "densities": (0.6,)}, codes=("spdelta-4bit",), start_task=str(start))
    results = config.run(tmp_path / "run", progress=False)
    assert [row["task"] for row in results.rows] == ["digits-start", "digits-60"]


def test_a_report_shows_each_code_as_a_series(done):
    page = sp.report(done.folder, done.folder / "report.html").read_text()
    for code in CODES:
        assert code in page


def test_a_sweep_over_seeds_averages_codes_apart(tmp_path):
    config = quick(**{**WIDE, "epochs": 1}, codes=("spdelta-1bit", "wide"))
    results = Sweep(config, over={"seed": [0, 1]}).run(tmp_path / "sweep", progress=False)
    summary = results.summary()
    assert [(row["code"], row["target"], row["test_count"]) for row in summary.rows] == [
        ("spdelta-1bit", 1.0, 2), ("wide", 1.0, 2), ("spdelta-1bit", 0.5, 2), ("wide", 0.5, 2),
    ]  # fmt: skip
    assert "spdelta-1bit" in str(summary)


def test_a_budget_is_held_after_every_epoch_of_learning_on(tmp_path, monkeypatch):
    """Codes that learn on may take more once they are deflated; what is made smaller early is learned around."""
    really, budgets = narrow.held_, []

    def held_(net, budget, storage):
        budgets.append(budget)
        return really(net, budget, storage)

    monkeypatch.setattr(narrow, "held_", held_)
    monkeypatch.setattr(narrow, "_ROOM", 0.0)
    config = quick(**{**WIDE, "densities": (), "refit_epochs": 3, "refit_lr": 3e-3}, codes=("bytes-3200",))
    (row,) = config.run(tmp_path / "run", progress=False).rows
    assert 3_040 <= row["bytes"] <= 3_200
    assert len(budgets) == 4  # three epochs, and the end
    assert len(set(budgets)) == 1


def test_a_run_goes_on_where_its_budget_cannot_be_met_any_more(tmp_path, monkeypatch, capsys):
    """Norms may take a few bytes more once they have learned; hours of learning are not lost for these."""
    budgets = iter((3_200, 3_200, 600))  # at the refit, after the epoch, at the end
    monkeypatch.setattr(narrow, "_left_for_codes", lambda *_: next(budgets))
    done = quick(**{**WIDE, "densities": ()}, codes=("bytes-3200",)).run(tmp_path / "run", progress=True)
    said = "".join(capsys.readouterr())
    assert "bytes-3200: bytes=600 cannot be reached" in said
    assert "norms and head alone are learned" in said
    (row,) = done.rows
    cut = [part for part, _ in done.tasks.load(row["task"]).cut_rows if part.path.endswith(("conv1", "conv2"))]
    assert {part.source for part in cut} == {"base"}
    assert next(budgets, None) is None


def test_a_run_says_where_even_a_file_without_codes_is_too_large(tmp_path, capsys):
    run = quick(**{**WIDE, "densities": ()}, codes=("bytes-1000",))
    (row,) = run.run(tmp_path / "run", progress=True).rows
    said = "".join(capsys.readouterr())
    assert row["bytes"] > 1_000
    assert said.count("norms and head alone are learned") == 1  # at the refit
    assert said.count("bytes-1000: without any code, norms and head take more") == 1  # and at the end


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codes": ["1-bit"]}, "expected names such as"),
        ({"codes": ["splora-r0"]}, "expected names such as"),
        ({"codes": []}, "one or more"),
        ({"codes": ["wide", "wide"]}, "each once"),
        ({"method": "lora"}, "no narrow form"),
        ({"method": "fine-pruning", "codes": ["wide"]}, "expected splora"),
        ({"keep_optimizer": True}, "begin anew"),
        ({"budget": "bytes", "densities": [5000]}, "codes"),
        ({"teacher": "self"}, "teaches its own"),
        ({"learn": "direct", "codes": ["wide"]}, "learn: wide"),
        ({"rank": 0.5}, "whole rank"),
        ({"refit_lr": 0.0}, "more than 0"),
    ],
)
def test_settings_that_do_not_go_together(changes, words):
    with pytest.raises(errors.ConfigError, match=words):
        quick(**{**WIDE, **changes})


def test_names_of_forms():
    assert form_of("splora-r8-full").adapter == sp.SPLoRA(rank=8, kernel="full", cap=True)
    assert form_of("bytes-200000").budget(1) == 200_000
    assert form_of("bytes-1/20").label == "bytes-1of20"
    assert quick(method="spdelta", adapter_options={"bits": 4}).codes == ("spdelta-4bit",)


def test_factors_and_scales_learn_faster_than_codes():
    net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 2))
    sp.attach_(net, sp.ByLayer({"0.weight": sp.SPLoRA(rank=2), "2.weight": sp.SPDelta(bits=2)}), head="3")
    speeds = {name: narrow.speed_of(net, name) for name, p in net.named_parameters() if p.requires_grad}
    assert {name for name, speed in speeds.items() if speed == narrow.FAST} == {
        "0.weight_adapter.down", "0.weight_adapter.up", "2.weight_adapter.gain",
    }  # fmt: skip
    assert speeds["2.weight_adapter.delta"] == speeds["1.weight"] == speeds["3.weight"] == 1.0
    round_factors_(net[0].weight_adapter, 15)
    assert narrow.speed_of(net, "0.weight_adapter.up") == 1.0


def test_who_asks_for_codes_learns_wide():
    assert quick(codes=["bytes-1/20"]).learn == "wide"
    assert quick(method="spdelta").learn == "wide"
    assert quick(method="spdelta", learn="direct").codes is None
    assert quick().learn == "direct"


def test_killed_before_the_results_are_written(tmp_path, monkeypatch):
    """The wide network is kept until nothing can need it any more."""
    config = quick(**{**WIDE, "densities": (), "epochs": 1}, codes=("spdelta-1bit",))
    write = RunFolder.write_json

    def killed(self, path, value):
        if path == self.results:
            raise KeyboardInterrupt
        write(self, path, value)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            config.run(tmp_path / "run", progress=False)
    results = config.run(tmp_path / "run", progress=False)
    assert [row["code"] for row in results.rows] == ["spdelta-1bit"]
    assert not (tmp_path / "run" / "wide.task.safetensors").exists()


def test_codes_are_made_smaller_by_as_few_as_it_takes():
    """Against a search by hand: with the last halving's worth less, the file would be too large."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 4))
    sp.attach_(net, sp.SPDelta(bits=2), head="4")
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight_adapter.delta.normal_().mul_(layer.weight_adapter.scale[:, None])
    before = copy.deepcopy(net)
    size = len(sp.Task.of(net, "refit").to_bytes(storage="int8-all"))
    assert narrow.held_(net, size, "int8-all")
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before.parameters(), strict=True))
    assert not narrow.held_(net, size // 10, "int8-all")
    torch.testing.assert_close(list(net.parameters()), list(before.parameters()))
    budget = int(0.95 * size)
    assert narrow.held_(net, budget, "int8-all")
    assert 0.98 * budget < len(sp.Task.of(net, "refit").to_bytes(storage="int8-all")) <= budget
    for layer in (0, 2):
        ours, theirs = (n[layer].weight_adapter.stored()[0].values for n in (net, before))
        moved = ours != theirs
        assert 0 < int(moved.sum()) < 0.3 * moved.numel()
        assert torch.equal(ours[moved], theirs[moved] - theirs[moved].sign())  # a step towards zero
        assert torch.equal(net[layer].weight_adapter.delta, before[layer].weight_adapter.delta)  # what it learns from
        near = (before[layer].weight_adapter.delta.detach() / before[layer].weight_adapter.scale[:, None]).abs()
        ones = theirs.abs() == 1
        assert float(near[moved & ones].max()) <= float(near[~moved & ones].min())  # the least sure of them
