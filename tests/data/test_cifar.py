"""CIFAR in every published layout, and pickles that would run something."""

import gzip
import pickle
import pickletools

import numpy as np
import pytest
from pictures import (
    CLASSES,
    cifar10_binary,
    cifar10_grids,
    cifar10_python,
    cifar_batch,
    cifar_pickle,
    planes,
    records,
    tarred,
    write,
)

from spalier.data.open import open_data
from spalier.data.pickles import unpickled
from spalier.errors import DataError

BATCHES = [cifar_batch(i) for i in range(5)]
TEST = cifar_batch(9, 10)
FINE = [f"fine{i}" for i in range(100)]


def stored(part):
    """The bytes of a part."""
    return part._images[part._rows]


def check(data, batches=BATCHES, test=TEST):
    assert np.array_equal(stored(data.train), np.concatenate([images for images, _ in batches]))
    assert data.train.labels.tolist() == np.concatenate([labels for _, labels in batches]).tolist()
    assert np.array_equal(stored(data.test), test[0])
    assert data.test.labels.tolist() == test[1].tolist()


def laid_out(form, root):
    files = cifar10_binary(BATCHES, TEST) if "bin" in form else cifar10_python(BATCHES, TEST)
    inner = "cifar-10-batches-bin" if "bin" in form else "cifar-10-batches-py"
    if form.endswith("gz"):
        tarred(root / form, {f"{inner}/{name}": data for name, data in files.items()})
    else:
        for name, data in files.items():
            write(root / inner / name, data)


FORMS = ["cifar-10-batches-py", "cifar-10-batches-bin", "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["", "cifar10"])
def test_cifar10_is_read_from_every_official_layout(form, place, tmp_path):
    laid_out(form, tmp_path / place)
    data = open_data("cifar10", folder=tmp_path, validation=0)
    check(data)
    assert data.classes == tuple(CLASSES)
    assert data.shape == (3, 32, 32)
    assert data.validation is None


def test_all_layouts_hold_the_same(tmp_path):
    digests = set()
    for form in FORMS:
        laid_out(form, tmp_path / form / "root")
        digests.add(open_data("cifar10", folder=tmp_path / form / "root").digest)
    assert len(digests) == 1


def test_the_folder_itself_can_be_named(tmp_path, monkeypatch):
    laid_out("cifar-10-batches-py", tmp_path)
    check(open_data("cifar10", folder=tmp_path / "cifar-10-batches-py", validation=0))
    monkeypatch.setenv("SPALIER_DATA", str(tmp_path))
    check(open_data("cifar10", validation=0))


def test_grids_hold_whichever_batches_are_there(tmp_path):
    batch, test = cifar_batch(1, 12), cifar_batch(2, 9)
    cifar10_grids(tmp_path / "cifar10", {"data_batch_3": batch}, test)
    data = open_data("cifar10", folder=tmp_path, validation=0)
    check(data, [batch], test)
    assert "1 of 5 batches" in str(data)
    (tmp_path / "cifar10" / "data_batch_3.webp").unlink()
    with pytest.raises(DataError, match=r"no data_batch_1\.webp"):
        open_data("cifar10", folder=tmp_path)
    cifar10_grids(tmp_path / "cifar10", {"data_batch_3": batch}, test)
    (tmp_path / "cifar10" / "labels.json").write_text("{}")
    with pytest.raises(DataError, match="classes"):
        open_data("cifar10", folder=tmp_path)
    cifar10_grids(tmp_path / "cifar10", {"data_batch_3": batch}, (test[0], test[1][:-1]))
    with pytest.raises(DataError, match="for 8 images"):
        open_data("cifar10", folder=tmp_path)


@pytest.mark.parametrize("form", ["cifar-100-python", "cifar-100-binary"])
@pytest.mark.parametrize("packed", [False, True])
def test_cifar100_takes_the_fine_labels(form, packed, tmp_path):
    train, test = cifar_batch(3, 100, 100), cifar_batch(4, 10, 100)
    coarse = np.full(100, 7), np.full(10, 7)
    if form.endswith("python"):
        files = {
            name: cifar_pickle(*part, b"fine_labels") for name, part in (("train", train), ("test", test))
        }
        files["meta"] = pickle.dumps({b"fine_label_names": [n.encode() for n in FINE]}, protocol=2)
    else:
        files = {
            "train.bin": records(train[0], coarse[0], train[1]),
            "test.bin": records(test[0], coarse[1], test[1]),
            "fine_label_names.txt": "\n".join(FINE).encode(),
        }
    if packed:
        tarred(tmp_path / f"{form}.tar.gz", {f"./{form}/{name}": data for name, data in files.items()})
    else:
        for name, data in files.items():
            write(tmp_path / "cifar100" / form / name, data)
    data = open_data("cifar100", folder=tmp_path, validation=0)
    check(data, [train], test)
    assert data.classes == tuple(FINE)
    assert data.preprocessing["mean"] == [0.5071, 0.4865, 0.4409]


def test_all_five_batches_are_needed(tmp_path):
    laid_out("cifar-10-batches-py", tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(DataError, match="data_batch_4"):
        open_data("cifar10", folder=tmp_path)
    files = cifar10_python(BATCHES[:3], TEST)
    tarred(
        tmp_path / "packed" / "cifar-10-python.tar.gz",
        {f"cifar-10-batches-py/{n}": d for n, d in files.items()},
    )
    with pytest.raises(DataError, match=r"no cifar-10-batches-py/data_batch_4"):
        open_data("cifar10", folder=tmp_path / "packed")


def test_other_sizes_and_classes(tmp_path):
    laid_out("cifar-10-batches-py", tmp_path)
    data = open_data("cifar10", folder=tmp_path, size=16, validation=0)
    assert data.train.fetch(np.arange(3), 0)[0].shape == (3, 3, 16, 16)
    some = open_data("cifar10", folder=tmp_path, classes=["dog", "cat"], validation=0)
    every = np.concatenate([labels for _, labels in BATCHES])
    images = np.concatenate([images for images, _ in BATCHES])
    kept = np.isin(every, (3, 5))
    assert some.classes == ("dog", "cat")
    assert some.train.labels.tolist() == [0 if n == 5 else 1 for n in every[kept]]
    assert np.array_equal(stored(some.train), images[kept])


class Runs:
    def __reduce__(self):
        return (print, ("this was run",))


@pytest.mark.parametrize(
    "attack",
    [
        pickle.dumps({b"data": Runs()}, protocol=2),
        pickle.dumps(Runs()),
        b"cos\nsystem\n(S'echo this was run'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\nscalar\n.",
        b"cbuiltins\neval\n(S'print(1)'\ntR.",
        b"c_codecs\nlookup\n(S'x'\ntR.",
        b"P123\n.",
    ],
)
def test_a_pickle_that_runs_something_is_refused(attack, tmp_path, capfd):
    files = cifar10_python(BATCHES, TEST) | {"data_batch_2": attack}
    for name, data in files.items():
        write(tmp_path / "cifar-10-batches-py" / name, data)
    with pytest.raises(DataError, match=r"data_batch_2 is no batch of CIFAR.*nothing but arrays"):
        open_data("cifar10", folder=tmp_path)
    assert "this was run" not in "".join(capfd.readouterr())


def test_pickles_name_what_is_expected():
    """The stand-ins are for exactly what pickles of arrays ask for, in both protocols of old."""
    for protocol in (0, 2, 4):
        data = pickle.dumps({b"data": planes(TEST[0])}, protocol=protocol)
        found = unpickled(data, "x")[b"data"].bytes_of(3072, "x")
        assert np.array_equal(found, planes(TEST[0]))
    names = {arg for op, arg, _ in pickletools.genops(cifar_pickle(*TEST)) if op.name == "GLOBAL"}
    assert len(names) == 4


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"rubbish",
        cifar_pickle(*TEST)[:-40],
        pickle.dumps([1, 2], protocol=2),
        pickle.dumps({b"data": 3, b"labels": [1]}, protocol=2),
        pickle.dumps({b"data": np.zeros((2, 3072), np.float32), b"labels": [1, 2]}, protocol=2),
        pickle.dumps({b"data": np.zeros((2, 3071), np.uint8), b"labels": [1, 2]}, protocol=2),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, protocol=2),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": ["a", "b"]}, protocol=2),
        pickle.dumps({b"data": np.array([None, 1]), b"labels": [1, 2]}, protocol=2),
    ],
)
def test_a_batch_of_another_shape_is_refused(broken, tmp_path):
    files = cifar10_python(BATCHES, TEST) | {"data_batch_2": broken}
    for name, data in files.items():
        write(tmp_path / "cifar-10-batches-py" / name, data)
    with pytest.raises(DataError, match="data_batch_2"):
        open_data("cifar10", folder=tmp_path)


