"""Images: decoded into square arrays of bytes, then cropped, flipped and normalised in whole batches.

What augmentation draws depends on seed, epoch and sample alone.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from spalier.errors import DataError
from spalier.text import import_optional

Images = NDArray[np.uint8]
Ints = NDArray[np.int64]
Color = tuple[float, float, float]

# Pillow also reads formats such as EPS by starting other programs; only these are admitted.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF", "JPEG2000")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ORDER, OFFSETS, ITEM, SPLIT, LIMIT = range(5)
"""What random numbers are for, so that no two uses share a stream."""


def generator(seed: int, epoch: int, purpose: int) -> np.random.Generator:
    """Random numbers that belong to a seed, an epoch and a purpose."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch, purpose))))


# -- decoding ---------------------------------------------------------------------------------------------------------


def center_square(image: Any, side: int) -> Images:
    """The middle square of an RGB image of Pillow, resized: (side, side, 3)."""
    width, height = image.size
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    # Cut and resized in one step: a strip of 1 x 100,000 pixels would become huge if it were resized first.
    box = (left, top, left + short, top + short)
    return np.asarray(image.resize((side, side), resample=pillow().Resampling.BILINEAR, box=box))


def decode(data: bytes) -> Any:
    """An image of Pillow from a file's bytes. Its size is checked before anything is decoded."""
    image = pillow().open(BytesIO(data), formats=_formats())
    width, height = image.size
    most = pillow().MAX_IMAGE_PIXELS  # Pillow itself only warns up to twice this
    if most is not None and width * height > 2 * most:
        raise pillow().DecompressionBombError(
            f"{width:,} x {height:,} pixels, at most {2 * most:,} are decoded"
        )
    image.load()
    return image


def to_rgb(image: Any) -> Any:
    """An image of Pillow in RGB: EXIF's orientation applied, transparency on white, 16 bits as 8."""
    with suppress(Exception):  # a damaged EXIF block leaves the pixels as they are stored, as in any viewer
        image = import_optional("PIL.ImageOps", "reading images", DataError).exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)
        if values.dtype.kind == "f" or values.min() < 0 or values.max() > 65535:
            raise ValueError("pixels beyond 16 bits, or not integers: save as 8 or 16 bits")
        # Pillow itself would clip values at 255.
        return pillow().fromarray((values.astype(np.int64) >> 8).astype(np.uint8)).convert("RGB")
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        over = image.convert("RGBA")
        white = pillow().new("RGBA", over.size, "white")
        return pillow().alpha_composite(white, over).convert("RGB")
    return image.convert("RGB")


def why_unusable(error: Exception) -> str:
    """What an error says of an image; decoders raise a dozen kinds."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:  # Pillow's own have none
        return f"unreadable: {error.strerror}"
    if isinstance(error, pillow().UnidentifiedImageError):
        return "not an image of a known format"
    if isinstance(error, pillow().DecompressionBombError):
        return f"bomb-sized: {text}"
    cut = any(word in text.lower() for word in ("truncated", "eof", "end of file", "not enough image data"))
    return f"truncated: {text}" if cut else f"damaged: {text}"


def pillow() -> Any:
    """The module ``PIL.Image``."""
    return import_optional("PIL.Image", "reading images", DataError)


@cache
def _formats() -> tuple[str, ...]:
    """The admitted formats that this build of Pillow has."""
    pillow().init()
    return tuple(name for name in FORMATS if name in pillow().OPEN)


# -- augmentation -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preprocessing:
    """How stored images become a batch.

    ``size`` is the side of the images that come out, ``stored`` the side of those that are kept, ``pad`` the zeros
    around them in training. ``flip`` says whether a mirrored image still belongs to its class.
    """

    size: int
    stored: int
    pad: int
    flip: bool
    mean: Color
    std: Color

    @staticmethod
    def small(
        size: int, mean: Color = IMAGENET_MEAN, std: Color = IMAGENET_STD, flip: bool = True
    ) -> Preprocessing:
        """Small images are stored as they come out, and padded by an eighth for random crops."""
        return Preprocessing(size, size, max(1, size // 8), flip, mean, std)

    @staticmethod
    def photographs(size: int) -> Preprocessing:
        """Photographs are stored an eighth larger, so that random crops hold nothing but picture."""
        return Preprocessing(size, round(size * 8 / 7), 0, True, IMAGENET_MEAN, IMAGENET_STD)

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for the record of a run."""
        return asdict(self) | {
            "mean": list(self.mean),
            "std": list(self.std),
            "augment": "flip-crop" if self.flip else "crop",
            "pixels": "0..255, divided by 255, less the mean, divided by the deviation",
        }


