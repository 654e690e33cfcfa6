"""Images in folders by class, and what folders may hold besides."""

import os

import numpy as np
import pytest
from pictures import class_folders, jpeg, write

from spalier.data import open_data
from spalier.data.images import center_square, decode
from spalier.errors import ConfigError, DataError


def opened(root, **options):
    return open_data(f"folder:{root}", **{"image_size": 16, "validation_split": 0} | options)


def counts(split):
    return None if split is None else np.bincount(split.labels).tolist()


def test_parts_in_folders(tmp_path):
    class_folders(tmp_path / "train", {"b": 4, "a": 6})
    class_folders(tmp_path / "val", {"a": 2, "b": 2}, seed=50)
    class_folders(tmp_path / "test", {"a": 3, "b": 1}, seed=90)
    data = opened(tmp_path, validation_split=0.3)
    assert data.classes == ("a", "b")
    assert [counts(p) for p in (data.train, data.validation, data.test)] == [[6, 4], [2, 2], [3, 1]]
    assert "validation: the set's own" in str(data)
    expected = center_square(decode((tmp_path / "train" / "b" / "2.jpg").read_bytes()), 16)
    assert np.array_equal(data.train.images[data.train.rows[8]], expected)
    without = opened(tmp_path)
    assert without.validation is None
    assert counts(without.train) == [6, 4]
    assert "not used" in str(without)


def test_one_folder_of_classes_gives_a_test_set_that_stays(tmp_path):
    class_folders(tmp_path, {"a": 20, "b": 10})
    tests = {opened(tmp_path, seed=s, validation_split=0.1).test.labels.tobytes() for s in range(3)}
    data = opened(tmp_path)
    assert counts(data.train) == [16, 8]
    assert counts(data.test) == [4, 2]
    assert len(tests) == 1
    assert "taken from training" in str(data)
    rows = [set(opened(tmp_path, seed=s, validation_split=0.25).validation.rows) for s in range(3)]
    assert rows[0] != rows[1] or rows[1] != rows[2]
    assert not any(r & set(data.test.rows) for r in rows)


def test_moved_data_is_the_same_data(tmp_path):
    class_folders(tmp_path / "one", {"a": 5, "b": 5})
    class_folders(tmp_path / "two", {"a": 5, "b": 5})
    assert opened(tmp_path / "one").digest == opened(tmp_path / "two").digest
    (tmp_path / "two" / "a" / "0.jpg").rename(tmp_path / "two" / "b" / "x.jpg")
    assert opened(tmp_path / "one").digest != opened(tmp_path / "two").digest


def test_hidden_files_and_clutter_are_no_samples(tmp_path):
    class_folders(tmp_path, {"a": 5, "b": 5, ".git": 2})
    for name in (".DS_Store", "Thumbs.db", "desktop.ini", "_DS_Store", "__MACOSX/x.jpg"):
        write(tmp_path / "a" / name, b"words")
    write(tmp_path / "README.txt", b"beside the classes: nobody takes it for a sample")
    data = opened(tmp_path)
    assert data.classes == ("a", "b")
    assert not data.skipped
    write(tmp_path / "stray.jpg", jpeg())
    with pytest.raises(DataError, match=r"stray\.jpg: an image outside"):
        opened(tmp_path)


def test_the_content_decides_not_the_name(tmp_path):
    class_folders(tmp_path, {"a": 5, "b": 5})
    write(tmp_path / "a" / "photo", jpeg(70))
    write(tmp_path / "b" / "deeper" / "photo.download", jpeg(71))
    assert len(opened(tmp_path).train) + len(opened(tmp_path).test) == 12


@pytest.mark.skipif(os.name == "nt", reason="needs links and pipes")
def test_loops_pipes_and_broken_links_do_not_hang(tmp_path):
    class_folders(tmp_path, {"a": 5, "b": 5})
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "b" / "broken.jpg").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "b" / "pipe.jpg")
    with pytest.raises(DataError) as error:
        opened(tmp_path)
    assert "a/loop: a link to a folder that is read already" in str(error.value)
    assert "b/broken.jpg: broken link" in str(error.value)
    assert "b/pipe.jpg: not a regular file" in str(error.value)
    assert len(str(error.value).splitlines()) < 12


@pytest.mark.skipif(os.name == "nt", reason="needs links")
def test_links_to_images_and_folders_are_followed(tmp_path):
    class_folders(tmp_path / "store", {"x": 5, "y": 5})
    for name in "xy":
        (tmp_path / "classes").mkdir(exist_ok=True)
        (tmp_path / "classes" / name).symlink_to(tmp_path / "store" / name)
    assert len(opened(tmp_path / "classes").train) == 8


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="everything is readable for root")
def test_files_without_permission_are_listed(tmp_path):
    class_folders(tmp_path, {"a": 5, "b": 5})
    (tmp_path / "a" / "0.jpg").chmod(0)
    with pytest.raises(DataError, match=r"a/0\.jpg: unreadable: Permission denied"):
        opened(tmp_path)