def test_labels_out_of_range_are_refused(tmp_path):
    images, labels = BATCHES[0]
    wrong = labels.copy()
    wrong[3] = 10
    for name, data in cifar10_python([(images, wrong), *BATCHES[1:]], TEST).items():
        write(tmp_path / "cifar-10-batches-py" / name, data)
    with pytest.raises(DataError, match="sample 3 has label 10, expected 0 to 9"):
        open_data("cifar10", folder=tmp_path)


def test_damaged_binaries_and_archives_are_refused(tmp_path):
    files = cifar10_binary(BATCHES, TEST)
    for name, data in files.items():
        write(tmp_path / "a" / "cifar-10-batches-bin" / name, data)
    write(tmp_path / "a" / "cifar-10-batches-bin" / "data_batch_1.bin", files["data_batch_1.bin"][:-1])
    with pytest.raises(DataError, match="expected a multiple of 3,073"):
        open_data("cifar10", folder=tmp_path / "a")
    laid_out("cifar-10-python.tar.gz", tmp_path / "b")
    whole = (tmp_path / "b" / "cifar-10-python.tar.gz").read_bytes()
    for broken in (whole[: len(whole) // 2], b"rubbish", gzip.compress(b"no tar")):
        write(tmp_path / "b" / "cifar-10-python.tar.gz", broken)
        with pytest.raises(DataError, match="not a readable archive"):
            open_data("cifar10", folder=tmp_path / "b")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_missing_set_says_where_to_get_it_and_where_to_put_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPALIER_DATA", raising=False)
    with pytest.raises(DataError) as error:
        open_data(name)
    for piece in ("https://www.cs.toronto.edu", str(tmp_path / "data" / name), "SPALIER_DATA", "tar.gz"):
        assert piece in str(error.value)