class Offsets(NamedTuple):
    """Where each sample is cropped, and whether it is mirrored."""

    tops: Ints
    lefts: Ints
    flips: NDArray[np.bool_]

    def at(self, indices: Ints) -> Offsets:
        """Those of some samples."""
        return Offsets(self.tops[indices], self.lefts[indices], self.flips[indices])


def draw_offsets(preprocessing: Preprocessing, count: int, seed: int, epoch: int) -> Offsets:
    """Crops and flips of all samples for one epoch, drawn at once."""
    numbers = generator(seed, epoch, OFFSETS)
    room = preprocessing.stored + 2 * preprocessing.pad - preprocessing.size
    tops, lefts = numbers.integers(0, room + 1, (2, count))
    flips = numbers.integers(0, 2, count).astype(bool)
    return Offsets(tops, lefts, flips & preprocessing.flip)


def augment_batch(images: Images, offsets: Offsets, preprocessing: Preprocessing) -> Images:
    """Crops and flips of a batch: (n, stored, stored, 3) to (n, size, size, 3)."""
    count, height, width, channels = images.shape
    pad = preprocessing.pad
    padded = np.zeros((count, height + 2 * pad, width + 2 * pad, channels), np.uint8)
    padded[:, pad : pad + height, pad : pad + width] = images
    out = crop(padded, offsets.tops, offsets.lefts, preprocessing.size)
    out[offsets.flips] = out[offsets.flips, :, ::-1]
    return out


def crop(images: Images, tops: Ints, lefts: Ints, size: int) -> Images:
    """One window of each image: (n, h, w, 3) to (n, size, size, 3)."""
    count, height, width, channels = images.shape
    flat = np.ascontiguousarray(images).reshape(count, height, width * channels)
    image, row, byte = flat.strides
    # A view of every window. The rows of a window lie in one piece, so that numpy copies whole rows.
    windows = as_strided(
        flat,
        (count, height - size + 1, width - size + 1, size, size * channels),
        (image, row, channels * byte, row, byte),
        writeable=False,
    )
    return windows[np.arange(count), tops, lefts].reshape(count, size, size, channels)


def center_crop(images: Images, size: int) -> Images:
    """The middle of each image: (n, h, w, 3) to (n, size, size, 3)."""
    start = (images.shape[1] - size) // 2
    return images[:, start : start + size, start : start + size]


def normalize(images: Images, preprocessing: Preprocessing) -> Tensor:
    """(n, h, w, 3) bytes to (n, 3, h, w) floats, channels last in memory."""
    count, height, width, _ = images.shape
    scale, shift = _scale_and_shift(preprocessing, height * width)
    out = np.multiply(images.reshape(count, len(scale)), scale)
    out += shift
    return torch.from_numpy(out).view(count, height, width, 3).permute(0, 3, 1, 2)


@lru_cache(maxsize=8)
def _scale_and_shift(
    preprocessing: Preprocessing, pixels: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Factors and summands for a whole image in one row: numpy is slow at inner loops over three channels."""
    mean, std = np.array(preprocessing.mean), np.array(preprocessing.std)
    scale, shift = 1 / (255 * std), -mean / std
    return np.tile(scale, pixels).astype(np.float32), np.tile(shift, pixels).astype(np.float32)


class ArraySplit:
    """A split whose images are bytes: rows of an array of (n, stored, stored, 3) that all splits share."""

    def __init__(self, images: Images, rows: Ints, labels: Ints, preprocessing: Preprocessing) -> None:
        self.images, self.rows, self.labels, self.preprocessing = images, rows, labels, preprocessing
        self._drawn: tuple[tuple[int, int], Offsets] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, indices: Ints, epoch: int | None, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Images (n, 3, size, size), channels last in memory, and labels; not augmented with an epoch of None."""
        indices = np.asarray(indices)
        images, labels = self.images[self.rows[indices]], torch.from_numpy(self.labels[indices])
        if epoch is None:
            images = center_crop(images, self.preprocessing.size)
        else:
            images = augment_batch(images, self._offsets(seed, epoch).at(indices), self.preprocessing)
        return normalize(images, self.preprocessing), labels

    def _offsets(self, seed: int, epoch: int) -> Offsets:
        """The crops of an epoch, kept for its next batch."""
        key, drawn = (seed, epoch), self._drawn
        if drawn is None or drawn[0] != key:
            drawn = self._drawn = (key, draw_offsets(self.preprocessing, len(self), seed, epoch))
        return drawn[1]
