"""Folders become data: what is read, what is told apart, what is refused."""

import contextlib
import json

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from reported import DENSITIES, task, tasks, write_run
from running import quick

import spalier as sp
from spalier.errors import RunError, SpalierError
from spalier.reporting import report
from spalier.reporting.comparisons import points
from spalier.reporting.draw import Rule
from spalier.reporting.figures import learning_figure, removed_at
from spalier.reporting.load import block_files, layers, load, measured, share
from spalier.reporting.page import all_figures, page


def series_of(found):
    """The keys of the tasks of each point, by series, by panel."""
    panels = {}
    for point in points(found):
        series = panels.setdefault(point.panel, {}).setdefault(point.series, [])
        series.append([task.key for task in point.tasks])
    return panels


def sizes_of(found):
    """How many tasks each point has, by series, by panel."""
    return {
        panel: {name: [len(point) for point in series] for name, series in held.items()}
        for panel, held in series_of(found).items()
    }


def test_a_run_is_its_rows(tmp_path):
    rows = write_run(tmp_path / "birds")
    found = load(tmp_path / "birds")
    assert (found.kind, found.name, len(found.runs)) == ("run", "birds", 1)
    assert [e.name for e in found.tasks] == [row["task"] for row in rows]
    for entry, row in zip(found.tasks, rows, strict=True):
        for name in ("test", "validation", "learned", "macs", "macs_left", "latency_ms", "bytes"):
            if name != "macs_left":
                assert entry.numbers[name] == row[name], name
        assert entry.target == row["target"]
        assert len(entry.examples) == 11
    assert [e.scores is not None for e in found.tasks] == [False, True, True]
    assert [(e.block, e.step) for e in found.runs[0].epochs][:4] == [(0, 10), (0, 20), (0, 30), (1, 40)]


def test_layers_are_what_the_built_network_has():
    from support import tiny_cnn

    base = tiny_cnn(10)
    for each in tasks():
        found = layers(each)
        assert set(found) == {"0", "3"}
        assert [len(found[n]) for n in "03"] == [base[0].out_channels, base[3].out_channels]
        shapes = [row.shape for row in each.table.rows if row.path in ("0", "3") and len(row.shape) == 4]
        assert shapes[0][0] == len(found["0"])
        assert found["0"].sum() + found["3"].sum() == each.info.density.channels[0]


def test_lives_are_what_counting_gives(tmp_path):
    write_run(tmp_path / "r")
    found = load(tmp_path / "r").tasks
    for layer in ("0", "3"):
        lives = removed_at(found, layer)
        for step, entry in enumerate(found):
            assert [life > step for life in lives] == entry.layers[layer].tolist()


def test_a_run_in_progress_shows_what_is_done(tmp_path):
    write_run(tmp_path / "r", done=False)
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epo')
    found = load(tmp_path / "r")
    assert found.runs[0].done is False
    assert len(found.tasks) == 3
    assert len(found.runs[0].epochs) == 9


def test_a_run_without_a_finished_block(tmp_path):
    write_run(tmp_path / "r", done=False)
    for path in (tmp_path / "r" / "blocks").iterdir():
        path.unlink()
    (tmp_path / "r" / "metrics.jsonl").unlink()
    assert load(tmp_path / "r").tasks == []


def test_older_runs_have_no_scores_and_no_images(tmp_path):
    write_run(tmp_path / "r", extras=False)
    assert all(e.scores is None and not e.examples for e in load(tmp_path / "r").tasks)


