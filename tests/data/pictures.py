"""Small pictures, and slow, obvious twins of what is done to batches."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed=0, width=40, height=30):
    """Smooth enough that JPEG keeps it."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image, format="JPEG", **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def jpeg(seed=0, width=40, height=30):
    return encoded(picture(seed, width, height), quality=90)


def write(path: Path, data: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def class_folders(root: Path, counts, seed=0):
    """root/CLASS/NUMBER.jpg for each class and count."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            seed += 1
            write(root / name / f"{i}.jpg", jpeg(seed))
    return root


# Slow twins


def cropped(image, top, left, size, pad):
    """Pixel by pixel; zeros outside."""
    out = np.zeros((size, size, 3), np.float64)
    for y in range(size):
        for x in range(size):
            row, column = y + top - pad, x + left - pad
            if 0 <= row < image.shape[0] and 0 <= column < image.shape[1]:
                out[y, x] = image[row, column]
    return out


def normal(image, mean, std):
    """(h, w, 3) of 0..255 to (3, h, w), in float64."""
    return ((np.asarray(image, np.float64) / 255 - np.array(mean)) / np.array(std)).transpose(2, 0, 1)
