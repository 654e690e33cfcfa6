"""scikit-learn's handwritten digits: 1,797 images of 8x8, inside of the library, so nothing has to be fetched."""

from __future__ import annotations

import numpy as np

from spalier.data.augment import Recipe
from spalier.data.samples import TEST, TRAIN, Samples, resized, small
from spalier.data.splits import TEST_SEED, TEST_SHARE, held_out
from spalier.data.text import imported

HALF = (0.5, 0.5, 0.5)


def digits(size: int | None) -> tuple[Samples, Recipe]:
    """All digits, a fifth of each class for the test whatever the seed of a run."""
    found = imported("sklearn.datasets", "the data set digits").load_digits()
    grey = np.round(found.images * (255 / 16)).astype(np.uint8)  # 0..16 to 0..255
    labels = found.target.astype(np.int64)
    parts = np.where(held_out(labels, TEST_SHARE, TEST_SEED), TEST, TRAIN)
    images = resized(np.repeat(grey[..., None], 3, axis=3), size or 8)
    samples = Samples(tuple("0123456789"), labels, parts, images)
    note = f"test: {TEST_SHARE:.0%} of each class, the same whatever the seed"
    return samples.noted(note), small(size or 8, HALF, HALF, flip=False)
