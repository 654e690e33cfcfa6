"""Figures: numbers are the rows', drawings are well-formed and inside of their frames, files can be read back."""

import csv
import io
import itertools
import json
import math
import re
import statistics
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from reported import HOSTILE, write_run

import spalier as sp
from spalier.errors import ConfigError
from spalier.reporting.comparisons import comparison_figures
from spalier.reporting.draw import Axis, Box, Dot, Figure, Line, Panel, has_leaves, leaf_paths, to_svg
from spalier.reporting.load import ReportData, Run, TaskResult, load
from spalier.reporting.page import PNG_SCALE, all_figures, export, report, standalone, to_csv
from spalier.tasks import StoreReport

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures") / "run"
    rows = write_run(folder)
    return rows, all_figures(load(folder))


def by_name(found):
    return {figure.name: figure for figure in found}


def test_tables_hold_the_rows(run):
    rows, found = run
    figures = by_name(found)
    for name, column in (
        ("accuracy-bytes", "bytes"),
        ("accuracy-learned", "learned"),
        ("accuracy-latency", "latency_ms"),
    ):
        table = figures[name].rows
        assert [(r[3], r[4]) for r in table] == [(row[column], row["test"]) for row in rows]
    assert {"network", "learning", "break-even", "scores-birds-50", "examples-birds-25"} <= set(figures)


def test_the_points_are_the_rows(run):
    rows, found = run
    figure = by_name(found)["accuracy-learned"]
    (line,) = (m for m in figure.panels[0].marks if isinstance(m, Line))
    assert list(line.points) == [(row["learned"], row["test"]) for row in rows]


def test_means_over_seeds(tmp_path):
    rows = [write_run(tmp_path / "s" / str(seed), seed=seed) for seed in range(3)]
    figure = by_name(all_figures(load(tmp_path / "s")))["accuracy-learned"]
    for place, row in enumerate(figure.rows):
        values = [each[place]["test"] for each in rows]
        assert row[2] == 3
        assert math.isclose(row[4], statistics.fmean(values))
        assert math.isclose(row[5], statistics.stdev(values))


def test_confusion_and_classes_are_counted(tmp_path):
    write_run(tmp_path / "r")
    counts = json.loads((tmp_path / "r/blocks/00.json").read_text())["confusion"]["test"]
    figures = by_name(all_figures(load(tmp_path / "r")))
    names = ["cat", "dog", "owl"]
    told = {row[0]: row[2] for row in figures["classes-birds-100"].rows}
    assert told == {n: counts[i][i] / sum(counts[i]) for i, n in enumerate(names)}
    shares = [row[2] for row in figures["classes-birds-100"].rows]
    assert shares == sorted(shares)
    wrong = {(row[0], row[1]): row[2] for row in figures["confusion-birds-100"].rows}
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            assert wrong.get((a, b), 0) == (counts[i][j] if i != j else 0)


def test_drawings_are_well_formed_and_inside(run):
    for figure in run[1]:
        for width in (344, 544, 1120):
            root = ElementTree.fromstring(to_svg(figure, width))
            _, _, w, h = map(float, root.get("viewBox").split())
            assert w == width
            for circle in root.iter(f"{SVG}circle"):
                assert 0 <= float(circle.get("cx")) <= w, figure.name
                assert 0 <= float(circle.get("cy")) <= h, figure.name
            for box in root.iter(f"{SVG}rect"):
                assert float(box.get("x", 0)) >= -1, figure.name
                assert float(box.get("x", 0)) + float(box.get("width").rstrip("%")) <= w + 1
            for points in (line.get("points") for line in root.iter(f"{SVG}polyline")):
                pairs = [tuple(map(float, p.split(","))) for p in points.split()]
                assert all(-0.1 <= x <= w + 0.1 and -0.1 <= y <= h + 0.1 for x, y in pairs)
            assert not any(
                "style" in node.attrib or any(a.startswith("on") for a in node.attrib) for node in root.iter()
            )


