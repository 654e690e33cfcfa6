"""Sets of torchvision: their splits, classes and sizes, and what is said of those that are missing."""

import hashlib
import pickle

import numpy as np
import pytest
import torchvision.datasets as sets
from pictures import encoded, picture, write
from PIL import Image

from spalier.data import open_data
from spalier.data.images import center_square
from spalier.errors import DataError

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def cifar_batch(seed, count=20):
    images = np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), np.uint8)
    return images, [(i + seed) % 10 for i in range(count)]


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """The published layout in small, with checksums of its own."""
    sums = {}

    def put(name, content):
        data = pickle.dumps(content, protocol=2)
        write(tmp_path / "cifar-10-batches-py" / name, data)
        sums[name] = hashlib.md5(data).hexdigest()

    batches = {f"data_batch_{i}": cifar_batch(i) for i in range(1, 6)} | {"test_batch": cifar_batch(9)}
    for name, (images, labels) in batches.items():
        put(name, {"data": images.transpose(0, 3, 1, 2).reshape(len(images), -1), "labels": labels})
    put("batches.meta", {"label_names": CLASSES})
    monkeypatch.setattr(sets.CIFAR10, "train_list", [[f"data_batch_{i}", sums[f"data_batch_{i}"]] for i in range(1, 6)])
    monkeypatch.setattr(sets.CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(sets.CIFAR10, "meta", sets.CIFAR10.meta | {"md5": sums["batches.meta"]})
    return batches


def test_cifar10_is_small_and_has_two_splits(cifar10, tmp_path, monkeypatch):
    data = open_data("torchvision:CIFAR10", folder=tmp_path, validation_split=0)
    train = [cifar10[f"data_batch_{i}"] for i in range(1, 6)]
    assert np.array_equal(data.train.images[data.train.rows], np.concatenate([images for images, _ in train]))
    assert data.train.labels.tolist() == [label for _, labels in train for label in labels]
    assert np.array_equal(data.test.images[data.test.rows], cifar10["test_batch"][0])
    assert (data.classes, data.shape, data.preprocessing["augment"]) == (
        tuple(CLASSES),
        (3, 32, 32),
        "flip-crop",
    )
    assert data.preprocessing["pad"] == 4
    monkeypatch.setenv("SPALIER_DATA", str(tmp_path))
    held = open_data("torchvision:CIFAR10", classes=["dog", "cat"], image_size=16, validation_split=0.2)
    assert (len(held.train), len(held.validation), len(held.test), held.shape) == (16, 4, 4, (3, 16, 16))


class Photos(sets.VisionDataset):
    """Photographs in three splits; labels are listed nowhere."""

    def __init__(self, root, split="train", download=False):
        if split not in ("train", "val", "test"):
            raise ValueError(f"Unknown value {split!r} for argument split")
        if not download and "here" not in root:
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        super().__init__(root)
        self.offset = ("train", "val", "test").index(split) * 100

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return picture(self.offset + i, 90, 80), i % 3


def test_splits_are_found_by_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(sets, "Photos", Photos, raising=False)
    data = open_data("torchvision:Photos", folder=tmp_path / "here")
    assert [len(split) for split in (data.train, data.validation, data.test)] == [6, 6, 6]
    assert (data.classes, data.shape, data.preprocessing["stored"]) == (("0", "1", "2"), (3, 96, 96), 110)
    assert np.array_equal(data.test.images[data.test.rows[1]], center_square(picture(201, 90, 80), 110))
    without = open_data("torchvision:Photos", folder=tmp_path / "here", image_size=16, labels=False)
    assert (without.classes, set(without.train.labels)) == ((), {-1})


def test_a_missing_set_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sets, "Photos", Photos, raising=False)
    with pytest.raises(DataError) as error:
        open_data("torchvision:Photos", folder=tmp_path)
    call = f'open_data("torchvision:Photos", folder="{tmp_path}", download=True)'
    for piece in (f"cannot be opened in {tmp_path}", "not found", call, "SPALIER_DATA"):
        assert piece in str(error.value)
    assert len(open_data("torchvision:Photos", folder=tmp_path, image_size=16, download=True).train) == 6
    with pytest.raises(DataError, match="torchvision:CIFAR10 cannot be opened"):
        open_data("torchvision:CIFAR10", folder=tmp_path)


@pytest.mark.parametrize("name", ["Cifar10", "VisionDatasets", "os", "__name__"])
def test_names_that_torchvision_does_not_have(name):
    with pytest.raises(DataError, match=r"torchvision\.datasets has no"):
        open_data(f"torchvision:{name}")


class Pairs(Photos):
    """Two labels for each image."""

    def __getitem__(self, i):
        return picture(i), (i, i)


class Demanding(Photos):
    """Wants more than a folder and a split."""

    def __init__(self, root, kind, split="train"):
        super().__init__(root, split)


class Unsplit(Photos):
    """Has no splits; one image is damaged."""

    def __init__(self, root):
        super().__init__(root)

    def __getitem__(self, i):
        if i == 4:
            with open(self.root + "/broken.jpg", "rb") as file:  # noqa: PTH123
                return Image.open(file).convert("RGB"), 1
        return picture(i, 20, 24), i % 2


def test_sets_of_another_kind_are_refused(tmp_path, monkeypatch):
    for kind in (Pairs, Demanding):
        monkeypatch.setattr(sets, kind.__name__, kind, raising=False)
    with pytest.raises(DataError, match=r"gives \(Image, tuple\), expected \(image, int\)"):
        open_data("torchvision:Pairs", folder=tmp_path / "here")
    with pytest.raises(DataError, match=r"missing 1 required .*Data\.of"):
        open_data("torchvision:Demanding", folder=tmp_path / "here")


def test_a_set_without_splits_gives_a_test_split_and_names_its_bad_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sets, "Unsplit", Unsplit, raising=False)
    root = tmp_path / "here"
    write(root / "broken.jpg", encoded(picture(4, 20, 24)))
    data = open_data("torchvision:Unsplit", folder=root, validation_split=0)
    assert (len(data.train), len(data.test), data.shape) == (4, 2, (3, 20, 20))
    assert "taken from training" in str(data)
    good = (root / "broken.jpg").read_bytes()
    write(root / "broken.jpg", good[: len(good) // 2])
    monkeypatch.setattr(Unsplit, "targets", [0, 1, 0, 1, 1, 1], raising=False)
    with pytest.raises(DataError, match=r"1 of 6 files[^\n]*\n  train/4: (truncated|damaged)"):
        open_data("torchvision:Unsplit", folder=root)


def test_mirrored_digits_are_no_digits(tmp_path, monkeypatch):
    monkeypatch.setattr(sets, "MNIST", Photos)
    data = open_data("torchvision:MNIST", folder=tmp_path / "here", image_size=16)
    assert data.preprocessing["augment"] == "crop"
