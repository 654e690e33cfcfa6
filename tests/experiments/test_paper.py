"""The experiments of the paper, on digits: the smallest cells, from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import spalier as sp
from experiments.paper import carry_out
from experiments.paper.carry_out import Place, config_of, samples_of
from experiments.paper.cells import Cell, cell_of
from experiments.paper.protocol import MINI
from experiments.paper.released import Released

pytestmark = pytest.mark.slow

TINY = replace(
    MINI,
    shared={
        "recipe": "paper",
        "scale_lr": False,
        "lr_schedule": "cosine",
        "densities": (0.6, 0.3),
        "score_samples": 32,
    },
    sets={
        "digits": {
            "network": "resnet8",
            "network_options": {"width": 4},
            "weights": "tiny.safetensors",
            "max_train_samples": 64,
            "batch_size": 32,
            "epochs": 1,
            "epochs_per_prune": 1,
        }
    },
    rates={"digits": {"fine-pruning": 0.02, "splora": 0.1}},
    downloads={"tiny.safetensors": "nothing that can be downloaded"},
    tested={"digits": 50},
    seeds=(0,),
    criteria={"digits": ("taylor",)},
)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    torch.manual_seed(0)
    save_file(sp.models.resnet8(10, 4).state_dict(), tmp_path / "tiny.safetensors")
    return Place(TINY, tmp_path, tmp_path, tmp_path / "work", tmp_path / "results")


def _measured(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    timed = ("latency_ms", "seconds")
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]


def test_a_cell_from_end_to_end(place: Place) -> None:
    cell = cell_of(TINY, "digits", "r8", 0)
    assert carry_out.carry_out([cell], place) == {}
    found = json.loads((place.results / f"{cell.name}.json").read_text())
    assert [row["target"] for row in found["rows"]] == [1.0, 0.6, 0.3]
    assert found["tested"] == 50
    assert all(
        0 <= row["test"] <= 1 and round(row["test"] * 50) == pytest.approx(row["test"] * 50) for row in found["rows"]
    )
    assert found["settings"]["rank"] == 8
    assert found["settings"]["weights"] == "tiny.safetensors"
    assert str(place.work) not in json.dumps(found)
    assert {"commit", "machine", "scale", "labels"} <= set(found)


@pytest.mark.slow
def test_a_cell_that_shares_its_first_block_is_the_run_that_does_not(place: Place, tmp_path: Path) -> None:
    shared = [
        carry_out.rows_of(cell_of(TINY, "digits", "r8", 0, criterion=name), place) for name in ("weight", "taylor")
    ]
    cell = cell_of(TINY, "digits", "r8", 0)
    whole = (
        config_of(cell, place)
        .replace(**cell.after)
        .run(tmp_path / "whole", data=samples_of(cell, place), progress=False)
    )
    assert _measured(shared[1]) == _measured(list(whole.rows))
    assert shared[0][0]["test"] == shared[1][0]["test"]


def test_a_release_sets_filters_to_zero_and_no_more(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, object]]] = []
    prune = Released.prune

    def watched(engine: Released) -> None:
        before = {name: value.clone() for name, value in engine.net.state_dict().items()}
        prune(engine)
        after = {name: value.clone() for name, value in engine.net.state_dict().items()}
        seen.append((before, after, dict(engine.gone)))

    monkeypatch.setattr(Released, "prune", watched)
    carry_out.rows_of(cell_of(TINY, "digits", "r8", 0, variant="released", masks="released"), place)
    assert len(seen) == 2
    for before, after, gone in seen:
        written = {f"{layer}.weight": mask for layer, mask in gone.items()}
        assert written.keys() <= after.keys()
        for name, value in after.items():
            mask = (
                torch.from_numpy(written[name])
                if name in written
                else torch.zeros(len(value) if value.dim() else 0, dtype=torch.bool)
            )
            if value.dim():
                assert not value[mask].any()
                assert torch.equal(value[~mask], before[name][~mask])


@pytest.mark.slow
def test_a_cell_whose_teacher_is_another_makes_that_one_first(place: Place) -> None:
    cell = cell_of(TINY, "digits", "r8", 0, variant="taught", teacher="fine-pruning")
    rows = carry_out.rows_of(cell, place)
    assert (place.work / "digits-fine-pruning-seed0" / "tasks" / "digits-100.task.safetensors").exists()
    assert [row["target"] for row in rows] == [1.0, 0.6, 0.3]


def test_one_cell_that_fails_stops_no_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = (cell_of(TINY, "digits", "r8", 0, criterion=name) for name in ("weight", "taylor"))

    def rows_of(cell: Cell, place: Place) -> list[dict[str, object]]:
        if cell is bad:
            raise sp.errors.RunError("not-finite", "the loss is nan")
        return [{"target": 1.0, "test": 0.5}]

    monkeypatch.setattr(carry_out, "rows_of", rows_of)
    assert carry_out.carry_out([bad, good], place) == {bad.name: "the loss is nan"}
    assert [path.stem for path in place.results.iterdir()] == [good.name]


@pytest.mark.slow
def test_released_filters_are_alive_again(place: Place) -> None:
    rows = {
        name: carry_out.rows_of(cell_of(TINY, "digits", name, 0, variant="released", masks="released"), place)
        for name in ("fine-pruning", "r8")
    }
    for name, found in rows.items():
        assert [row["channels"] for row in found] == [1.0, 1.0, 1.0]
        assert 0 < found[1]["pruned"] < found[2]["pruned"]
        assert all(0 < row["alive"] <= row["pruned"] for row in found[1:])
        assert all(0 <= row["test_removed"] <= 1 for row in found[1:]), name
    assert rows["r8"][2]["alive"] == rows["r8"][2]["pruned"]  # its adapter was never masked
