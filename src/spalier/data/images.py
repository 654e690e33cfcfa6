"""One image: from a file's bytes to square pixels, or the reason why not. Its size is known before it is decoded."""

from __future__ import annotations

from functools import cache
from io import BytesIO
from typing import Any

import numpy as np

from spalier.data.augment import Bytes
from spalier.data.samples import File
from spalier.data.text import imported

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF", "JPEG2000")
"""What is read; formats whose readers start other programs are not among them."""
SUFFIXES = frozenset(
    (
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".mpo",
        ".png",
        ".gif",
        ".bmp",
        ".webp",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
        ".avif",
        ".jp2",
    )
)
LARGEST_FILE = 256 * 2**20
"""Bytes of one file, or of one member of an archive, however it is packed."""


class Unusable(Exception):
    """The reason why a file is no sample."""


def contents(file: File) -> bytes:
    """The bytes of a file, or why they cannot be had."""
    if file.size > LARGEST_FILE:
        raise Unusable(f"too large: {file.size:,} bytes, at most {LARGEST_FILE:,} are read")
    try:
        data = file.read()
    except OSError as error:
        raise Unusable(f"unreadable: {error.strerror or error}") from error
    if not data:
        raise Unusable("empty: 0 bytes")
    return data


def square(data: bytes, side: int) -> Bytes:
    """The middle square of an image at another size, as (side, side, 3)."""
    image = rgb(data)
    width, height = image.size
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    # cut and resized in one: a strip of 1 x 100,000 would become huge if it were resized first
    out = image.resize(
        (side, side), resample=_pillow().Resampling.BILINEAR, box=(left, top, left + short, top + short)
    )
    return np.asarray(out)


def rgb(data: bytes) -> Any:
    """An image of Pillow in RGB, upright: EXIF's orientation applied, transparency on white, the first frame."""
    image = _opened(data)
    try:
        image.load()
        return _coloured(_upright(image))
    except (Unusable, MemoryError):
        raise
    except Exception as error:  # decoders raise a dozen kinds; each means the same to the caller
        raise Unusable(_damage(error)) from error


def _opened(data: bytes) -> Any:
    pillow = _pillow()
    try:
        image = pillow.open(BytesIO(data), formats=_formats())
    except pillow.DecompressionBombError as error:
        raise Unusable(f"bomb-sized: {error}") from error
    except pillow.UnidentifiedImageError as error:
        raise Unusable("not an image of a known format") from error
    except Exception as error:
        raise Unusable(_damage(error)) from error
    width, height = image.size
    most = pillow.MAX_IMAGE_PIXELS
    if most is not None and width * height > 2 * most:
        raise Unusable(f"bomb-sized: {width:,} x {height:,} pixels, at most {2 * most:,} are decoded")
    return image


def _upright(image: Any) -> Any:
    ops = imported("PIL.ImageOps", "reading images")
    try:
        return ops.exif_transpose(image)
    except Exception:  # what stands in EXIF is damaged, the pixels are not: as stored, like any viewer
        return image


def _coloured(image: Any) -> Any:
    if image.mode.startswith("I") or image.mode == "F":
        return _eight_bits(image).convert("RGB")
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        over = image.convert("RGBA")
        white = _pillow().new("RGBA", over.size, "white")
        return _pillow().alpha_composite(white, over).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Any) -> Any:
    """Grey values of 16 bits as 8; Pillow itself would cut them off at 255."""
    values = np.asarray(image)
    if values.dtype.kind == "f" or values.min() < 0 or values.max() > 65535:
        raise Unusable(
            "pixels beyond 16 bits, or not integers: their range is not known; save as 8 or 16 bits"
        )
    return _pillow().fromarray((values.astype(np.int64) >> 8).astype(np.uint8))


def _damage(error: Exception) -> str:
    text = str(error) or type(error).__name__
    cut = any(word in text.lower() for word in ("truncated", "eof", "end of file", "not enough image data"))
    return f"truncated: {text}" if cut or isinstance(error, EOFError) else f"damaged: {text}"


@cache
def _formats() -> tuple[str, ...]:
    """Those that this build of Pillow has."""
    _pillow().init()
    return tuple(name for name in FORMATS if name in _pillow().OPEN)


def _pillow() -> Any:
    return imported("PIL.Image", "reading images")
