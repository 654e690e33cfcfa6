"""The paper's data sets: the layouts that the scales read, in small, and the real reduced copies where they are."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from experiments.paper.paper_data import open_set
from spalier.data.images import center_square, decode
from spalier.errors import DataError


def jpeg(seed: int) -> bytes:
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8))
    out = io.BytesIO()
    small.resize((40, 30), Image.Resampling.BICUBIC).save(out, "JPEG")
    return out.getvalue()


def zipped(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def test_cifar10_in_grids(tmp_path: Path) -> None:
    root = tmp_path / "cifar10"
    root.mkdir()
    labels: dict[str, list[object]] = {"classes": ["cat", "dog"]}
    images = {}
    for seed, name in enumerate(("data_batch_1", "test_batch")):
        images[name] = np.random.default_rng(seed).integers(0, 256, (6, 32, 32, 3), np.uint8)
        labels[name] = [0, 1, 1, 0, 1, seed]
        rows = [np.concatenate(list(images[name][start : start + 3]), axis=1) for start in (0, 3)]
        Image.fromarray(np.concatenate(rows)).save(root / f"{name}.webp", lossless=True)
    (root / "labels.json").write_text(json.dumps(labels))
    data = open_set("cifar10", tmp_path)
    assert data.classes == ("cat", "dog")
    for split, name in ((data.train, "data_batch_1"), (data.test, "test_batch")):
        assert np.array_equal(split.images[split.rows], images[name])
        assert split.labels.tolist() == labels[name]
    assert data.preprocessing["mean"] == [0.4914, 0.4822, 0.4465]
    assert len(open_set("cifar10", tmp_path, max_train_samples=4, seed=1).train) == 4


def test_whole_sets_are_torchvisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cifar:
        classes = ("cat", "dog")

        def __init__(self, root: str, train: bool) -> None:
            self.data, self.targets = np.full((4, 32, 32, 3), int(train), np.uint8), [0, 1, 1, int(train)]

    class Flowers:
        def __init__(self, root: str, split: str) -> None:
            number = ("train", "val", "test").index(split)
            self._image_files, self._labels = [Path(root) / f"{number}.jpg"] * 2, [number, 5]

    monkeypatch.setattr(datasets, "CIFAR10", Cifar)
    monkeypatch.setattr(datasets, "Flowers102", Flowers)
    data = open_set("cifar10", tmp_path)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 1, 1, 1], [0, 1, 1, 0])
    for i in range(3):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i))
    flowers = open_set("flowers102", tmp_path, image_size=21)
    assert (flowers.train.labels.tolist(), flowers.test.labels.tolist()) == ([0, 5, 1, 5], [2, 5])
    assert np.array_equal(flowers.test.images[flowers.test.rows[0]], center_square(decode(jpeg(2)), 24))


def test_flowers_in_a_zip_archive(tmp_path: Path) -> None:
    root = tmp_path / "flowers102"
    zipped(root / "few.zip", {f"jpg/image_{i:05d}.jpg": jpeg(i) for i in (1, 2, 3, 5, 6, 7)})
    savemat(root / "setid.mat", {"trnid": [[1, 6]], "valid": [[3, 7]], "tstid": [[2, 4, 5]]})
    savemat(root / "imagelabels.mat", {"labels": np.array([[7, 8, 9, 10, 102, 1, 2]], np.uint8)})
    (root / "test_subset.json").write_text(json.dumps({"test_subset": [5, 2]}))
    data = open_set("flowers102", tmp_path, image_size=21)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([6, 0, 8, 1], [101, 7])
    assert np.array_equal(data.test.images[data.test.rows[0]], center_square(decode(jpeg(5)), 24))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_cats_and_dogs(nested: bool, packed: bool, tmp_path: Path) -> None:
    halves = {"training_set": 6, "test_set": 3}
    files = {
        f"{half}/{half + '/' if nested else ''}{animal}/{i}.jpg": jpeg(i)
        for half, count in halves.items()
        for animal in ("cats", "dogs")
        for i in range(count)
    }
    if packed:
        zipped(tmp_path / "catsdogs" / "archive.zip", files)
    for name, data in {} if packed else files.items():
        (tmp_path / "catsanddogs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "catsanddogs" / name).write_bytes(data)
    found = open_set("catsanddogs", tmp_path, image_size=14)
    assert np.bincount(found.train.labels).tolist() == [6, 6]
    assert np.bincount(found.test.labels).tolist() == [3, 3]
    assert np.array_equal(found.train.images[found.train.rows[7]], center_square(decode(jpeg(1)), 16))


@pytest.mark.parametrize(
    ("name", "origin"),
    [("cifar10", "cs.toronto.edu"), ("flowers102", "ox.ac.uk"), ("catsanddogs", "kaggle.com")],
)
def test_a_missing_set_says_where_to_get_it(name: str, origin: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{name} is not in .*{origin}"):
        open_set(name, tmp_path)


def test_the_real_cifar10(shared: Path) -> None:
    data = open_set("cifar10", shared / "data")
    assert np.bincount(data.test.labels).tolist() == [1000] * 10
    assert len(data.train) == 10_000
    images, _ = data.train.fetch(np.arange(2000), None)
    # the usual mean and deviation are those of all 50,000; a batch of them comes close
    assert images.mean(dim=(0, 2, 3)).abs().max() < 0.1
    assert (images.std(dim=(0, 2, 3)) - 1).abs().max() < 0.1


def test_the_real_flowers(shared: Path) -> None:
    data = open_set("flowers102", shared / "data", image_size=56)
    assert np.bincount(data.train.labels).tolist() == [20] * 102
    assert len(data.test) == 2000


def test_the_real_cats_and_dogs(shared: Path) -> None:
    data = open_set("catsanddogs", shared / "data", image_size=56)
    assert np.bincount(data.train.labels).tolist() == [1000, 1000]
    assert np.bincount(data.test.labels).tolist() == [500, 500]
