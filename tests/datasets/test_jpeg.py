"""Ordinary JPEGs decoded by libjpeg-turbo: Pillow's pixels nearly, of the same draws, whatever the image."""

import io
import multiprocessing
import pickle
import sys
import zlib

import numpy as np
import pytest
from images import draws, scene, write_tree
from PIL import Image
from refusals import refusal

from hvdtrain import datasets
from hvdtrain.datasets import images, jpeg
from hvdtrain.errors import DataError, EngineUnavailable
from hvdtrain.tools import pack

SIZES = {"train_crop": 48, "valid_resize": 72, "valid_crop": 64}
ORIENTATION = 0x0112
NORMAL, LARGE = (200, 150), (1100, 800)
SAVED = {  # the size of a photograph, how it is saved, whether Pillow reads it
    "baseline": (NORMAL, {}, False),
    "progressive": (NORMAL, {"progressive": True}, False),
    "chroma in full": (NORMAL, {"subsampling": 0}, False),
    "chroma halved across": (NORMAL, {"subsampling": 1}, False),
    "restart markers": (NORMAL, {"restart_marker_rows": 1}, False),
    "at a half": ((320, 240), {}, False),
    "at an eighth": (LARGE, {}, False),
    "a large progressive one": (LARGE, {"progressive": True}, False),
    "of one pixel": ((1, 1), {}, False),
    "of one row": ((300, 1), {}, False),
    "of odd sides": ((97, 61), {}, False),
    "turned by EXIF": (NORMAL, {"exif": {ORIENTATION: 6}}, False),
    "grey": (NORMAL, {"mode": "L"}, False),
    "CMYK": (NORMAL, {"mode": "CMYK"}, True),
    "a PNG": (NORMAL, {"format": "PNG"}, True),
    "a PNG of 16 bits": (NORMAL, {"format": "PNG", "mode": "I;16"}, True),
    "a pair": (NORMAL, {"format": "MPO", "save_all": True, "append_images": [scene(200, 150, 5)]}, False),
}


def encoded(size, format="JPEG", mode="RGB", exif=None, **options):  # noqa: A002
    photograph, written = scene(*size, 1), io.BytesIO()
    if mode == "I;16":
        photograph = Image.fromarray(np.asarray(photograph.convert("L")).astype(np.uint16) * 257)
    elif mode != "RGB":
        photograph = photograph.convert(mode)
    if exif:
        options["exif"] = Image.Exif()
        options["exif"].update(exif)
    quality = {} if format == "PNG" else {"quality": 90}
    photograph.save(written, format, **quality, **options)
    return written.getvalue()


def by_pillow(content, side, drawn):
    with images.opened(content) as image:
        return np.asarray(images.random_crop(image, side, drawn))


@pytest.mark.parametrize("case", SAVED)
def test_pixels_are_nearly_pillows(case):
    size, options, is_pillows = SAVED[case]
    content = encoded(size, **options)
    for drawn in draws(40):
        out = np.zeros((48, 48, 3), np.uint8)
        if is_pillows:
            assert not images._is_read_fast(content, drawn, out)
            continue
        assert images._is_read_fast(content, drawn, out)
        difference = abs(out.astype(int) - by_pillow(content, 48, drawn))
        assert difference.mean() <= 1
        assert difference.max() <= 16


@pytest.mark.parametrize("ratio", [1.2, 1.5, 1.9, 3])
def test_a_downscale_does_not_alias(ratio):
    """Circles that become ever finer towards the edge, at `ratio` source pixels for one: plain interpolation is off by
    20 and more."""
    side = 96
    source = round(side * ratio)
    y, x = np.indices((source, source)) - source / 2
    circles = np.uint8(np.rint(127.5 + 127.5 * np.cos((x * x + y * y) * np.pi / source)))
    written = io.BytesIO()
    Image.fromarray(circles).convert("RGB").save(written, "JPEG", quality=100, subsampling=0)
    content, out = written.getvalue(), np.empty((side, side, 3), np.uint8)
    assert jpeg.read(content, jpeg.frame(content), (0, 0, source, source), False, out)
    with images.opened(content) as image:
        exact = np.asarray(images.cut(image, (0, 0, source, source), side)).astype(int)
    assert abs(out - exact).mean() < 8


