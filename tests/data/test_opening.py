"""Data sets by name: digits, options, and Hugging Face's."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import jpeg

from spalier.data import BadFile, Data, open_data
from spalier.data.data import held_out, limited
from spalier.data.sources import NAMES
from spalier.errors import ConfigError, DataError


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    data = open_data("digits")
    assert (len(data.train), len(data.validation), len(data.test)) == (1294, 144, 359)
    assert data.classes == tuple("0123456789")
    assert data.shape == (3, 8, 8)
    raw = load_digits()
    rows = np.concatenate([p.rows for p in (data.train, data.validation, data.test)])
    assert sorted(rows) == list(range(1797))
    for split in (data.train, data.test):
        images, labels = split.fetch(np.arange(20), None)
        for image, label, row in zip(images, labels, split.rows[:20], strict=True):
            assert int(label) == raw.target[row]
            grey = np.round(raw.images[row] * 255 / 16) / 255
            for channel in image.double().numpy():
                np.testing.assert_allclose(channel, (grey - 0.5) / 0.5, atol=1e-6)
    assert data.preprocessing["augment"] == "crop"  # a mirrored digit is another one, or none


def test_the_digits_of_the_test_are_always_the_same():
    tests = [open_data("digits", seed=s, validation_split=v).test for s, v in ((0, 0.1), (5, 0.3), (9, 0))]
    assert len({t.rows.tobytes() for t in tests}) == 1
    training = {open_data("digits", seed=s).train.rows.tobytes() for s in range(3)}
    assert len(training) == 3
    assert open_data("digits", validation_split=0).validation is None


def test_sizes_of_digits():
    assert open_data("digits", image_size=32).train.fetch(np.arange(2), 0)[0].shape == (2, 3, 32, 32)
    assert open_data("digits", image_size=32).preprocessing["pad"] == 4
    assert open_data("digits", image_size=8).digest == open_data("digits").digest
    assert open_data("digits", image_size=16).digest != open_data("digits").digest


def test_some_digits():
    data = open_data("digits", classes=["7", "3"], max_train_samples=50)
    assert data.classes == ("7", "3")
    assert len(data.train) + len(data.validation) == 50
    whole = open_data("digits")
    sevens = int((whole.test.labels == 7).sum())
    assert np.bincount(data.test.labels).tolist() == [sevens, int((whole.test.labels == 3).sum())]
    without = open_data("digits", labels=False)
    assert without.classes == ()
    assert set(without.train.labels) == {-1}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"validation_split": 1.0}, "share for validation is 1.0"),
        ({"validation_split": -0.1}, "share for validation is -0.1"),
        ({"validation_split": "a"}, "share for validation is 'a'"),
        ({"validation_split": float("nan")}, "share for validation is nan"),
        ({"validation_split": True}, "share for validation is True"),
        ({"image_size": 0}, "image_size is 0"),
        ({"image_size": 8.0}, "image_size is 8.0"),
        ({"seed": -1}, "seed is -1"),
        ({"max_train_samples": 0}, "max_train_samples is 0"),
        ({"max_train_samples": 5}, "each of the 10 classes"),
        ({"classes": ["ten"]}, "asks for ten"),
        ({"classes": "ten"}, "asks for ten"),
    ],
)
def test_options_are_checked(options, says):
    with pytest.raises(ConfigError, match=says):
        open_data("digits", **options)


@pytest.mark.parametrize("name", ["", "mnist", "folder:", "hf:", "Digits", "cifar10", "torchvision:", "a\nb"])
def test_unknown_names_list_the_known_ones(name):
    with pytest.raises(DataError, match="there is no data set") as error:
        open_data(name)
    assert all(known in str(error.value) for known in NAMES)
    assert "\n" not in str(error.value)


def test_a_missing_library_gives_the_line_that_helps(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    with pytest.raises(DataError, match=r"pip install 'spalier\[train\]'"):
        open_data("digits")


def test_importing_reads_nothing_and_needs_no_library():
    code = """
import sys
for name in ("PIL", "sklearn", "scipy", "datasets", "torchvision"):
    sys.modules[name] = None
from spalier.data import Data, Loader, Split, open_data
import spalier
print("fine")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "fine", run.stderr


def test_digests_tell_data_apart():
    options = [
        {},
        {"seed": 1},
        {"validation_split": 0.2},
        {"max_train_samples": 500},
        {"classes": ["1", "2"]},
        {"image_size": 12},
    ]
    digests = [open_data("digits", **each).digest for each in options]
    assert len(set(digests)) == len(options)
    assert open_data("digits").digest == digests[0]
    assert all(len(d) == 64 for d in digests)


def test_preprocessing_is_plain_data():
    import json

    found = open_data("digits").preprocessing
    assert json.loads(json.dumps(found)) == found
    assert found["mean"] == [0.5, 0.5, 0.5]


