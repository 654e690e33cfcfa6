"""Oxford Flowers 102 in its official layout, and in a zip archive of some of it."""

import json

import numpy as np
import pytest
from pictures import jpeg, tarred, write, zipped
from scipy.io import savemat

from spalier.data.images import square
from spalier.data.open import open_data
from spalier.errors import DataError

IMAGES = 102 * 4
LABELS = np.arange(IMAGES) % 102 + 1
TRAIN, VALID, TEST = (np.arange(start, IMAGES + 1, 4) for start in (1, 2, 3))
TEST = np.concatenate([TEST, np.arange(4, IMAGES + 1, 4)])


@pytest.fixture(scope="module")
def pictures_():
    few = [jpeg(i, 24 + i, 20) for i in range(12)]
    return {f"jpg/image_{i:05d}.jpg": few[i % 12] for i in range(1, IMAGES + 1)}


@pytest.fixture(scope="module", autouse=True)
def labels_cover_training():
    global LABELS
    order = np.concatenate([TRAIN, VALID, TEST])
    LABELS = np.zeros(IMAGES, np.int64)
    LABELS[order - 1] = np.arange(IMAGES) % 102 + 1


def tables(root, **changed):
    root.mkdir(parents=True, exist_ok=True)
    split = {"trnid": TRAIN[None], "valid": VALID[None], "tstid": TEST[None]} | changed
    savemat(root / "setid.mat", split)
    savemat(root / "imagelabels.mat", {"labels": LABELS[None].astype(np.uint8)})


def check(data, pictures_, test=TEST):
    ids = np.concatenate([TRAIN, VALID])
    assert data.train.labels.tolist() == (LABELS[ids - 1] - 1).tolist()
    assert data.test.labels.tolist() == (LABELS[test - 1] - 1).tolist()
    assert len(data.classes) == 102
    for part, numbers in ((data.train, ids), (data.test, test)):
        for i in (0, len(numbers) // 2, len(numbers) - 1):
            expected = square(pictures_[f"jpg/image_{numbers[i]:05d}.jpg"], part.recipe.stored)
            assert np.array_equal(part._images[part._rows[i]], expected)


@pytest.mark.parametrize("place", ["", "flowers102", "flowers-102"])
@pytest.mark.parametrize("form", ["folder", "tgz"])
def test_train_and_val_are_the_training_set(pictures_, place, form, tmp_path):
    root = tmp_path / place
    tables(root)
    if form == "tgz":
        tarred(root / "102flowers.tgz", pictures_)
    else:
        for name, data in pictures_.items():
            write(root / name, data)
    data = open_data("flowers102", folder=tmp_path, size=21, validation=0)
    check(data, pictures_)
    assert data.preprocessing["stored"] == 24
    assert data.train.fetch(np.arange(2), 0)[0].shape == (2, 3, 21, 21)


def test_a_zip_archive_may_lack_test_images_that_a_list_names(pictures_, tmp_path):
    tables(tmp_path)
    some = TEST[::3]
    present = {f"jpg/image_{i:05d}.jpg" for i in (*TRAIN, *VALID, *some)}
    zipped(tmp_path / "few.zip", {n: d for n, d in pictures_.items() if n in present})
    (tmp_path / "test_subset.json").write_text(json.dumps({"test_subset": some.tolist()}))
    data = open_data("flowers102", folder=tmp_path, size=21, validation=0)
    check(data, pictures_, some)
    assert f"{len(some)} of {len(TEST)}" in str(data)
    (tmp_path / "test_subset.json").write_text(json.dumps({"test_subset": [int(TRAIN[0])]}))
    with pytest.raises(DataError, match="does not have in its test set"):
        open_data("flowers102", folder=tmp_path)
    (tmp_path / "test_subset.json").unlink()
    with pytest.raises(DataError, match=r"missing in few\.zip") as error:
        open_data("flowers102", folder=tmp_path, size=21)
    assert f"and {len(TEST) - len(some) - 20} more" in str(error.value)


def test_a_cache_needs_no_second_look_into_the_archive(pictures_, tmp_path, monkeypatch):
    tables(tmp_path)
    tarred(tmp_path / "102flowers.tgz", pictures_)
    first = open_data("flowers102", folder=tmp_path, size=21, cache=tmp_path / "cache")
    monkeypatch.setattr("spalier.data.flowers.tar_members", lambda *_: pytest.fail("read again"))
    again = open_data("flowers102", folder=tmp_path, size=21, cache=tmp_path / "cache")
    assert again.digest == first.digest


def test_tables_that_do_not_fit_are_refused(pictures_, tmp_path):
    write(tmp_path / "jpg" / "image_00001.jpg", jpeg())
    tables(tmp_path, trnid=np.array([[IMAGES + 1]]))
    with pytest.raises(DataError, match="does not fit"):
        open_data("flowers102", folder=tmp_path)
    tables(tmp_path, trnid=TEST[None])
    with pytest.raises(DataError, match="twice"):
        open_data("flowers102", folder=tmp_path)
    (tmp_path / "setid.mat").write_bytes(b"rubbish")
    with pytest.raises(DataError, match="not a readable table"):
        open_data("flowers102", folder=tmp_path)
    savemat(tmp_path / "setid.mat", {"other": np.zeros(3)})
    with pytest.raises(DataError, match="trnid"):
        open_data("flowers102", folder=tmp_path)


def test_a_missing_set_says_where_to_get_it_and_where_to_put_it(tmp_path):
    write(tmp_path / "jpg" / "image_00001.jpg", jpeg())  # without the tables
    with pytest.raises(DataError) as error:
        open_data("flowers102", folder=tmp_path)
    for piece in ("robots.ox.ac.uk", str(tmp_path / "flowers102"), "102flowers.tgz", "setid.mat"):
        assert piece in str(error.value)