def test_rows_below_the_box_are_not_decoded():
    content = encoded(NORMAL)
    header = jpeg.frame(content)
    assert (header.height, header.width, header.has_one_scan) == (150, 200, True)
    whole, part = np.empty((2, 20, 20, 3), np.uint8)
    assert jpeg.read(content, header, (10, 0, 30, 20), False, whole)
    damaged = bytearray(content)
    damaged[-200:-100] = bytes(100)  # of rows that are not needed
    assert jpeg.read(bytes(damaged), header, (10, 0, 30, 20), False, part)
    np.testing.assert_array_equal(part, whole)
    assert not jpeg.read(bytes(damaged), header, (10, 0, 30, 150), False, part)


HOSTILE = {
    "nothing": b"",
    "its begin": b"\xff\xd8",
    "no height": encoded(NORMAL).replace(b"\x08\x00\x96\x00\xc8", b"\x08\x00\x00\x00\xc8"),
    "12 bits": encoded(NORMAL).replace(b"\x08\x00\x96\x00\xc8", b"\x0c\x00\x96\x00\xc8"),
    "two components": encoded(NORMAL).replace(b"\x08\x00\x96\x00\xc8\x03", b"\x08\x00\x96\x00\xc8\x02"),
    "a length of nothing": b"\xff\xd8\xff\xe0\x00\x00" * 9,
    "fill bytes": b"\xff\xd8" + b"\xff" * 1000,
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_ordinary_header_is_left_to_pillow(content):
    assert jpeg.frame(content) is None


def test_many_pixels_and_many_scans_are_refused_before_they_are_decoded():
    content = encoded(NORMAL)
    bomb = content.replace(b"\x08\x00\x96\x00\xc8", b"\x08\xff\xff\xff\xff")
    progressive = encoded(NORMAL, progressive=True)
    scans = progressive[:-2] + progressive[progressive.rindex(b"\xff\xda") : -2] * 100 + b"\xff\xd9"
    for hostile in (bomb, scans):
        assert jpeg.frame(hostile)
        assert not images._is_read_fast(hostile, draws(1)[0], np.empty((48, 48, 3), np.uint8))


def load(data_dir, decoder="turbo"):
    return datasets.load("imagenet", data_dir=data_dir, decoder=decoder, **SIZES)


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path / "tree")


@pytest.mark.parametrize("source", ["folder", "shards"])
def test_each_way_to_a_set_reads_by_it(tree, tmp_path, source):
    if source == "shards":
        pack.pack(pack.Options(tree, tmp_path / "packed"))
    data_dir = tmp_path / "packed" if source == "shards" else tree
    ours, pillow = load(data_dir), load(data_dir, "pillow")
    x, y = ours.train.read(np.arange(16)[::-1], draws(16))
    exact, labels = pillow.train.read(np.arange(16)[::-1], draws(16))
    np.testing.assert_array_equal(y, labels)
    assert (x.shape, x.dtype, x.flags.writeable) == (exact.shape, np.uint8, True)
    assert 0 < abs(x.astype(int) - exact).mean() <= 1
    for one, other in zip(ours.valid.read(np.arange(6), None), pillow.valid.read(np.arange(6), None), strict=True):
        np.testing.assert_array_equal(one, other)


def checksum(split):
    return zlib.crc32(split.read(np.arange(16), draws(16))[0].tobytes())


def test_a_copy_in_another_process_reads_the_same(tree):
    split = load(tree).train
    expected = checksum(split)
    assert checksum(pickle.loads(pickle.dumps(split))) == expected
    for way in ("forkserver", "fork"):
        with multiprocessing.get_context(way).Pool(1) as pool:
            assert pool.apply(checksum, (split,)) == expected


@pytest.mark.parametrize("damage", ["truncated", "head only", "gone"])
def test_a_damaged_image_is_named_and_the_others_are_read(tree, damage):
    split = load(tree).train
    path = tree / "train" / "n02" / "n02_3.JPEG"
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: 900 if damage == "truncated" else 700])
    message = refusal(DataError, split.read, np.arange(16), draws(16))
    assert message.startswith(f"{path} cannot be read as an image (")
    assert split.read(np.arange(8), draws(8))[1].tolist() == [0] * 8


def test_without_its_libraries(tree, monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    monkeypatch.delitem(sys.modules, "hvdtrain.datasets.jpeg")
    monkeypatch.delattr(datasets, "jpeg")
    message = refusal(EngineUnavailable, load, tree)
    assert message.startswith("decoder turbo cannot be imported (")
    assert message.endswith("); pip install simplejpeg opencv-python-headless, or take decoder pillow.")