def test_the_summary_is_short_whatever_was_skipped():
    data = open_data("digits")
    skipped = tuple(BadFile(f"{i}\n.jpg", "truncated") for i in range(500))
    many = Data(**{**vars(data), "skipped": skipped})
    assert "left out: 480 more" in str(many)
    assert len(str(many).splitlines()) < 30


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    share=st.floats(0.01, 0.9),
    seed=st.integers(0, 2**40),
)
def test_held_out_is_a_share_of_each_class(counts, share, seed):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    out = held_out(labels, share, seed)
    for label, count in enumerate(counts):
        taken = int(out[labels == label].sum())
        assert (taken == 0) if count == 1 else (1 <= taken < count)
        assert abs(taken - share * count) <= 2
    assert np.array_equal(out, held_out(labels, share, seed))


@settings(max_examples=100, deadline=None)
@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=6), data=st.data())
def test_limits_keep_every_class(counts, data):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    most = data.draw(st.integers(len(counts), sum(counts) + 5))
    kept = limited(labels, most, seed=3)
    assert kept.sum() == min(most, sum(counts))
    assert len(np.unique(labels[kept])) == len(counts)


# Hugging Face


@pytest.fixture
def library(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets


def rows(library, count, labels=None, names=("cat", "dog"), seed=0, **columns):
    features = library.Features(
        {"image": library.Image(), "label": library.ClassLabel(names=list(names))}
        | {name: library.Value("int64") for name in columns}
    )
    labels = [i % len(names) for i in range(count)] if labels is None else labels
    images = [{"bytes": jpeg(seed + i), "path": None} for i in range(count)]
    return library.Dataset.from_dict({"image": images, "label": labels} | columns, features=features)


def test_a_saved_dataset_of_hugging_face(library, tmp_path):
    from spalier.data.images import center_square, decode

    found = library.DatasetDict(
        {"train": rows(library, 10), "validation": rows(library, 4), "test": rows(library, 6, seed=50)}
    )
    found.save_to_disk(tmp_path / "saved")
    data = open_data(f"hf:{tmp_path / 'saved'}", image_size=16)
    assert data.classes == ("cat", "dog")
    assert (len(data.train), len(data.validation), len(data.test)) == (10, 4, 6)
    assert data.train.labels.tolist() == [0, 1] * 5
    assert np.array_equal(data.test.images[data.test.rows[3]], center_square(decode(jpeg(53)), 16))


def test_a_folder_that_hugging_face_loads(library, tmp_path):
    (tmp_path / "set").mkdir()
    rows(library, 20, other=list(range(20))).to_parquet(tmp_path / "set" / "train-0.parquet")
    data = open_data(f"hf:{tmp_path / 'set'}", image_size=16, validation_split=0)
    assert (len(data.train), len(data.test)) == (16, 4)
    assert "taken from training" in str(data)


def test_a_test_split_without_labels_is_left_out_and_said(library, tmp_path):
    found = {"train": rows(library, 10), "test": rows(library, 4, labels=[-1] * 4)}
    library.DatasetDict(found).save_to_disk(tmp_path / "saved")
    data = open_data(f"hf:{tmp_path / 'saved'}", image_size=16, validation_split=0)
    assert len(data.test) == 2
    assert "test: left out" in str(data)
    without = open_data(f"hf:{tmp_path / 'saved'}", image_size=16, validation_split=0, labels=False)
    assert (len(without.train), len(without.test), without.classes) == (10, 4, ())
    found["test"] = found["test"].remove_columns("label")
    library.DatasetDict(found).save_to_disk(tmp_path / "bare")
    assert "test: left out" in str(open_data(f"hf:{tmp_path / 'bare'}", image_size=16))
    library.DatasetDict({"train": rows(library, 4, labels=[0, 1, -1, 1])}).save_to_disk(tmp_path / "gaps")
    with pytest.raises(DataError, match="sample 2 has label -1"):
        open_data(f"hf:{tmp_path / 'gaps'}", image_size=16)


def test_what_hugging_face_cannot_give_is_said(library, tmp_path):
    with pytest.raises(DataError, match="cannot be loaded"):
        open_data(f"hf:{tmp_path / 'nowhere'}")
    rows(library, 4).remove_columns("label").save_to_disk(tmp_path / "unlabelled")
    with pytest.raises(DataError, match=r"0 columns of classes \(ClassLabel\).*image \(Image\)"):
        open_data(f"hf:{tmp_path / 'unlabelled'}")
    library.DatasetDict({"all": rows(library, 4)}).save_to_disk(tmp_path / "unsplit")
    with pytest.raises(DataError, match="splits all, expected train"):
        open_data(f"hf:{tmp_path / 'unsplit'}")
    other = {"train": rows(library, 4), "test": rows(library, 4, names=("dog", "cat"))}
    library.DatasetDict(other).save_to_disk(tmp_path / "other")
    with pytest.raises(DataError, match="other classes: dog, cat and cat, dog"):
        open_data(f"hf:{tmp_path / 'other'}")
    columns = {name: [{"bytes": jpeg(), "path": None}] for name in ("first", "second")}
    features = library.Features({name: library.Image() for name in columns})
    library.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match="2 columns of images"):
        open_data(f"hf:{tmp_path / 'two'}")