def test_sweeps_and_folders_of_runs(tmp_path):
    over = {"method": ["splora", "fine-pruning"], "seed": [0, 1, 2]}
    for method in over["method"]:
        for seed in over["seed"]:
            write_run(tmp_path / "s" / f"method={method},seed={seed}", method=method, seed=seed)
    found = load(tmp_path / "s")
    assert found.kind == "folder of runs"
    (tmp_path / "s" / "sweep.yaml").write_text(yaml.safe_dump({"base": {"data": "digits"}, "over": over}))
    (tmp_path / "s" / "sweep.json").write_text(json.dumps({"failed": {"method=lora": "out of memory"}, "rows": []}))
    found = load(tmp_path / "s")
    assert (found.kind, len(found.runs), found.failed) == ("sweep", 6, {"method=lora": "out of memory"})
    assert list(found.varied) == ["method"]
    assert sizes_of(found) == {"": {"SPLoRA": [3, 3, 3], "fine-pruning": [3, 3, 3]}}
    assert list(series_of(found)[""]) == ["SPLoRA", "fine-pruning"]


def test_data_side_by_side(tmp_path):
    for data in ("digits", "cifar10"):
        for method in ("splora", "lora"):
            write_run(tmp_path / "runs" / f"{data}-{method}", method=method, data=data)
    found = load(tmp_path)
    assert [(panel, list(series)) for panel, series in series_of(found).items()] == [
        ("cifar10", ["SPLoRA", "LoRA"]),
        ("digits", ["SPLoRA", "LoRA"]),
    ]


def test_a_store_and_a_bad_file_in_it(tmp_path):
    store = sp.Store(tmp_path)
    for place, density in enumerate(DENSITIES):
        provenance = {"data": "birds", "method": "splora", "seed": 1}
        store.add(task(place, f"birds-{100 * density:g}", metrics={"accuracy": 0.9}, provenance=provenance))
    store.add(task(0, "other", metrics={}))
    (tmp_path / "broken.task.safetensors").write_bytes(b"rubbish")
    found = load(tmp_path)
    assert found.kind == "store"
    assert set(found.failed) == {"broken"}
    assert sorted((run.name, len(run.tasks)) for run in found.runs) == [("birds seed 1", 3), ("other", 1)]
    assert [e.target for e in found.tasks][:3] == [1.0, 0.5, 0.25]
    sizes = {e.name: e.numbers["bytes"] for e in found.tasks}
    assert sizes["other"] == store.path("other").stat().st_size
    assert all("latency_ms" not in e.numbers for e in found.tasks)


def test_one_bad_task_of_a_run_is_listed(tmp_path):
    write_run(tmp_path / "r")
    path = tmp_path / "r" / "tasks" / "birds-50.task.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    found = load(tmp_path / "r")
    assert [e.name for e in found.tasks] == ["birds-100", "birds-25"]
    assert list(found.failed) == ["r/birds-50"]


def _block(folder, **changes):
    path = folder / "blocks" / "01.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _row(folder, **changes):
    path = folder / "blocks" / "01.json"
    _block(folder, row={**json.loads(path.read_text())["row"], **changes})


def _epochs(folder, **changes):
    lines = [{"kind": "epoch", "block": 0, "step": 5, "loss": 1.0, "validation": None} | changes]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _folder_instead(path):
    path.unlink()
    path.mkdir()


def _edge(folder):
    path = folder / "blocks" / "01.scores.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "edges": [*said["edges"][:-1], 1e308]}))


