"""The benchmark of codes: what decides a rate, how a schedule goes on, and what its tables are made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torchvision")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import codes

    return codes


@pytest.fixture
def learning(codes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Its part that learns, with no rates found yet."""
    import codes_learning

    monkeypatch.setattr(codes_learning, "RATES", tmp_path)
    return codes_learning


def tried(folder: Path, rate: float, **found: Any) -> None:
    told = {"optimizer": "adamw", "rate": rate, "rates": {"rest": rate}, **found}
    (folder / f"cifar10-wide-adamw-{rate:g}.json").write_text(json.dumps(told))


def test_rates_are_decided_by_all_rows_of_the_whole_schedule(learning: Any, tmp_path: Path) -> None:
    spec = learning.SPECS["cifar10"]
    tried(tmp_path, 1.0)  # ended before the first prune
    with pytest.raises(SystemExit, match="no rates for wide on cifar10 yet"):
        learning.best_of(spec, "wide")
    tried(tmp_path, 2.0, accuracy=70.0)
    assert learning.chosen(spec, "wide").rates == {"rest": 2.0}
    tried(tmp_path, 3.0, accuracy=60.0, **{"by density": {"1.0": 80.0, "0.7": 0.0, "0.5": 70.0, "0.3": 60.0}})
    tried(tmp_path, 4.0, accuracy=65.0, **{"by density": {"1.0": 70.0, "0.7": 99.0, "0.5": 70.0, "0.3": 69.0}})
    assert learning.chosen(spec, "wide").rates == {"rest": 3.0}  # 0.7 is no row


def test_rates_of_a_network_without_a_search_are_those_that_it_names(learning: Any, tmp_path: Path) -> None:
    tried(tmp_path, 2.0, accuracy=70.0)
    spec = replace(learning.SPECS["resnet18"], rates_of="cifar10")
    assert learning.chosen(spec, "wide").rates == {"rest": 2.0}


def test_known_rates_need_no_search(learning: Any) -> None:
    way = learning.chosen(learning.SPECS["trec"], "bits")
    assert (way.optimizer, way.rates["gains"]) == ("adamw", 5 * way.rates["bits"])


def test_narrow_networks_take_larger_steps(learning: Any) -> None:
    way = learning.Learning("adamw", {"rest": 0.1, "bits": 0.2})
    assert way.at(0.5) == way.at(1.0) == way
    assert way.at(0.125).rates == pytest.approx({"rest": 0.2, "bits": 0.4})


def test_a_schedule_goes_on_behind_the_block_that_it_is_given(codes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same epochs as without: other numbers would be other orders and crops."""
    done: list[Any] = []
    monkeypatch.setattr(codes, "learn_", lambda net, spec, seed, epochs, way: done.append(epochs))
    monkeypatch.setattr(codes, "shrink_", lambda net, spec, seed, density: done.append(density))
    spec = replace(codes.SPECS["cifar10"], epochs={1.0: 4, 0.5: 2, 0.3: 3})
    whole = [(density, epochs) for density, epochs, _ in codes.along(None, spec, 0, lambda density: None)]
    assert whole == [(1.0, range(4)), (0.5, range(4, 6)), (0.3, range(6, 9))]
    assert done == [range(4), 0.5, range(4, 6), 0.3, range(6, 9)]
    rest = [(density, epochs) for density, epochs, _ in codes.along(None, spec, 0, lambda density: None, skipped=1)]
    assert rest == whole[1:]
    longer = [epochs for _, epochs, _ in codes.along(None, replace(spec, length=2.0), 0, lambda density: None)]
    assert longer == [range(8), range(8, 12), range(12, 18)]


def test_every_contender_has_a_title_and_a_way_to_learn(codes: Any) -> None:
    import codes_page

    for spec in codes.SPECS.values():
        for density in spec.extra:
            methods = codes_page.methods_of(spec, density)
            assert set(methods) <= set(codes_page.TITLES)
            ways = {codes.way_of(m) for m in codes.contenders(spec, density) if not m.startswith("nncodec")}
            assert ways <= set(codes_page.WAYS)
            assert spec.rates_of or ways <= set(spec.tried) or ways <= set(spec.known)


def test_latencies_are_found_by_method_and_density(codes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import codes_paper

    monkeypatch.setattr(codes_paper, "RESULTS", tmp_path)
    assert codes_paper.milliseconds("cifar10") == {}
    row = {"network": "wide-free 30", "backend": "onnxruntime", "batch": 1, "ms": 0.5}
    rows = [row, {**row, "batch": 32, "ms": 9.0}, {**row, "network": "wide 10", "ms": None}]
    rows.append({**row, "network": "base", "ms": 4.0})
    (tmp_path / "latency").mkdir()
    (tmp_path / "latency" / "cifar10.json").write_text(json.dumps({"rows": rows}))
    assert codes_paper.milliseconds("cifar10") == {("wide-free", 0.3): 0.5, ("wide", 1.0): 4.0}
