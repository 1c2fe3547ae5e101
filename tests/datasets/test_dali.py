"""Images decoded by DALI: Pillow's to rounding, of the same draws, whatever the image."""

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
from hvdtrain.errors import DataError, EngineUnavailable
from hvdtrain.tools import pack

SIZES = {"train_crop": 48, "valid_resize": 72, "valid_crop": 64}
ORIENTATION = 0x0112


@pytest.fixture
def dali():
    return pytest.importorskip("nvidia.dali", reason="DALI is missing: pip install nvidia-dali-cuda120")


@pytest.fixture
def tree(tmp_path):
    """16 training images: one a PNG, one grey, one in CMYK, one that a viewer would turn, one a pair in an MPO."""
    tree = write_tree(tmp_path / "tree")
    scene(200, 150, 1).convert("L").save(tree / "train" / "n01" / "n01_1.JPEG", quality=95)
    scene(200, 150, 2).convert("CMYK").save(tree / "train" / "n01" / "n01_2.JPEG", quality=95)
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    scene(200, 150, 3).save(tree / "train" / "n01" / "n01_3.JPEG", quality=95, exif=turned)
    pair = {"save_all": True, "append_images": [scene(200, 150, 5)]}
    scene(200, 150, 4).save(tree / "train" / "n01" / "n01_4.JPEG", "MPO", quality=95, **pair)
    return tree


def load(data_dir, decoder="dali"):
    return datasets.load("imagenet", data_dir=data_dir, decoder=decoder, **SIZES)


@pytest.mark.parametrize("source", ["folder", "shards"])
def test_pixels_are_pillows_to_rounding(dali, tree, tmp_path, source):
    if source == "shards":
        pack.pack(pack.Options(tree, tmp_path / "packed"))
    data_dir = tmp_path / "packed" if source == "shards" else tree
    ours, pillow = load(data_dir), load(data_dir, "pillow")
    for count in (3, 16, 5):  # the pipeline grows once, and then takes fewer
        x, y = ours.train.read(np.arange(count)[::-1], draws(count))
        exact, labels = pillow.train.read(np.arange(count)[::-1], draws(count))
        np.testing.assert_array_equal(y, labels)
        assert (x.shape, x.dtype, x.flags.writeable) == (exact.shape, np.uint8, True)
        difference = abs(x.astype(int) - exact)
        assert difference.max() <= 4
        assert difference.mean() < 0.5
    for one, other in zip(ours.valid.read(np.arange(6), None), pillow.valid.read(np.arange(6), None), strict=True):
        np.testing.assert_array_equal(one, other)


def checksum(split):
    return zlib.crc32(split.read(np.arange(16), draws(16))[0].tobytes())


def test_a_copy_in_another_process_reads_the_same(dali, tree):
    split = load(tree).train
    expected = checksum(split)
    assert checksum(pickle.loads(pickle.dumps(split))) == expected
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(checksum, (split,)) == expected


@pytest.mark.parametrize("damage", ["truncated", "head only", "gone"])
def test_a_damaged_image_is_named_and_the_others_are_read(dali, tree, damage):
    split = load(tree).train
    path = tree / "train" / "n02" / "n02_3.JPEG"
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2 if damage == "truncated" else 700])
    message = refusal(DataError, split.read, np.arange(16), draws(16))
    assert message.startswith(f"{path} cannot be read as an image (")
    assert split.read(np.arange(8), draws(8))[1].tolist() == [0] * 8


def test_what_dali_cannot_read_is_left_to_pillow_alone_and_with_a_line(dali, tree, capfd, monkeypatch):
    ours, pillow = load(tree).train, load(tree, "pillow").train
    path = tree / "train" / "n02" / "n02_3.JPEG"
    path.write_bytes(path.read_bytes().replace(b"\xff\xda", b"\0\x12\xff\xda", 1))  # Pillow skips such bytes
    by_pillow = []
    read = type(pillow).read
    monkeypatch.setattr(type(pillow), "read", lambda *args: by_pillow.append(args[1].tolist()) or read(*args))
    others = np.array([0, *range(3, 8), *range(9, 16)])  # all JPEGs, of which one is bad
    for _ in range(2):
        x, _ = ours.read(others, draws(13))
        assert np.abs(x.astype(int) - read(pillow, others, draws(13))[0]).max() <= 4
    assert by_pillow == [[11], [11]]
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("decoder dali")]
    assert len(lines) == 1
    assert lines[0].startswith("decoder dali leaves images to Pillow, here the first: ")
    ours.read(np.array([8]), draws(1))
    assert "decoder dali" not in capfd.readouterr().err


def test_an_image_of_another_format_is_left_to_pillow_with_a_line(dali, tree, capfd):
    load(tree).train.read(np.array([8]), draws(1))
    assert "decoder dali leaves images to Pillow, here the first: PNG of mode RGB\n" in capfd.readouterr().err


def test_without_dali(tree, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    message = refusal(EngineUnavailable, load, tree)
    assert message.startswith("decoder dali needs NVIDIA DALI (")
    assert message.endswith("); install it: pip install nvidia-dali-cuda120")