BREAK = {
    "no JSON": lambda f: (f / "blocks" / "01.json").write_text('{"row": {'),
    "no row": lambda f: (f / "blocks" / "01.json").write_text("[]"),
    "confusion": lambda f: _block(f, confusion={"test": [[1, 2], [3]]}),
    "counts": lambda f: _block(f, confusion={"test": [["<b>"] * 3] * 3}),
    "scores": lambda f: (f / "blocks" / "01.scores.json").write_text('{"edges": [1, 0], "streams": {}}'),
    "metrics": lambda f: (f / "metrics.jsonl").write_text("nothing\n{}\n"),
    "sheet": lambda f: (f / "blocks" / "01.png").write_bytes(b"GIF89a"),
    "pixels": lambda f: (f / "blocks" / "01.png").write_bytes((f / "blocks" / "01.png").read_bytes()[:60]),
    "labels": lambda f: _block(
        f, examples={"side": 8, "columns": 4, "items": [{"label": 99, "guess": 0, "confidence": 1}]}
    ),
    "settings": lambda f: (f / "run.yaml").write_text("rank: [1, 2"),
    "huge whole number": lambda f: _row(f, learned=10**400),
    "huge number": lambda f: _row(f, learned=1e308, latency_ms=1e-300),
    "tiny number": lambda f: _row(f, latency_ms=5e-324),
    "negative amount": lambda f: _row(f, bytes=-5),
    "no target": lambda f: _row(f, target=0),
    "huge count": lambda f: _block(f, confusion={"test": [[10**400] * 3] * 3}),
    "huge edge": _edge,
    "huge loss": lambda f: _epochs(f, loss=-1e308),
    "huge step": lambda f: _epochs(f, step=10**400),
    "negative block": lambda f: _epochs(f, block=-7),
    "metrics are a folder": lambda f: _folder_instead(f / "metrics.jsonl"),
    "block is a folder": lambda f: _folder_instead(f / "blocks" / "01.json"),
    "sheet is a folder": lambda f: _folder_instead(f / "blocks" / "01.png"),
    "task twice": lambda f: _row(f, task="birds-100"),
}
FILES = {
    **dict.fromkeys(("scores", "huge edge"), "01.scores.json"),
    **dict.fromkeys(("sheet", "pixels", "sheet is a folder"), "01.png"),
    **dict.fromkeys(("metrics", "huge loss", "huge step", "negative block", "metrics are a folder"), "metrics.jsonl"),
    "settings": "run.yaml",
}


@pytest.mark.parametrize("what", BREAK)
def test_what_is_broken_is_said(what, tmp_path):
    write_run(tmp_path / "r")
    BREAK[what](tmp_path / "r")
    with pytest.raises(RunError) as error:
        load(tmp_path / "r")
    assert error.value.code == "folder"
    assert FILES.get(what, "01.json") in str(error.value)


def test_blocks_are_counted_in_numbers(tmp_path):
    write_run(tmp_path / "r")
    (tmp_path / "r" / "blocks" / "01.json").rename(tmp_path / "r" / "blocks" / "100.json")
    (tmp_path / "r" / "blocks" / "\u00b2.json").write_text("{}")  # a digit, and no number
    assert [path.name for path in block_files(tmp_path / "r")] == ["00.json", "02.json", "100.json"]


def test_rules_keep_their_density_where_a_task_is_bad(tmp_path):
    write_run(tmp_path / "r")
    (tmp_path / "r" / "tasks" / "birds-50.task.safetensors").write_bytes(b"rubbish")
    figure = learning_figure(load(tmp_path / "r").runs[0], "learning")
    rules = [(m.x, m.label) for m in figure.panels[0].marks if isinstance(m, Rule)]
    assert rules == [(30, "50%"), (60, "25%")]


def test_other_densities_are_no_seeds(tmp_path):
    write_run(tmp_path / "a", densities=(1.0, 0.5), extras=False)
    write_run(tmp_path / "b", densities=(1.0, 0.5, 0.25), seed=1, extras=False)
    found = load(tmp_path)
    assert list(found.varied) == ["densities"]
    assert [len(point.tasks) for point in points(found)] == [1] * 5
    write_run(tmp_path / "c", densities=(1.0, 0.5), seed=1, extras=False)
    assert sorted(len(point.tasks) for point in points(load(tmp_path))) == [1, 1, 1, 2, 2]


def test_a_repeat_is_no_seed(tmp_path):
    write_run(tmp_path / "a", extras=False, done=False)
    (tmp_path / "a" / "blocks" / "02.json").unlink()
    for name, seed in (("b", 0), ("c", 1)):
        write_run(tmp_path / name, seed=seed, extras=False)
    found = load(tmp_path)
    keys = [[task.key for task in point.tasks] for point in points(found)]
    assert keys[:2] == [["a/birds-100", "c/birds-100"], ["b/birds-100"]]
    page(found, all_figures(found))


