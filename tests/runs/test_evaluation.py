"""What a run leaves for its report: score distributions and example images, held to the slow way."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from running import quick, small
from torch import nn

import spalier as sp
from spalier.criteria.score import score
from spalier.data import open_data
from spalier.pruning.plan import Plan
from spalier.runs.learning import _counts, examples, score_histograms


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looking") / "run"
    quick(densities=(0.5,)).run(folder, progress=False)
    return folder


def test_a_run_leaves_distributions_and_examples(ran):
    assert {path.name for path in (ran / "blocks").iterdir()} == {
        "00.json",
        "00.png",
        "01.json",
        "01.png",
        "01.scores.json",
    }
    block = json.loads((ran / "blocks/01.json").read_text())
    scores = json.loads((ran / "blocks/01.scores.json").read_text())
    for name, kept in block["kept"].items():
        assert sum(scores["streams"][name]["kept"]) == len(kept)
    items = block["examples"]["items"]
    sheet = Image.open(io.BytesIO((ran / "blocks/01.png").read_bytes()))
    side, columns = block["examples"]["side"], block["examples"]["columns"]
    assert sheet.size == (side * columns, side * -(-len(items) // columns))
    wrong = [item["label"] != item["guess"] for item in items]
    assert wrong == sorted(wrong, reverse=True)


def test_counts_are_those_of_a_loop():
    draw = np.random.default_rng(0)
    edges = np.geomspace(0.01, 10, 7)
    values = np.concatenate([draw.normal(0, 3, 200), edges, [0.0]])
    slow = [0] * (len(edges) + 1)
    for value in values:
        if value < edges[0]:
            slow[0] += 1
        elif value > edges[-1]:
            slow[-1] += 1
        else:
            slow[min(sum(value >= edge for edge in edges), len(edges) - 1)] += 1
    assert _counts(values, edges) == slow


def test_units_that_are_gone_are_not_counted():
    net = small()
    example = torch.zeros(2, 3, 8, 8)
    sp.attach_(net, sp.SPLoRA(rank=1), head="fc", example=example)
    scores = score(net, criterion="weight")
    name = next(iter(scores.layers))
    units = len(scores.of(name))
    plan = Plan(scores.structure, {name: range(2)})
    found = score_histograms(scores, plan)
    assert sum(found["streams"][name]["kept"]) == 2
    assert sum(found["streams"][name]["removed"]) == units - 2
    sp.prune_(net, plan)
    again = score_histograms(score(net, criterion="weight"), Plan(scores.structure, {name: range(1)}))
    assert sum(again["streams"][name]["kept"]) == 1
    assert sum(again["streams"][name]["removed"]) == 1


def test_examples_are_the_surest_of_each_kind():
    data = open_data("digits", classes=list("012"), max_train_samples=60)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3)).eval()
    found, png = examples(net, data.test, lambda images: images, 16)
    images, labels = data.test.fetch(np.arange(len(data.test)), None)
    probabilities = net(images).softmax(1).detach()
    for right in (False, True):
        sure: dict[int, list[float]] = {0: [], 1: [], 2: []}
        for p, label in zip(probabilities, labels, strict=True):
            if (p.argmax() == label) == right:
                sure[int(label)].append(float(p.max()))
        shown = [i for i in found["items"] if (i["label"] == i["guess"]) == right]
        for label, confidences in sure.items():  # the surest of each class, and none twice
            own = [i["confidence"] for i in shown if i["label"] == label]
            assert own == pytest.approx(sorted(confidences, reverse=True)[: len(own)], abs=1e-3)
        counts = [sum(i["label"] == label for i in shown) for label, c in sure.items() if len(c) >= 3]
        assert len(shown) == 8
        assert not counts or max(counts) - min(counts) <= 1
    first = np.asarray(Image.open(io.BytesIO(png)))[:8, :8]
    assert first.max() == 255
    assert first.min() == 0


def test_samples_that_are_no_images_have_no_examples():
    class Rows:
        labels = np.zeros(4, np.int64)

        def __len__(self):
            return 4

        def fetch(self, indices, epoch):
            return torch.zeros(4, 7), torch.zeros(4, dtype=torch.long)

    assert examples(nn.Linear(7, 2), Rows(), lambda x: x, 2) is None


def test_classes_at_the_end_of_a_large_part_are_seen_too():
    class Sorted:
        """As folders of images are."""

        labels = np.repeat(np.arange(3), 600)

        def __len__(self):
            return 1800

        def fetch(self, indices, epoch):
            assert len(indices) <= 64
            return torch.rand(len(indices), 3, 4, 4), torch.from_numpy(self.labels[indices])

    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    found, _ = examples(net.eval(), Sorted(), lambda x: x, 64)
    assert {item["label"] for item in found["items"]} == {0, 1, 2}


def test_free_writers_are_counted_one_by_one():
    net = small()
    sp.attach_(net, sp.SPLoRA(rank=1), head="fc", example=torch.zeros(2, 3, 8, 8))
    scores = score(net, criterion="weight")
    plan = sp.select(net, scores, channels=0.4, writers="free")
    found = score_histograms(scores, plan)["streams"]
    assert {name: sum(counts["kept"]) for name, counts in found.items()} == {
        name: len(plan.keep.get(name, range(sum(counts["kept"]) + sum(counts["removed"]))))
        for name, counts in found.items()
    }
    shared = [layers for layers in scores.layers.values() if len(layers) > 1]
    assert shared
    assert all(layer in found for layers in shared for layer in layers)