def test_empty_and_single_classes_are_refused(tmp_path):
    class_folders(tmp_path, {"a": 5, "b": 5, "empty": 0})
    write(tmp_path / "rotten" / "0.jpg", b"words")
    with pytest.raises(DataError, match="without any training image that can be used: empty, rotten"):
        opened(tmp_path, skip_bad=True)
    kept = opened(tmp_path, classes=["b", "a"])
    assert kept.classes == ("b", "a")
    with pytest.raises(DataError, match="single class, a"):
        opened(tmp_path, classes=["a"])
    with pytest.raises(ConfigError, match=r"classes asks for zebra, expected different ones of a, b, empty"):
        opened(tmp_path, classes=["zebra", "a"])
    with pytest.raises(ConfigError, match="one twice"):
        opened(tmp_path, classes=["a", "a"])


def test_a_class_of_one_sample_stays_in_training(tmp_path):
    class_folders(tmp_path / "train", {"a": 10, "rare": 1})
    class_folders(tmp_path / "test", {"a": 1})
    data = opened(tmp_path, validation_split=0.2)
    assert counts(data.train) == [8, 1]
    assert counts(data.validation) == [2]
    assert "none of rare" in str(data)


def test_names_of_parts(tmp_path):
    class_folders(tmp_path / "a" / "training", {"x": 3, "y": 3})
    class_folders(tmp_path / "a" / "docs", {"z": 1})
    data = opened(tmp_path / "a")
    assert data.classes == ("x", "y")
    assert "not looked at: docs" in str(data)
    class_folders(tmp_path / "a" / "train", {"x": 1})
    with pytest.raises(DataError, match="train, training, expected one"):
        opened(tmp_path / "a")
    class_folders(tmp_path / "b", {"train": 5, "plane": 5})  # vehicles
    assert opened(tmp_path / "b").classes == ("plane", "train")
    class_folders(tmp_path / "c" / "test", {"x": 3, "y": 3})
    with pytest.raises(DataError, match="expected train/CLASS/"):
        opened(tmp_path / "c")
    class_folders(tmp_path / "d" / "train", {"x": 3, "y": 3})
    class_folders(tmp_path / "d" / "test", {"x": 3, "other": 3})
    with pytest.raises(DataError, match="classes that training has not: other"):
        opened(tmp_path / "d")


def test_folders_that_are_not_there_or_have_nothing(tmp_path):
    with pytest.raises(DataError, match="there is no folder"):
        opened(tmp_path / "nowhere")
    write(tmp_path / "flat" / "0.jpg", jpeg())
    with pytest.raises(DataError, match="labels=False"):
        opened(tmp_path / "flat")
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match="no images at all"):
        opened(tmp_path / "void", labels=False)


def test_images_without_classes(tmp_path):
    for i in range(10):
        write(tmp_path / "flat" / f"{i}.jpg", jpeg(i))
    data = opened(tmp_path / "flat", labels=False, validation_split=0.25)
    assert data.classes == ()
    assert (len(data.train), len(data.validation), len(data.test)) == (6, 2, 2)
    assert set(data.train.labels) == {-1}
    assert data.train.fetch(np.arange(3), 0)[1].tolist() == [-1, -1, -1]
    assert "training" in str(data)
    class_folders(tmp_path / "parts" / "train", {"a": 3, "b": 2})
    class_folders(tmp_path / "parts" / "test", {"a": 1})
    both = opened(tmp_path / "parts", labels=False)
    assert (len(both.train), len(both.test)) == (5, 1)


def test_hostile_names_are_text(tmp_path):
    strange = "a\n\x1b[31m"
    class_folders(tmp_path, {strange: 5, "b": 5})
    data = opened(tmp_path)
    assert strange in data.classes
    assert "\x1b" not in str(data)
    write(tmp_path / strange / "x\r.jpg", b"words")
    with pytest.raises(DataError) as error:
        opened(tmp_path)
    assert r"a\n\x1b[31m/x\r.jpg: not an image" in str(error.value)


@pytest.mark.skipif(os.name == "nt", reason="names are text there")
def test_names_that_are_no_text(tmp_path):
    class_folders(tmp_path, {"a": 5, "b": 5})
    write(tmp_path / os.fsdecode(b"c\xff") / "0.jpg", jpeg(40))
    write(tmp_path / os.fsdecode(b"c\xff") / "1.jpg", jpeg(41))
    data = opened(tmp_path)
    str(data).encode()
    assert len(data.classes) == 3
    assert data.digest == opened(tmp_path).digest


def test_limits_are_shares_of_each_class(tmp_path):
    class_folders(tmp_path / "train", {"a": 20, "b": 10, "c": 1})
    class_folders(tmp_path / "test", {"a": 2, "b": 2})
    data = opened(tmp_path, max_train_samples=10)
    assert len(data.train) == 10
    assert counts(data.train)[2] == 1
    assert counts(data.train)[0] > counts(data.train)[1]
    assert len(data.test) == 4
    assert "max_train_samples: 10 of 31" in str(data)
    assert opened(tmp_path, max_train_samples=10, seed=1).digest != data.digest
    assert opened(tmp_path, max_train_samples=10).digest == data.digest
    assert len(opened(tmp_path, max_train_samples=100).train) == 31
    with pytest.raises(ConfigError, match="each of the 3 classes"):
        opened(tmp_path, max_train_samples=2)