def test_the_same_density_twice_is_no_seed(tmp_path):
    write_run(tmp_path / "r", extras=False)
    _row(tmp_path / "r", target=1.0)
    assert [len(point.tasks) for point in points(load(tmp_path / "r"))] == [1, 1, 1]


def test_a_store_has_a_panel_for_each_task_and_a_line_for_each_method(tmp_path):
    store = sp.Store(tmp_path)
    for classes in (("cat", "dog"), ("owl", "tit")):
        for method in ("splora", "fine-pruning"):
            for place, density in enumerate((100, 50)):
                run = "-".join(classes)
                said = {"data": "birds", "method": method, "seed": 0, "run": run}
                name = f"{run}-{method}-{density}"
                store.add(task(place, name, metrics={"accuracy": 0.9}, provenance=said, classes=classes))
    one_each = {"SPLoRA": [1, 1], "fine-pruning": [1, 1]}
    found = sizes_of(load(tmp_path))
    assert found == {"cat-dog": one_each, "owl-tit": one_each}
    assert [list(series) for series in found.values()] == [["SPLoRA", "fine-pruning"]] * 2


def test_other_folders_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(RunError, match="expected") as error:
            load(path)
        assert error.value.code == "folder"


def test_counts_that_are_no_numbers_are_not_known():
    values = (1, 0.5, None, float("nan"), float("inf"), True, "3")
    assert [measured(v) for v in values] == [1, 0.5, *[None] * 5]
    assert measured(np.float64(2.0)) == 2.0
    assert [share(v) for v in (0, 0.5, 1, 1.5, -1, None, True, 10**400, float("nan"))] == [
        *(0, 0.5, 1),
        *[None] * 6,
    ]


def test_a_real_run(tmp_path):
    results = quick(max_train_samples=96, epochs=1, densities=(0.5,), validate_every=1).run(
        tmp_path / "real", progress=False
    )
    found = load(tmp_path / "real")
    assert [e.numbers["test"] for e in found.tasks] == [row["test"] for row in results.rows]
    assert [e.numbers["macs"] for e in found.tasks] == [row["macs"] for row in results.rows]
    for entry, row in zip(found.tasks, results.rows, strict=True):
        kept = {name: int(mask.sum()) for name, mask in entry.layers.items()}
        assert sum(kept.values()) == round(row["channels"] * sum(map(len, entry.layers.values())))
    last = found.tasks[-1]
    assert last.scores is not None
    assert sum(map(sum, (c for pair in last.scores.streams.values() for c in pair))) > 0
    assert len(last.examples) > 0
    page = report(tmp_path / "real").read_text("utf-8")
    assert 'id="network"' in page
    assert 'id="examples-digits-50"' in page


JUNK = st.sampled_from(
    [None, True, -1, 7, 1e300, "x", "</script>", [], {}, [None], {"a": 1}, "../../x", [[1]], "1e400"]
)


@pytest.fixture(scope="module")
def mended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "r"
    write_run(folder, densities=(1.0, 0.5))
    names = ("blocks/00.json", "blocks/01.json", "blocks/01.scores.json")
    return folder, {name: (folder / name).read_text() for name in names}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["blocks/00.json", "blocks/01.json", "blocks/01.scores.json"]), st.data())
def test_whatever_a_file_says_there_is_a_page_or_an_error_of_ours(mended, name, data):
    folder, texts = mended
    value = json.loads(texts[name])
    node, key = value, None
    for _ in range(data.draw(st.integers(1, 4))):
        keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        parent, node = node, node[key]
    parent[key] = data.draw(JUNK)
    (folder / name).write_text(json.dumps(value).replace('"1e400"', "1e400"))
    try:
        with contextlib.suppress(SpalierError):
            found = load(folder)
            assert page(found, all_figures(found)).endswith("</html>")
    finally:
        (folder / name).write_text(texts[name])
