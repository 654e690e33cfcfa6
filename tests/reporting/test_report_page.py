"""The page as text: its policy, its escapes, the same bytes each time."""

import base64
import hashlib
import html
import itertools
import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from reported import HOSTILE, write_run
from sklearn.metrics import f1_score

import spalier
from spalier.errors import ConfigError
from spalier.reporting.load import load, macro_f1
from spalier.reporting.page import report, resource, summary
from spalier.text import byte_size


class Parts(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.styles, self.scripts, self.inside, self.policy = [], [], [], None, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        self.inside = (tag, dict(attributes)) if tag in ("style", "script") else None
        if tag == "meta" and dict(attributes).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attributes)["content"]

    def handle_data(self, data):
        if self.inside and self.inside[0] == "style":
            self.styles.append(data)
        elif self.inside:
            self.scripts.append((self.inside[1], data))

    def handle_endtag(self, tag):
        self.inside = None


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "run"
    write_run(folder, classes=HOSTILE, data="folder:/x/<img src=x onerror=alert(9)>")
    return report(folder).read_text("utf-8"), folder


def test_the_policy_allows_this_style_and_this_script_alone(hostile):
    parts = Parts(hostile[0])
    (style,) = parts.styles
    ((_, script),) = (s for s in parts.scripts if s[0].get("type") != "application/json")
    hashes = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in (style, script)]
    assert parts.policy == (
        f"default-src 'none'; img-src data:; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert script == resource("page.js")


def test_names_of_strangers_open_no_element(hostile):
    parts = Parts(hostile[0])
    kinds = {tag for tag, _ in parts.found}
    assert not kinds & {"img", "iframe", "object", "embed", "link", "base", "form"}
    for tag, attributes in parts.found:
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
        for name in ("src", "href", "action"):
            assert attributes.get(name, "data:image/png;base64,").startswith("data:image/png;base64,")
    assert len([t for t, _ in parts.found if t == "script"]) == 2


def test_all_classes_are_shown_as_text(hostile):
    text = html.unescape(hostile[0])
    for name in HOSTILE[:2] + HOSTILE[3:6] + HOSTILE[7:9]:
        assert f"<bdi>{name}</bdi>" in text, name
    assert "\u202e" not in hostile[0]
    assert "49" not in re.findall(r"tick\$\{alert\(3\)\} (\S+)", text)


def test_the_data_are_json_that_cannot_break_out(hostile):
    (text,) = (data for given, data in Parts(hostile[0]).scripts if given.get("type") == "application/json")
    assert not set(text) & set("<>&\u2028\u2029")
    found = json.loads(text)
    assert [task["key"] for task in found["tasks"]] == ["run/birds-100", "run/birds-50", "run/birds-25"]


def test_the_same_folder_gives_the_same_bytes(hostile, tmp_path):
    text, folder = hostile
    assert report(folder, tmp_path / "again.html").read_text("utf-8") == text


def test_nothing_is_loaded(hostile):
    for word in (
        "http://",
        "https://",
        "//cdn",
        "@import",
        "url(",
        "fetch(",
        "XMLHttpRequest",
        "innerHTML",
        "eval(",
    ):
        found = [m.start() for m in re.finditer(re.escape(word), hostile[0])]
        allowed = hostile[0].count('xmlns="http://www.w3.org/2000/svg"') if word == "http://" else 0
        assert len(found) == allowed, word


def test_a_run_without_a_block_has_a_page(tmp_path):
    write_run(tmp_path / "r", done=False)
    for path in (tmp_path / "r" / "blocks").iterdir():
        path.unlink()
    text = report(tmp_path / "r").read_text("utf-8")
    assert "No task is done yet" in text
    assert "it is not finished" in text
    assert 'id="learning"' in text  # its epochs are there already


def table(path):
    """The rows of the summary, each by its columns."""
    head, *rows = summary(load(path))
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_the_summary_gives_means_over_seeds_and_no_best(tmp_path):
    for seed, accuracies in enumerate(([0.9, 0.95, 0.5], [0.8, 0.99, 0.7])):
        write_run(tmp_path / f"{seed}", seed=seed, extras=False, accuracies=accuracies)
        write_run(tmp_path / f"f{seed}", seed=seed, extras=False, method="fine-pruning", accuracies=[1.0] * 3)
    base, *rows = table(tmp_path)
    assert base["task"] == "the base, in float32"
    assert [(row["method"], row["density"]) for row in rows] == [
        (method, density) for method in ("SPLoRA", "fine-pruning") for density in ("100%", "50%", "25%")
    ]
    assert [row["test accuracy"] for row in rows] == [
        *("85.0%\u00a0±\u00a07.1", "97.0%\u00a0±\u00a02.8", "60.0%\u00a0±\u00a014.1"),
        *["100.0%\u00a0±\u00a00.0"] * 3,
    ]
    assert rows[0]["task"] == "birds-100, mean of 2 seeds"
    assert not any("best" in cell for row in rows for cell in row.values())


def test_the_summary_holds_what_the_run_measured(tmp_path):
    written = write_run(tmp_path / "r")
    base, *rows = table(tmp_path / "r")
    data = load(tmp_path / "r")
    whole = data.tasks[0].numbers["base"]
    assert base["file"] == byte_size(whole)
    assert "method" not in base  # it is the same for all
    for row, wanted, result in zip(rows, written, data.tasks, strict=True):
        assert row["task"] == wanted["task"]
        assert row["test accuracy"] == f"{100 * wanted['test']:.1f}%"
        assert row["file"] == byte_size(wanted["bytes"])
        assert row["of the base's bytes"] == f"{100 * wanted['bytes'] / whole:.1f}%"
        assert row["of its MACs"] == f"{100 * wanted['macs']:.1f}%"
        assert float(row["latency, ms"]) == pytest.approx(wanted["latency_ms"], abs=0.01)
        assert row["F1 (macro)"] == f"{100 * result.numbers['test_f1']:.1f}%"


def test_the_summary_leaves_out_what_nobody_measured(tmp_path):
    write_run(tmp_path / "r", latency=False, extras=False)
    for path in (tmp_path / "r" / "blocks").glob("*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "confusion": None}))
    assert not {"latency, ms", "F1 (macro)"} & set(table(tmp_path / "r")[0])


@pytest.mark.parametrize("seed", range(4))
def test_f1_is_that_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, (6, 6)) * (rng.random((6, 6)) < 0.4)
    counts[seed], counts[:, seed] = 0, 0  # a class that neither occurs nor is predicted
    truth, guess = (np.repeat(axis.ravel(), counts.ravel()) for axis in np.indices(counts.shape))
    wanted = f1_score(truth, guess, average="macro", zero_division=0)
    assert macro_f1(counts.tolist()) == pytest.approx(wanted, abs=1e-12)
    assert macro_f1([[0, 0], [0, 0]]) is None


def test_the_page_begins_with_the_last_density_whatever_its_accuracy(tmp_path):
    write_run(tmp_path / "r", accuracies=[0.99, 0.9, 0.1])
    text = report(tmp_path / "r").read_text("utf-8")
    (said,) = (json.loads(data) for given, data in Parts(text).scripts if given.get("type") == "application/json")
    assert said["tasks"][said["start"]]["key"] == "r/birds-25"
    assert text.index('id="summary"') < text.index('id="accuracy"') < text.index('id="tasks"')


def test_machine_and_versions_are_named(tmp_path):
    write_run(tmp_path / "r")
    path = tmp_path / "r" / "blocks" / "00.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "machine": {"cpu": "<b>Fast</b>", "threads": 2}}))
    text = report(tmp_path / "r").read_text("utf-8")
    assert "machine: <bdi>cpu &lt;b&gt;Fast&lt;/b&gt;, threads 2</bdi>" in text
    assert f"versions: <bdi>spalier {spalier.__version__}, torch " in text


def test_no_figure_stands_beside_a_blank_half(tmp_path):
    """Figures that take half a page come in pairs."""
    for count, latency in ((4, False), (5, True)):
        write_run(tmp_path / str(count), latency=latency)
        text = report(tmp_path / str(count)).read_text("utf-8")
        section = text.partition('<section id="accuracy">')[2].partition("</section>")[0]
        kinds = re.findall(r'<figure id="[^"]+" class="(\w+)"', section)
        assert kinds.count("plate") % 2 == 0
        assert len(kinds) == count
        assert '<figure id="learning" class="wide"' in text


def test_words_are_plain(hostile):
    text = html.unescape(re.sub(r"<script.*?</script>", "", hostile[0], flags=re.S))
    for word in (
        "told right",
        "told wrong",
        "taken for",
        "such tasks",
        "cut back so far",
        "sure by",
        "in progress",
    ):
        assert word not in text, word
    for word in ("classified correctly", "classified wrongly", "predicted as", "confidence"):
        assert word in text, word


def test_what_is_not_known_is_said(tmp_path):
    import spalier as sp

    store = sp.Store(tmp_path)
    from reported import task

    store.add(task(0, "a", metrics={"accuracy": 0.5}))
    (tmp_path / "bad.task.safetensors").write_bytes(b"<script>alert(1)</script>")
    text = report(tmp_path).read_text("utf-8")
    assert "Accuracy against latency is not shown" in text
    assert "Left out" in text
    assert ">bad<" in text
    assert resource("page.js").count("\n") < 400


@pytest.mark.parametrize(("library", "words"), [("jinja2", "spalier[cli]"), ("PIL.Image", "spalier[train]")])
def test_a_missing_library_is_named(library, words, hostile, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError) as error:
        report(hostile[1], tmp_path / "page.html")
    assert f"pip install '{words}'" in str(error.value)
    assert not (tmp_path / "page.html").exists()


VISIONS = {  # Machado, Oliveira and Fernandes, 2009, of linear RGB; severity 1
    "all": np.eye(3),
    "no red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
}


@pytest.mark.parametrize("side", ["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_colours_are_told_apart_by_everyone(side, vision):
    light, _, dark = resource("page.css").partition("@media")
    found = dict(re.findall(r"(--s\d):#(\w{6})", light if side == "light" else dark.partition("@media")[0]))
    assert len(found) == 8
    seen = [lab(np.clip(np.array(VISIONS[vision]) @ linear(colour), 0, 1)) for colour in found.values()]
    for a, b in itertools.combinations(seen, 2):
        assert np.linalg.norm(a - b) > 12


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE Lab of linear sRGB."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ rgb / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
