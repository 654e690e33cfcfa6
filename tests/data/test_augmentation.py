"""Whole batches of crops, flips and normalisation against pixel by pixel."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import cropped, normal

from spalier.data import Loader
from spalier.data.data import (
    ORDER,
    ArraySplit,
    Offsets,
    Preprocessing,
    augment_batch,
    crop,
    draw_offsets,
    generator,
    normalize,
)

MEAN, STD = (0.49, 0.48, 0.44), (0.25, 0.24, 0.26)
KINDS = {
    "small": Preprocessing.small(8, MEAN, STD),
    "digits": Preprocessing.small(8, MEAN, STD, flip=False),
    "photographs": Preprocessing.photographs(14),
    "both": Preprocessing(6, 8, 2, True, MEAN, STD),
}


def pixels(kind, count=7, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count + 3, kind.stored, kind.stored, 3), np.uint8)
    rows = rng.permutation(count + 3)[:count]
    return ArraySplit(images, rows, np.arange(count) % 3, kind), images[rows]


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_is_what_each_image_gives_alone(name):
    kind = KINDS[name]
    split, images = pixels(kind)
    indices = np.array([5, 0, 6, 5])
    found, labels = split.fetch(indices, epoch=3, seed=11)
    table = draw_offsets(kind, len(split), seed=11, epoch=3)
    for image, index in zip(found, indices, strict=True):
        expected = cropped(images[index], table.tops[index], table.lefts[index], kind.size, kind.pad)
        expected = expected[:, ::-1] if table.flips[index] else expected
        # float32: about 4 roundings of numbers up to 3
        np.testing.assert_allclose(image.numpy(), normal(expected, kind.mean, kind.std), atol=2e-6)
    assert labels.tolist() == split.labels[indices].tolist()
    assert labels.dtype == torch.int64


@pytest.mark.parametrize("name", KINDS)
def test_without_an_epoch_it_is_the_middle(name):
    kind = KINDS[name]
    split, images = pixels(kind)
    found, _ = split.fetch(np.arange(7), None)
    start = (kind.stored - kind.size) // 2
    for image, stored in zip(found, images, strict=True):
        middle = stored[start : start + kind.size, start : start + kind.size]
        np.testing.assert_allclose(image.numpy(), normal(middle, kind.mean, kind.std), atol=2e-6)
    batch, _ = next(Loader(split, augment=False, seed=3).epoch(4))
    again, _ = split.fetch(generator(3, 4, ORDER).permutation(7), None)
    assert torch.equal(batch, again)


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("epoch", [None, 0])
def test_batches_are_floats_with_channels_last(count, epoch):
    split, _ = pixels(KINDS["small"])
    images, labels = split.fetch(np.arange(count), epoch)
    assert images.shape == (count, 3, 8, 8)
    assert labels.shape == (count,)
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_windows_are_slices(data):
    count, size = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 5))
    height, width = (size + data.draw(st.integers(0, 4)) for _ in range(2))
    images = np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)
    tops = np.array([data.draw(st.integers(0, height - size)) for _ in range(count)], np.int64)
    lefts = np.array([data.draw(st.integers(0, width - size)) for _ in range(count)], np.int64)
    found = crop(images, tops, lefts, size)
    assert found.shape == (count, size, size, 3)
    for i, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        assert np.array_equal(found[i], images[i, top : top + size, left : left + size])


def test_what_is_stored_stays_as_it_was():
    split, images = pixels(KINDS["both"])
    before = images.copy()
    for epoch in range(3):
        split.fetch(np.arange(7), epoch)[0].zero_()
    assert np.array_equal(split.images[split.rows], before)


def test_every_offset_and_both_sides_are_drawn():
    table = draw_offsets(KINDS["small"], 5000, seed=0, epoch=0)
    for column, values in zip(table, (3, 3, 2), strict=True):  # a padding of 1 on both sides
        counts = np.bincount(column.astype(int), minlength=values)
        assert len(counts) == values
        assert counts.min() > 0.9 * 5000 / values
    photographs_room = draw_offsets(KINDS["photographs"], 500, 0, 0)
    assert set(photographs_room.tops) == {0, 1, 2}
    assert not draw_offsets(KINDS["digits"], 500, 0, 0).flips.any()


def test_what_is_drawn_depends_on_seed_and_epoch():
    tables = {(s, e): draw_offsets(KINDS["small"], 50, s, e) for s in range(2) for e in range(2)}
    again = draw_offsets(KINDS["small"], 50, 1, 1)
    assert all(np.array_equal(a, b) for a, b in zip(tables[1, 1], again, strict=True))
    assert len({t.tops.tobytes() for t in tables.values()}) == 4
    crops_alone = draw_offsets(KINDS["digits"], 50, 1, 1)
    assert np.array_equal(crops_alone.tops, again.tops)


def test_flips_mirror_left_and_right():
    image = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(1, 4, 4, 3)
    kind = Preprocessing(4, 4, 0, True, MEAN, STD)
    zero = np.zeros(1, np.int64)
    found = augment_batch(image, Offsets(zero, zero, np.array([True])), kind)
    assert np.array_equal(found, image[:, :, ::-1])
    assert normalize(found, kind).shape == (1, 3, 4, 4)
