"""Pictures and published layouts in small, and slow, obvious twins of what is done to batches."""

import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


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


def zipped(path: Path, files, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def tarred(path: Path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


# CIFAR


def cifar_batch(seed, count=6, classes=10):
    rng = np.random.default_rng(seed)
    labels = (np.arange(count) + seed) % classes
    return rng.integers(0, 256, (count, 32, 32, 3), np.uint8), labels


def planes(images):
    """Red, green and blue planes in a row, as published; one value after the other."""
    out = np.zeros((len(images), 3072), np.uint8)
    for i, image in enumerate(images):
        for c in range(3):
            for y in range(32):
                out[i, c * 1024 + y * 32 : c * 1024 + y * 32 + 32] = image[y, :, c]
    return out


def cifar10_python(batches, test):
    """Files of cifar-10-batches-py by name. Protocol 2 and keys of bytes, as published."""
    files = {f"data_batch_{i + 1}": cifar_pickle(*batch) for i, batch in enumerate(batches)}
    files["test_batch"] = cifar_pickle(*test)
    files["batches.meta"] = pickle.dumps({b"label_names": [n.encode() for n in CLASSES]}, protocol=2)
    return files


def cifar_pickle(images, labels, key=b"labels"):
    table = {b"data": planes(images), key: [int(n) for n in labels], b"batch_label": b"a batch"}
    return pickle.dumps(table, protocol=2)


def cifar10_binary(batches, test):
    files = {f"data_batch_{i + 1}.bin": records(*batch) for i, batch in enumerate(batches)}
    return files | {"test_batch.bin": records(*test), "batches.meta.txt": "\n".join(CLASSES).encode() + b"\n"}


def records(images, *labels):
    rows = (
        bytes([int(column[i]) for column in labels]) + row.tobytes() for i, row in enumerate(planes(images))
    )
    return b"".join(rows)


def grid(images, columns):
    """Images of 32x32 side by side, in one lossless WebP."""
    rows = len(images) // columns
    out = np.zeros((rows * 32, columns * 32, 3), np.uint8)
    for i, image in enumerate(images):
        y, x = i // columns * 32, i % columns * 32
        out[y : y + 32, x : x + 32] = image
    return encoded(Image.fromarray(out), "WEBP", lossless=True)


def cifar10_grids(root: Path, batches, test):
    labels = {"classes": CLASSES, "test_batch": [int(n) for n in test[1]]}
    write(root / "test_batch.webp", grid(test[0], 3))
    for name, (images, numbers) in batches.items():
        write(root / f"{name}.webp", grid(images, 3))
        labels[name] = [int(n) for n in numbers]
    (root / "labels.json").write_text(json.dumps(labels))


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