def test_every_file_can_be_read_back(run, tmp_path, fonts):
    found = list({figure.name.partition("-birds")[0]: figure for figure in run[1]}.values())
    assert len(found) == 11
    export(found, tmp_path)
    for figure in found:
        rows = list(csv.reader((tmp_path / f"{figure.name}.csv").read_text("utf-8").splitlines()))
        assert rows[0] == list(figure.columns)
        assert len(rows) == len(figure.rows) + 1
        text = (tmp_path / f"{figure.name}.svg").read_text("utf-8")
        assert "var(" not in text
        ElementTree.fromstring(text)
        with Image.open(tmp_path / f"{figure.name}.png") as image:
            shades = image.convert("L").resize((image.width // 3, image.height // 3)).histogram()
            assert sum(map(bool, shades)) > 5, figure.name
            assert image.width >= 3 * 344


def test_csv_keeps_names_and_numbers():
    rows = [
        ['a "quoted", name\nin two lines', 0.1 + 0.2, None, 7],
        *([h.replace("\ud800", ""), 1.0, None, 0] for h in HOSTILE),
    ]
    figure = Figure("f", "t", "c", [], ["name", "float", "none", "whole"], rows)
    back = list(csv.reader(io.StringIO(to_csv(figure))))[1:]
    for (name, number, nothing, whole), want in zip(back, rows, strict=True):
        assert name == want[0]
        assert float(number) == want[1]
        assert nothing == ""
        assert int(whole) == want[3]


def test_a_missing_renderer_is_named_and_the_rest_is_there(run, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    with pytest.raises(ConfigError, match=r"pip install 'spalier\[report\]'"):
        export(run[1][:2], tmp_path)
    assert len(list(tmp_path.glob("*.svg"))) == len(list(tmp_path.glob("*.csv"))) == 2


def test_a_system_without_fonts_is_named(run, tmp_path, monkeypatch):
    import resvg_py

    real = resvg_py.svg_to_bytes
    monkeypatch.setattr(resvg_py, "svg_to_bytes", lambda **given: real(**given, skip_system_fonts=True))
    with pytest.raises(ConfigError, match="font"):
        export(run[1][:1], tmp_path)


def test_nineteen_densities(tmp_path):
    densities = [round(1 - 0.05 * i, 2) for i in range(19)]
    rows = write_run(tmp_path / "r", densities=densities, extras=False)
    figures = by_name(all_figures(load(tmp_path / "r")))
    assert len(figures["accuracy-macs"].rows) == len(rows) == 19
    assert len(figures["network"].columns) == 21


def test_24_series_are_grouped(tmp_path):
    for method in ("splora", "lora"):
        for rank in (2, 4, 8):
            for criterion in ("taylor", "weight", "random", "gradient"):
                write_run(
                    tmp_path / f"{method}{rank}{criterion}",
                    method=method,
                    rank=rank,
                    criterion=criterion,
                    extras=False,
                    densities=(1.0, 0.5),
                )
    figure = by_name(all_figures(load(tmp_path)))["accuracy-learned"]
    assert [p.title for p in figure.panels] == ["SPLoRA", "LoRA"]
    assert len(figure.rows) == 48
    for panel in figure.panels:
        labels = [m.label for m in panel.marks if isinstance(m, Line)]
        assert len(set(labels)) == len(labels) == 12


def test_ranks_are_in_order(tmp_path):
    for rank in (16, 2, 8):
        write_run(tmp_path / f"r{rank}", rank=rank, extras=False, densities=(1.0, 0.5))
    figure = by_name(all_figures(load(tmp_path)))["accuracy-learned"]
    assert list(dict.fromkeys(row[0] for row in figure.rows)) == ["rank 2", "rank 8", "rank 16"]


def test_a_thousand_classes_show_those_that_are_confused_most(tmp_path):
    classes = [f"class {i}" for i in range(1000)]
    write_run(tmp_path / "r", classes=classes, densities=(1.0,), extras=False)
    path = tmp_path / "r/blocks/00.json"
    block = json.loads(path.read_text())
    counts = block["confusion"]["test"]
    counts[7][993] = 500
    path.write_text(json.dumps(block))
    figures = by_name(all_figures(load(tmp_path / "r")))
    confusion, per_class = figures["confusion-birds-100"], figures["classes-birds-100"]
    assert confusion.rows[0][:3] == ["class 7", "class 993", 500]
    assert [label for _, label in confusion.panels[0].x.ticks][::19] == ["class 7", "class 993"]
    (cell,) = (m for m in confusion.panels[0].marks if isinstance(m, Box) and m.text == "500")
    assert cell.tip.startswith(f"class 7 predicted as class 993\n500 of {sum(counts[7])}")
    assert "The 20 of 1000 classes" in confusion.caption
    assert len(per_class.rows) == 1000
    assert len(to_svg(confusion, 344)) < 50_000


def test_accuracies_that_are_not_known_are_left_out_and_said(tmp_path):
    write_run(tmp_path / "r", accuracies=[0.9, None, float("nan")])
    figure = by_name(all_figures(load(tmp_path / "r")))["accuracy-learned"]
    # the task files of these rows hold no accuracy either
    assert [row[4] for row in figure.rows] == [0.9]
    assert "2 without these numbers are not shown" in figure.caption
    write_run(tmp_path / "n", accuracies=[None] * 3, latency=False)
    assert not {"accuracy-learned", "accuracy-latency"} & set(by_name(all_figures(load(tmp_path / "n"))))


def test_one_task_alone(tmp_path):
    write_run(tmp_path / "r", densities=(1.0,))
    figures = by_name(all_figures(load(tmp_path / "r")))
    assert len(figures["accuracy-learned"].rows) == 1
    ElementTree.fromstring(to_svg(figures["accuracy-learned"], 344))


def test_break_even_of_a_task_is_the_stores(tmp_path):
    write_run(tmp_path / "r", extras=False)
    store = sp.Store(tmp_path / "r" / "tasks").report()
    alone = {c.name: StoreReport(store.base, (c,)).break_even for c in store.costs}
    pays = {task.name: task.numbers.get("pays") for task in load(tmp_path / "r").tasks}
    assert pays == alone
    figure = by_name(all_figures(load(tmp_path / "r")))["break-even"]
    wanted = {density: alone[f"birds-{100 * density:g}"] for density in (1.0, 0.5, 0.25)}
    assert {row[3]: row[4] for row in figure.rows} == {d: pays for d, pays in wanted.items() if pays}
    (line,) = (m for m in figure.panels[0].marks if isinstance(m, Line))
    assert list(line.points) == [(row[3], row[4]) for row in figure.rows]


def test_files_that_never_pay_are_said_to(tmp_path):
    def sized(target, file, network):
        numbers = {"bytes": file, "network": network, "base": 1000, "density": target}
        more = {} if file >= network else {"pays": next(t for t in range(1, 9999) if 1000 + t * file < t * network)}
        return TaskResult(f"{target}", "t", "r", {"method": "splora", "seed": 0}, target, numbers | more)

    tasks = [sized(1.0, 10, 1000), sized(0.5, 10, 60), sized(0.25, 12, 12)]
    (figure,) = comparison_figures(ReportData("run", "r", [Run("r", tasks)], {}, []))
    assert [(row[1], row[4]) for row in figure.rows] == [("100%", 2), ("50%", 21)]
    assert "never pay" in figure.caption
    assert "1 without these numbers are not shown" in figure.caption
    ElementTree.fromstring(to_svg(figure, 700))


def test_latency_is_not_joined(run):
    figures = by_name(run[1])
    assert "<polyline" in to_svg(figures["accuracy-learned"], 544)
    assert "<polyline" not in to_svg(figures["accuracy-latency"], 544)
    assert "SPLoRA-8" in to_svg(figures["accuracy-latency"], 544)
    assert "spalier bench" in figures["accuracy-latency"].caption


def test_tips_of_means_are_means(tmp_path):
    rows = [write_run(tmp_path / str(seed), seed=seed, extras=False) for seed in range(2)]
    for seed, row in enumerate(rows):
        path = tmp_path / str(seed) / "blocks" / "01.json"
        said = json.loads(path.read_text())
        said["row"] |= {"channels": (0.5, 0.7)[seed], "macs": (0.2, 0.3)[seed]}
        path.write_text(json.dumps(said))
        assert len(row) == 3
    figure = by_name(all_figures(load(tmp_path)))["accuracy-learned"]
    (tip,) = (m.tip for m in figure.panels[0].marks if isinstance(m, Dot) and "density 50%" in m.tip)
    assert "60.0% of channels" in tip
    assert "25.0% of MACs" in tip


def test_cells_are_no_formulas():
    names = ["=1+1", "+1", "-1", "@x", "\tx", "\rx", "a=1", "'=1"]
    figure = Figure("f", "t", "c", [], ["=name", "number"], [[name, -1.5] for name in names])
    head, *back = csv.reader(io.StringIO(to_csv(figure), newline=""))
    assert head == ["'=name", "number"]
    assert [row[0] for row in back] == [*(f"'{name}" for name in names[:5]), "'\ufffdx", *names[6:]]
    assert {row[1] for row in back} == {"-1.5"}


def test_figures_of_one_task_share_their_accuracies(tmp_path):
    """Also where a figure lacks the task that is at an end of the axis."""
    write_run(tmp_path / "r", extras=False, accuracies=[0.9, 0.5, 0.1])
    path = tmp_path / "r" / "blocks" / "02.json"
    block = json.loads(path.read_text())
    path.write_text(json.dumps({**block, "row": {**block["row"], "latency_ms": None}}))
    found = [f.panels[0] for f in comparison_figures(load(tmp_path / "r")) if f.name != "break-even"]
    assert [len([m for m in panel.marks if isinstance(m, Dot)]) for panel in found] == [3, 3, 3, 2]
    assert len({(panel.y.low, panel.y.high, panel.y.ticks) for panel in found}) == 1


def test_panels_of_one_task_share_their_accuracies(tmp_path):
    for method in ("splora", "lora"):
        for rank in range(1, 14):
            write_run(tmp_path / f"{method}{rank}", method=method, rank=rank, extras=False, densities=(1.0,))
    panels = by_name(all_figures(load(tmp_path)))["accuracy-learned"].panels
    assert len(panels) > 1
    assert len({(p.y.low, p.y.high) for p in panels}) == 1


def test_hostile_names_are_text_in_drawings(tmp_path):
    write_run(tmp_path / "r", classes=HOSTILE)
    for figure in all_figures(load(tmp_path / "r")):
        root = ElementTree.fromstring(standalone(figure))
        kinds = {node.tag.removeprefix(SVG) for node in root.iter()}
        assert kinds <= {
            "svg",
            "g",
            "text",
            "path",
            "rect",
            "circle",
            "polyline",
            "title",
            "desc",
            "style",
            "image",
        }
        hrefs = [v for node in root.iter() for k, v in node.attrib.items() if k.endswith("href")]
        assert all(re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/=]+", href) for href in hrefs)


def test_labels_at_lines_do_not_touch():
    lines = [Line([(1, 0.5), (2, 0.5 + 0.001 * i)], f"s{i % 8}", f"series {i}") for i in range(12)]
    panel = Panel(Axis("x", 1, 2), Axis("y", 0, 1), lines, height=230)
    root = ElementTree.fromstring(to_svg(Figure("f", "t", "c", [panel], [], []), 544))
    ys = sorted(float(t.get("y")) for t in root.iter(f"{SVG}text") if (t.text or "").startswith("series"))
    assert len(ys) == 12
    assert min(b - a for a, b in itertools.pairwise(ys)) >= 12.9


def test_a_report_lands_where_it_is_asked_for(tmp_path):
    write_run(tmp_path / "r", extras=False)
    assert report(tmp_path / "r") == tmp_path / "r" / "report.html"
    assert report(tmp_path / "r", tmp_path / "new" / "page.html").read_text("utf-8").startswith("<!doctype html>")
    (tmp_path / "folder").mkdir()
    assert report(tmp_path / "r", tmp_path / "folder") == tmp_path / "folder" / "report.html"
    assert PNG_SCALE == 3


@given(st.lists(st.integers(0, 5), min_size=1, max_size=300), st.floats(5, 300), st.floats(3, 20))
def test_every_channel_has_a_leaf_or_its_share_of_a_stroke(lives, half, room):
    found = leaf_paths(lives, 400, 50, half, room)
    assert set(found) == set(lives)
    numbers = {step: re.findall(r"M(-?[\d.]+) (-?[\d.]+)", d) for step, d in found.items()}
    for step, places in numbers.items():
        assert all(400 - half - 3 <= float(x) <= 400 + half + 3 for x, _ in places)
        assert all(50 - room <= float(y) <= 50 + room for _, y in places)
        if has_leaves(len(lives), half):
            assert len(places) == lives.count(step)
    if not has_leaves(len(lives), half):  # strokes for all that outlived a step lie on those for all before
        assert all("q" not in d for d in found.values())


def test_a_stroke_is_as_long_as_the_share_that_is_left():
    lives = [3] * 4 + [1] * 4  # every second one goes left: two of each life
    found = leaf_paths(lives, 100, 50, 3.0, 10)
    lengths = {step: [float(v) for v in re.findall(r"v([\d.]+)", d)] for step, d in found.items()}
    assert lengths == {1: [16.0, 16.0], 3: [8.0, 8.0]}
