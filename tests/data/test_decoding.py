"""Images of every kind, bad files of every kind, and the cache of decoded ones."""

import io
import struct
import zlib

import numpy as np
import pytest
from pictures import class_folders, encoded, jpeg, picture, write
from PIL import Image, ImageOps

from spalier.data import BadFile, open_data
from spalier.data import images as folders
from spalier.data.images import File, center_square, decode, decode_files, to_rgb
from spalier.errors import DataError


def rgb(data):
    return to_rgb(decode(data))


def square(data, side):
    return center_square(rgb(data), side)


def reason(data):
    return decode_files([File("x.jpg", lambda: data)], 8).wrong[0]


def png_header(width, height):
    """A PNG that claims to be of any size, in a hundred bytes."""
    chunk = lambda kind, data: (  # noqa: E731
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")


def slow_square(image, side):
    """The middle square at another size by its definition: a triangle as wide as an output pixel, in float64."""
    height, width, _ = image.shape
    short = min(height, width)
    scale = short / side
    reach = max(scale, 1)

    def weights(length):
        out = np.zeros((side, length))
        for i in range(side):
            centre = (length - short) / 2 + (i + 0.5) * scale
            for j in range(length):
                out[i, j] = max(0, 1 - abs(j + 0.5 - centre) / reach)
        return out / out.sum(axis=1, keepdims=True)

    return np.einsum("yh,hwc,xw->yxc", weights(height), image.astype(np.float64), weights(width))


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (33, 33), (64, 7), (16, 16)])
@pytest.mark.parametrize("side", [8, 16, 24])
def test_the_middle_square_is_resized_bilinearly(shape, side):
    source = picture(3, *shape)
    found = square(encoded(source, "PNG"), side)
    expected = slow_square(np.asarray(source), side)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1.1  # rounded once for each axis


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright(orientation):
    source = picture(1, 24, 16)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(source, "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(np.asarray(rgb(data)), np.asarray(expected))
    assert (orientation == 1) == np.array_equal(square(data, 16), square(encoded(source, "PNG"), 16))


def test_damaged_exif_leaves_the_pixels():
    data = encoded(picture(), "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert np.array_equal(np.asarray(rgb(data)), np.asarray(picture()))


def test_transparency_is_on_white():
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert (np.asarray(rgb(encoded(clear, "PNG"))) == 255).all()
    assert np.abs(np.asarray(rgb(encoded(half, "PNG"))).astype(int) - 127).max() <= 1
    grey = Image.new("LA", (4, 4), (7, 0))
    assert (np.asarray(rgb(encoded(grey, "PNG"))) == 255).all()
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert (np.asarray(rgb(encoded(palette, "PNG"))) == (10, 20, 30)).all()
    assert (np.asarray(rgb(encoded(palette, "PNG", transparency=1))) == 255).all()
    assert (np.asarray(rgb(encoded(palette, "PNG", transparency=b"\xff\x00"))) == 255).all()


def test_sixteen_bits_become_eight():
    values = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    found = np.asarray(rgb(encoded(Image.fromarray(values), "PNG")))
    assert np.array_equal(found[..., 0], np.arange(256).reshape(16, 16))
    assert np.array_equal(found[..., 0], found[..., 2])
    assert np.array_equal(np.asarray(rgb(encoded(Image.fromarray(values), "TIFF"))), found)


@pytest.mark.parametrize("values", [np.full((4, 4), 0.5, np.float32), np.full((4, 4), 70000, np.int32)])
def test_pixels_of_unknown_range_are_refused(values):
    assert "16 bits" in reason(encoded(Image.fromarray(values), "TIFF"))


@pytest.mark.parametrize(
    ("mode", "format"), [("1", "PNG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("YCbCr", "JPEG"), ("P", "GIF")]
)
def test_other_modes_become_rgb(mode, format):
    source = picture().convert(mode)
    found = np.asarray(rgb(encoded(source, format))).astype(int)
    assert found.shape == (30, 40, 3)
    assert np.abs(found - np.asarray(source.convert("RGB")).astype(int)).mean() < 8  # JPEG loses some


def test_animations_give_their_first_frame():
    frames = [Image.new("RGB", (6, 6), colour) for colour in ("red", "blue")]
    for format in ("GIF", "PNG", "WEBP"):
        data = encoded(
            frames[0],
            format,
            save_all=True,
            append_images=frames[1:],
            **({"lossless": True} if format == "WEBP" else {}),
        )
        assert (np.asarray(rgb(data)) == (255, 0, 0)).all()


def test_a_long_strip_is_no_bomb():
    data = encoded(Image.new("RGB", (20_000, 1), "red"), "PNG")
    assert (square(data, 224) == (255, 0, 0)).all()


BAD = {
    "truncated": jpeg()[:-200],
    "truncated: ": encoded(picture(), "PNG")[:-400],
    "not an image": b"These are words, not pixels.",
    "empty": b"",
    "bomb-sized": png_header(60_000, 60_000),
    "bomb-sized: ": png_header(13_380, 13_380),  # just over twice Pillow's warning
    "damaged": png_header(2, 0),
    "not an image of": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_have_their_reason(kind):
    assert reason(BAD[kind]).startswith(kind.strip(": ")) or kind == "damaged"


def test_every_cut_of_a_file_is_a_reason_or_an_image():
    for data in (jpeg(), encoded(picture(), "PNG"), encoded(picture(), "GIF"), encoded(picture(), "WEBP")):
        for end in range(0, len(data), max(1, len(data) // 40)):
            found = decode_files([File("x", lambda cut=data[:end]: cut)], 4)
            assert found.images.shape == (1, 4, 4, 3)
            assert found.wrong == {} or found.wrong[0]


def test_the_limit_of_pixels_is_pillows(monkeypatch):
    data = encoded(picture(0, 40, 30), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 599)
    assert "bomb-sized" in reason(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert square(data, 8).shape == (8, 8, 3)


def test_files_are_read_up_to_a_size(monkeypatch):
    monkeypatch.setattr(folders, "MAX_FILE_BYTES", 100)
    read = lambda: pytest.fail("was read")  # noqa: E731
    assert "too large: 101 bytes" in decode_files([File("x", read, 101)], 8).wrong[0]


def refuse():
    raise PermissionError(13, "Permission denied")


def test_all_bad_files_are_found_and_the_others_decoded():
    good = [File(f"{i}.jpg", lambda i=i: jpeg(i)) for i in range(30)]
    bad = [File(f"bad/{kind}", lambda data=data: data) for kind, data in BAD.items()]
    bad.append(File("bad/locked", refuse))
    files = [f for pair in zip(good, bad, strict=False) for f in pair] + good[len(bad) :]
    found = decode_files(files, 16)
    assert {files[i].name: reason for i, reason in found.wrong.items()}.keys() == {file.name for file in bad}
    assert found.wrong[files.index(bad[-1])] == "unreadable: Permission denied"
    for i, file in enumerate(files):
        if i not in found.wrong:
            assert np.array_equal(found.images[i], square(file.read(), 16))


@pytest.fixture
def photos(tmp_path):
    class_folders(tmp_path / "photos", {"cats": 6, "dogs": 6})
    return tmp_path / "photos"


def test_what_is_wrong_is_said_at_once_and_skipped_when_asked(photos):
    for i, data in enumerate(BAD.values()):
        write(photos / "cats" / f"bad{i}.jpg", data)
    for i in range(20):
        write(photos / "dogs" / f"words{i}.txt", b"words")
    with pytest.raises(DataError) as error:
        open_data(f"folder:{photos}", image_size=16)
    text = str(error.value)
    assert "28 of 40 files" in text
    assert "and 8 more" in text
    assert text.count("\n") == 21
    assert "cats/bad0.jpg: truncated" in text
    data = open_data(f"folder:{photos}", image_size=16, skip_bad=True)
    assert len(data.skipped) == 28
    assert all(isinstance(entry, BadFile) for entry in data.skipped)
    assert sum(len(split) for split in (data.train, data.validation, data.test)) == 12
    assert "left out: 8 more" in str(data)
    clean = data.digest
    for entry in data.skipped:
        (photos / entry.path).unlink()
    assert not open_data(f"folder:{photos}", image_size=16).skipped
    assert len(clean) == 64


def test_memory_that_runs_out_is_no_fault_of_a_file(photos, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr("spalier.data.images.center_square", full)
    with pytest.raises(DataError, match=r"memory ran out.*max_train_samples"):
        open_data(f"folder:{photos}", image_size=16, skip_bad=True)
