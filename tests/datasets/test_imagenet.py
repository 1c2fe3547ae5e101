"""ImageNet-style folders: finding the images, cropping them, and refusing damaged ones."""

import importlib.util
import io
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess

import numpy as np
import pytest
import warm
from images import EPS, draws, scene
from paths import DATA
from PIL import Image
from refusals import refusal

from hvdtrain import datasets
from hvdtrain.datasets import folders, images
from hvdtrain.errors import DataError
from hvdtrain.tools import pack

ARCHIVE = DATA / "imagenette_4k.tar"
SIZES = {"train_crop": 32, "valid_resize": 48, "valid_crop": 40}


@pytest.fixture
def tree(tmp_path):
    """Two classes of four training and two validation images of various shapes."""
    for split, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(("n01", "n02")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for k in range(count):
                scene(300 - 40 * k, 200 + 30 * k, 10 * label + k).save(folder / f"{name}_{k}.JPEG", quality=95)
    return tmp_path


@pytest.fixture(scope="session")
def imagenette(tmp_path_factory):
    if not ARCHIVE.is_file():
        pytest.skip(f"{ARCHIVE} is missing: put the shared data folder beside the repository")
    dest = tmp_path_factory.mktemp("imagenette")
    subprocess.run(["tar", "xf", ARCHIVE, "-C", dest], check=True)
    return dest / "imagenette"


def test_the_tree_is_described(tree):
    (tree / "val").rename(tree / "valid")
    dataset = datasets.load("imagenet", data_dir=tree, **SIZES)
    assert (len(dataset.train), len(dataset.valid), dataset.classes) == (8, 4, 2)
    assert dataset.sample_shape == (32, 32, 3)
    assert dataset.mean == (0.485, 0.456, 0.406)
    assert dataset.std == (0.229, 0.224, 0.225)
    x, y = dataset.train.read(np.arange(8), draws(8))
    assert (x.dtype, x.shape, y.dtype, y.tolist()) == (np.uint8, (8, 32, 32, 3), np.int64, [0] * 4 + [1] * 4)
    x, y = dataset.valid.read(np.array([3, 0]), None)
    assert (x.shape, y.tolist()) == ((2, 40, 40, 3), [1, 0])


def test_images_are_numbered_by_class_and_name_and_other_files_left_out(tree):
    for other in ("notes.txt", "._n01_0.JPEG", "n01_9.JPEG.part"):
        (tree / "train" / "n01" / other).write_text("other")
    (tree / "train" / "n01" / "n01_9.JPEG").mkdir()
    (tree / "train" / "readme.txt").touch()
    (tree / "train" / "n01" / "n01_1.JPEG").rename(tree / "train" / "n01" / "ä.jpg")
    split = datasets.load("imagenet", data_dir=tree).train
    found = [str(split.path(k).relative_to(tree / "train")) for k in range(len(split))]
    first = ["n01/n01_0.JPEG", "n01/n01_2.JPEG", "n01/n01_3.JPEG", "n01/ä.jpg"]
    assert found == first + [f"n02/n02_{k}.JPEG" for k in range(4)]


def test_draws_decide_whatever_the_batch_the_process_and_the_copy(tree):
    split = datasets.load("imagenet", data_dir=tree, **SIZES).train
    indices, numbers = np.arange(8)[::-1], draws(8)
    x, _ = split.read(indices, numbers)
    alone = [split.read(indices[k : k + 1], numbers[k : k + 1])[0] for k in range(8)]
    np.testing.assert_array_equal(np.concatenate(alone), x)
    for way in ("forkserver", "fork"):
        with multiprocessing.get_context(way).Pool(1) as pool:
            elsewhere, _ = pool.apply_async(split.read, (indices, numbers)).get(timeout=120)
        np.testing.assert_array_equal(elsewhere, x)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(split)).read(indices, numbers)[0], x)
    assert (split.read(indices, draws(8, seed=4))[0] != x).any(axis=(1, 2, 3)).all()


def test_training_images_without_draws_show_the_centre(tree):
    dataset = datasets.load("imagenet", data_dir=tree, **SIZES)
    x, _ = dataset.train.read(np.arange(8), None)
    np.testing.assert_array_equal(dataset.train.read(np.arange(8), None)[0], x)
    for k in range(8):
        centre = images.centre_crop(Image.open(dataset.train.path(k)), 39, 32)
        np.testing.assert_array_equal(x[k], np.asarray(centre))


@pytest.mark.parametrize("divisor", [1, 2, 4, 8])
def test_a_jpeg_is_decoded_no_larger_than_its_crop_needs(tmp_path, divisor):
    scene(640, 480).save(tmp_path / "a.JPEG", quality=95)
    scene(640, 480).save(tmp_path / "a.png")
    size = 32 * 8 // divisor
    box = (100, 60, 100 + 270, 60 + 260)
    jpeg, png = Image.open(tmp_path / "a.JPEG"), Image.open(tmp_path / "a.png")
    fast = np.asarray(images.cut(jpeg, box, size)).astype(int)
    exact = np.asarray(images.cut(png, box, size)).astype(int)
    assert jpeg.size == (640 // divisor, 480 // divisor)
    assert abs(fast - exact).mean() < 1.5
    assert abs(fast - exact).max() < 12


GREY = np.linspace(0, 255, 64 * 64).reshape(64, 64).astype(np.uint8)
SIXTEEN_BITS = GREY * np.uint16(256) + np.uint16(13)


@pytest.mark.parametrize(
    ("suffix", "image", "options"),
    [
        ("png", Image.fromarray(GREY), {}),
        ("JPEG", Image.fromarray(GREY), {"quality": 95}),
        ("JPEG", Image.fromarray(GREY).convert("RGB").convert("CMYK"), {"quality": 95}),
        ("png", Image.fromarray(GREY).convert("P"), {}),
        ("png", Image.fromarray(GREY).convert("P"), {"transparency": bytes(range(256))}),
        ("png", Image.fromarray(GREY).convert("LA"), {}),
        ("png", Image.fromarray(GREY).convert("RGBA"), {}),
        ("png", Image.fromarray(SIXTEEN_BITS), {}),
        ("tif", Image.fromarray(SIXTEEN_BITS), {}),
        ("tif", Image.fromarray(GREY).convert("RGB").convert("CMYK"), {}),
        ("tiff", Image.fromarray(GREY).convert("LA"), {}),
        ("pgm", Image.fromarray(SIXTEEN_BITS), {}),
        ("ppm", Image.fromarray(GREY).convert("RGB"), {}),
        ("bmp", Image.fromarray(GREY).convert("P"), {}),
        ("webp", Image.fromarray(GREY).convert("RGBA"), {"quality": 95}),
    ],
)
def test_every_mode_becomes_rgb(tmp_path, suffix, image, options):
    path = tmp_path / f"a.{suffix}"
    image.save(path, **options)
    centre = images.centre_crop(images.opened(path.read_bytes()), 64, 64)
    for cropped in (centre, images.cut(images.opened(path.read_bytes()), (0, 0, 64, 64), 64)):
        x = np.asarray(cropped)
        assert x.shape == (64, 64, 3)
        assert abs(x.astype(int) - GREY[..., None]).max() <= 3


TORCHVISION = """
import json, sys
import numpy as np, torch
from pathlib import Path
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import CenterCrop, RandomResizedCrop, Resize
from torchvision.transforms import functional as F
from hvdtrain.datasets import images

def same(ours, theirs):
    return bool((np.asarray(ours) == np.asarray(theirs)).all())

def boxes(draw, width, height):
    return np.array([draw(width, height) for _ in range(4000)], float)

def theirs(width, height):
    blank = torch.empty(3, height, width)
    upper, left, down, across = RandomResizedCrop.get_params(blank, [0.08, 1], [3 / 4, 4 / 3])
    return left, upper, left + across, upper + down

def crops(folder):
    random, found = np.random.default_rng(0), {}
    torch.manual_seed(0)
    for width, height in ((300, 200), (201, 333), (97, 97), (500, 120)):
        image = Image.fromarray(random.integers(256, size=(height, width, 3), dtype=np.uint8))
        image.save(Path(folder, "a.png"))
        for resize, crop in ((48, 40), (64, 64), (255, 224)):
            reference = CenterCrop(crop)(Resize(resize)(image))
            ours = images.centre_crop(image, resize, crop)
            found[f"valid {width}x{height} {resize} {crop}"] = same(ours, reference)
        for k in range(20):
            left, upper, right, lower = box = images.random_box(random, width, height)
            reference = F.resized_crop(image, upper, left, lower - upper, right - left, [32, 32])
            ours = images.cut(Image.open(Path(folder, "a.png")), box, 32)
            found[f"train {width}x{height} {k}"] = same(ours, reference)
    for width, height in ((10, 1000), (1000, 10), (11, 1000), (1001, 10), (1, 50)):
        found[f"fallback {width}x{height}"] = images.random_box(random, width, height) == theirs(width, height)
    for width, height in ((500, 375), (375, 500), (300, 120)):
        pair = boxes(lambda w, h: images.random_box(random, w, h), width, height), boxes(theirs, width, height)
        gaps = [abs(np.quantile(pair[0], q, axis=0) - np.quantile(pair[1], q, axis=0)) for q in (0.1, 0.5, 0.9)]
        found[f"boxes {width}x{height}"] = bool(np.max(gaps) < 0.05 * max(width, height))
    return found

def listed(root):
    found = ImageFolder(root)
    return found.classes, found.samples

for line in sys.stdin:
    name, path = json.loads(line)
    print(json.dumps({"crops": crops, "listed": listed}[name](path)), flush=True)
"""
with_torchvision = pytest.mark.xdist_group("torch")


@pytest.fixture(scope="module")
def torchvision():
    """`torchvision("listed", root)`: what that function of TORCHVISION returns, in a process of its own."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is missing: pip install torchvision")
    command = warm.command("torch", "-c", TORCHVISION)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def returned(name, path):
            process.stdin.write(f"{json.dumps([name, str(path)])}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield returned
        process.stdin.close()


@with_torchvision
def test_crops_are_torchvisions(tmp_path, torchvision):
    """Pixels and fallback boxes to the bit, random boxes in their distribution."""
    found = torchvision("crops", tmp_path)
    assert len(found) == 100
    assert [name for name, agrees in found.items() if not agrees] == []


def test_random_boxes_lie_inside_the_image():
    random = np.random.default_rng(0)
    for width, height in ((1, 1), (5, 3), (224, 224), (3, 4000)):
        for _ in range(200):
            left, upper, right, lower = images.random_box(random, width, height)
            assert 0 <= left < right <= width
            assert 0 <= upper < lower <= height


def test_half_of_the_images_are_flipped():
    ramp = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (256, 1)))
    crops = [np.asarray(images.random_crop(ramp, 16, numbers)).astype(int) for numbers in draws(500)]
    assert np.mean([crop[0, 0, 0] > crop[0, -1, 0] for crop in crops]) == pytest.approx(0.5, abs=0.06)


@pytest.mark.slow
def test_real_images(imagenette):
    dataset = datasets.load("imagenet", data_dir=imagenette)
    assert (len(dataset.train), len(dataset.valid), dataset.classes) == (3000, 1000, 10)
    x, y = dataset.train.read(np.arange(0, 3000, 30), draws(100))
    assert np.bincount(y).tolist() == [10] * 10
    valid_x, _ = dataset.valid.read(np.arange(0, 1000, 10), None)
    for pixels in (x, valid_x):
        assert pixels.shape == (100, 224, 224, 3)
        assert dataset.mean == pytest.approx((pixels / 255).mean(axis=(0, 1, 2)), abs=0.06)
        assert dataset.std == pytest.approx((pixels / 255).std(axis=(0, 1, 2)), abs=0.07)


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "gone", "a pipe"])
def test_a_damaged_image_is_named(tree, damage):
    split = datasets.load("imagenet", data_dir=tree, **SIZES).valid
    path = split.path(2)
    content = path.read_bytes()
    path.unlink()
    if damage == "a pipe":
        os.mkfifo(path)
    elif damage != "gone":
        path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "text": b"hello"}[damage])
    for numbers in (None, draws(4)):
        message = refusal(DataError, split.read, np.arange(4), numbers)
        assert message.startswith(f"{path} cannot be read as an image (")
        assert message.endswith("): fetch it again, or remove it.")
        assert "\n" not in message


def test_a_drawing_called_jpeg_starts_no_ghostscript(tree, tmp_path, monkeypatch):
    """Pillow would have it run PostScript, found by name on the PATH."""
    ghostscript, ran = tmp_path / "bin" / "gs", tmp_path / "ran"
    ghostscript.parent.mkdir()
    ghostscript.write_text(f"#!/bin/sh\ntouch {ran}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(ghostscript.parent), prepend=os.pathsep)
    dataset = datasets.load("imagenet", data_dir=tree, **SIZES)
    dataset.train.path(2).write_bytes(EPS)
    for read, *arguments in (
        (dataset.train.read, np.array([2]), None),
        (dataset.train.read, np.array([2]), draws(1)),
        (pack.pack, pack.Options(tree, tmp_path / "packed")),
    ):
        assert "JPEG cannot be read as an image (of no known format)" in refusal(DataError, read, *arguments)
    assert not ran.exists()


def grey(width, height):
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def scans(count):
    """A small progressive JPEG with its last scan so many times."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (10, 200, 30)).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    start = content.rindex(b"\xff\xda")
    last = content[start:-2]
    return content[:start] + last * (count - content[:start].count(b"\xff\xda")) + content[-2:]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (grey(1, 60000), "48 x 2880000 pixels are more than 67,108,864"),
        (grey(9500, 9500), "9500 x 9500 pixels are more than 67,108,864"),
        (scans(60), "more than 50 scans"),
        (scans(60) + b"\xff\xda" * 60, "more than 50 scans"),
        (None, "it must have at most 134,217,728 bytes"),
    ],
    ids=["a line", "many pixels", "many scans", "many scans and more behind them", "a file of 1 TB"],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_that_would_fill_the_memory_is_refused(tree, content, reason):
    split = datasets.load("imagenet", data_dir=tree, **SIZES).valid
    path = split.path(1)
    path.write_bytes(content or b"")
    if content is None:
        os.truncate(path, 1 << 40)
    message = f"{path} cannot be read as an image ({reason}): fetch it again, or remove it."
    assert refusal(DataError, split.read, np.array([1]), None) == message


def rename(old, new):
    return lambda tree: (tree / old).rename(tree / new)


def empty(folder):
    def change(tree):
        for path in (tree / folder).iterdir():
            path.rename(tree / path.name)

    return change


MISSING = "is missing: data_dir must hold the folders train/<class> and val/<class>; if"


WRONG_TREES = {
    "no train": (
        rename("train", "training"),
        f"{{tree}}/train {MISSING} 'training' is it: cd {{tree}} && ln -s training train",
    ),
    "no val": (
        rename("val", "test"),
        f"{{tree}}/val or {{tree}}/valid {MISSING} 'test' is it: cd {{tree}} && ln -s test val",
    ),
    "no classes": (empty("val"), "{tree}/val holds no class folders: sort its images into {tree}/val/<class>."),
    "no images": (
        empty("train/n02"),
        f"{{tree}}/train/n02 holds no {', '.join(folders.SUFFIXES)} image: fill it, or remove that class.",
    ),
    "class not in val": (
        rename("val/n02", "n02"),
        "{tree}/val lacks 1 of the classes in {tree}/train (n02): both must hold the same.",
    ),
    "class not in train": (
        rename("train/n01", "n01"),
        "{tree}/train lacks 1 of the classes in {tree}/val (n01): both must hold the same.",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG_TREES.values(), ids=WRONG_TREES)
def test_a_wrong_tree_is_refused(tree, change, message):
    change(tree)
    assert refusal(DataError, datasets.load, "imagenet", data_dir=tree) == message.format(tree=tree)


def listed(split):
    return [list(split.classes), [[str(split.path(k)), int(label)] for k, label in enumerate(split.labels)]]


def jpeg(seed=0, **options):
    file = io.BytesIO()
    scene(24, 18, seed).save(file, "JPEG", **options)
    return file.getvalue()


def lay(root, *paths, content=None):
    """Files under the root: an image each, or that content."""
    for path in map(root.joinpath, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg() if content is None else content)


@with_torchvision
def test_folders_are_read_as_torchvision_reads_them(tmp_path, torchvision):
    """Its suffixes, folders of a class at any depth, links to files and folders, and its order."""
    store = tmp_path / "store"
    lay(store, "1.png", "cats/2.jpg", "cats/deep/er/3.JPG")
    for split in ("train", "val"):
        root = tmp_path / split
        lay(root, *(f"b/x{suffix.upper()}" for suffix in folders.SUFFIXES), "b/a.JPG.png", "b/Z.jpg")
        lay(root, "b/a/1.jpg", "b/a-b/1.jpg", "b/a/b/2.jpg", "b/a.jpg/1.jpg", "a b/ä.jpg", "a b/ä/1.bmp")
        (root / "b" / "one.png").symlink_to(store / "1.png")
        (root / "b" / "more").symlink_to(store / "cats")
        (root / "linked").symlink_to(store / "cats", target_is_directory=True)
        (root / "b" / "relative").symlink_to("../a b")
    dataset = datasets.load("imagenet", data_dir=tmp_path, **SIZES)
    for split in (dataset.train, dataset.valid):
        assert listed(split) == torchvision("listed", split.root)
        assert len(split.read(np.arange(len(split)), None)[0]) == 24
    assert (dataset.names, dataset.notes) == (("a b", "b", "linked"), ())


def test_images_are_read_by_content_not_by_name(tree):
    split = datasets.load("imagenet", data_dir=tree, **SIZES).valid
    expected = split.read(np.array([1]), None)[0].astype(int)
    content = Image.open(split.path(1))
    content.load()
    for form in ("PNG", "WEBP", "TIFF", "BMP", "PPM"):
        content.save(split.path(1), form, **({"quality": 95} if form == "WEBP" else {}))
        assert np.abs(split.read(np.array([1]), None)[0] - expected).mean() < 2


def test_what_is_not_read_is_counted_by_kind(tree):
    n01 = tree / "train" / "n01"
    lay(n01, *(f"{k}.gif" for k in range(12)), "4.GIF", "a/b/5.jfif", "README", "._1.jpg", ".DS_Store", ".cache/1.jpg")
    for k in range(8):
        (n01 / f"{k}.png").symlink_to(tree / "gone" / f"{k}.png")
    (n01 / "itself.jpg").symlink_to("itself.jpg")
    lay(tree / "val", "n02/Thumbs.db", "1.jpg")
    os.mkfifo(tree / "val" / "n02" / "pipe.jpg")
    lay(tree / "train" / ".ipynb_checkpoints", "1.jpg")  # no class
    dataset = datasets.load("imagenet", data_dir=tree)
    assert (len(dataset.train), len(dataset.valid), dataset.names) == (8, 4, ("n01", "n02"))
    kinds = "13 .gif, 9 dangling links, 4 hidden, 1 .db, 1 .jfif, 3 others"
    assert dataset.notes == (f"31 of 43 files left out: {kinds}",)


def test_links_in_a_circle_are_followed_once(tree):
    (tree / "train" / "n02" / "back").symlink_to("../n01")
    for target in ("..", "../n02/back", "/"):
        (tree / "train" / "n01" / "round").symlink_to(target)
        dataset = datasets.load("imagenet", data_dir=tree)
        assert len(dataset.train) == 12
        assert dataset.notes[0].endswith(" links to folders around them")
        (tree / "train" / "n01" / "round").unlink()


def test_links_that_multiply_are_refused(tree, monkeypatch):
    """Twenty folders with two links each to the next one are a million paths."""
    monkeypatch.setattr(folders, "MOST_FOLDERS", 500)
    for k in range(20):
        (tree / "store" / f"{k}").mkdir(parents=True)
        for name in "ab":
            (tree / "store" / f"{k}" / name).symlink_to(tree / "store" / f"{k + 1}")
    (tree / "store" / "20").mkdir()
    (tree / "train" / "n01" / "many").symlink_to(tree / "store" / "0")
    message = f"{tree}/train/n01 must have at most 500 folders: remove links to some."
    assert refusal(DataError, datasets.load, "imagenet", data_dir=tree) == message


def test_a_class_of_which_nothing_is_read_is_refused(tree):
    shutil.rmtree(tree / "val" / "n02")
    lay(tree / "val" / "n02", "1.gif", "2.gif", ".1.jpg")
    message = refusal(DataError, datasets.load, "imagenet", data_dir=tree)
    assert message.startswith(f"{tree}/val/n02 holds no .bmp, ")
    assert message.endswith(" image, but 2 .gif, 1 hidden: convert them, or remove that class.")


def test_a_class_that_is_a_dangling_link_is_refused(tree):
    for split in ("train", "val"):
        (tree / split / "n03").symlink_to(tree / "gone")
    message = refusal(DataError, datasets.load, "imagenet", data_dir=tree)
    assert message.startswith(f"{tree}/train must hold a folder for each class, got 1 dangling links (")
    command = message.partition("(")[2].partition(")")[0]
    assert subprocess.check_output(["bash", "-c", command], text=True) == f"{tree}/train/n03\n"


FILM = b"\0\0ftyp" + b"\xff\xda\0\2" * 90


def with_thumbnail():
    exif = Image.Exif()
    exif[0x927C] = FILM
    return jpeg(exif=exif)


def mpo():
    file = io.BytesIO()
    scene(24, 18).save(file, "MPO", save_all=True, append_images=[scene(24, 18, k) for k in range(60)])
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [jpeg() + FILM, with_thumbnail(), mpo(), jpeg(progressive=True) + FILM, scans(50) + FILM],
    ids=["film", "thumbnail", "MPO of 61 images", "progressive and film", "50 scans and film"],
)
def test_a_jpeg_ends_at_its_end(tree, content):
    """What phones write into it and behind it are no scans of its own."""
    assert content.count(b"\xff\xda") > 50
    split = datasets.load("imagenet", data_dir=tree, **SIZES).valid
    split.path(1).write_bytes(content)
    assert split.read(np.array([1]), None)[0].shape == (1, 40, 40, 3)


def test_an_image_whose_white_is_not_known_is_refused(tree):
    """Pillow would clip at 255: floats up to 1 would be black."""
    split = datasets.load("imagenet", data_dir=tree, **SIZES).valid
    for mode in "FI":
        Image.new(mode, (20, 20), 1).save(split.path(1), "TIFF")
        reason = f"white is no known value of mode {mode}: save it with 8 or 16 bits a channel"
        assert f" cannot be read as an image ({reason}): " in refusal(DataError, split.read, np.array([1]), None)


@pytest.mark.parametrize(("count", "more"), [(3, ""), (12, " and 4 more")])
def test_all_bad_images_of_a_batch_are_named_at_once(tree, count, more):
    lay(tree / "train" / "n01", *(f"{k:02}.jpg" for k in range(12)))
    lay(tree / "train" / "n01", *(f"{k:02}.jpg" for k in range(count)), content=b"text")
    split = datasets.load("imagenet", data_dir=tree, **SIZES).train
    named = "; ".join(f"{tree}/train/n01/{k:02}.jpg (of no known format)" for k in range(count)[:8])
    message = f"{count} images cannot be read: {named}{more}: fetch them again, or remove them."
    assert refusal(DataError, split.read, np.arange(20), draws(20)) == message


WNIDS = [f"n0{k}" for k in range(3)]


def imagenet_with_flat_val(root):
    lay(root, *(f"train/{n}/{n}_{k}.JPEG" for n in WNIDS for k in range(4)))
    lay(root, *(f"val/ILSVRC2012_val_0000000{k}.JPEG" for k in range(6)))


def tiny_imagenet(root):
    lay(root, *(f"train/{n}/images/{n}_{k}.JPEG" for n in WNIDS for k in range(4)))
    lay(root, *(f"train/{n}/{n}_boxes.txt" for n in WNIDS), content=b"n00_0.JPEG\t0\t0\t62\t62\n")
    lay(root, *(f"val/images/val_{k}.JPEG" for k in range(6)), *(f"test/images/test_{k}.JPEG" for k in range(6)))
    rows = "".join(f"val_{k}.JPEG\t{WNIDS[k % 3]}\t0\t32\t44\t62\n" for k in range(6))
    lay(root, "val/val_annotations.txt", content=rows.encode())


def cifar(root):
    lay(root, *(f"{split}/{c}/{k:04}.png" for split in ("train", "test") for c in ("cat", "dog") for k in range(3)))


def kaggle_flat(root):
    lay(root, *(f"train/{c}.{k}.jpg" for c in ("cat", "dog") for k in range(12)), *(f"test1/{k}.jpg" for k in range(3)))


def food(root):
    images = {s: [f"{c}/{s}{k}" for c in ("pie", "ribs") for k in range(3)] for s in ("train", "test")}
    for split, names in images.items():
        lay(root, *(f"images/{name}.jpg" for name in names))
        lay(root, f"meta/{split}.txt", content="".join(f"{name}\n" for name in names).encode())


def oxford_pets(root):
    lay(root, *(f"images/{c}_{k}.jpg" for c in ("Abyssinian", "great_pyrenees") for k in range(12)))
    lay(root, *(f"images/Abyssinian_{k}.mat" for k in range(100, 120)), content=b"MATLAB")
    lay(root, "annotations/trimaps/Abyssinian_1.png", "annotations/list.txt")


LAYOUTS = {  # what lays it out, how many refusals show the command that makes it readable, images to train, to validate
    "ImageNet with a flat val": (imagenet_with_flat_val, None),
    "Tiny ImageNet": (tiny_imagenet, (1, 12, 6)),
    "CIFAR folders": (cifar, (1, 6, 6)),
    "Kaggle's flat train": (kaggle_flat, (2, 20, 4)),
    "Food-101 with lists": (food, (2, 6, 6)),
    "Oxford pets": (oxford_pets, (3, 20, 4)),
}


@with_torchvision
@pytest.mark.parametrize(("lay_out", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_well_known_sets(tmp_path, torchvision, lay_out, expected):
    """Each is read as torchvision reads it, at once or after the commands that refusals show."""
    root = tmp_path / "a set's folder"
    lay_out(root)
    if expected is None:
        message = refusal(DataError, datasets.load, "imagenet", data_dir=root)
        assert message == (
            f"{root}/val holds 6 images and no class folders: sort them into {root}/val/<class>, "
            "as valprep.sh of github.com/soumith/imagenetloader.torch does."
        )
        return
    steps, *counts = expected
    for _ in range(steps):
        message = refusal(DataError, datasets.load, "imagenet", data_dir=root)
        subprocess.run(["bash", "-c", f"cd {message.partition(': cd ')[2]}"], check=True)
    dataset = datasets.load("imagenet", data_dir=root, **SIZES)
    assert [len(dataset.train), len(dataset.valid)] == counts
    for split in (dataset.train, dataset.valid):
        assert listed(split) == torchvision("listed", split.root)


CHANGES = {  # a change of the folder, and whether it is another list of images then
    "elsewhere": (lambda tree: None, False),
    "renamed": (lambda tree: (tree / "train/n01/n01_0.JPEG").rename(tree / "train/n01/n01_a.JPEG"), True),
    "removed": (lambda tree: (tree / "train/n01/n01_0.JPEG").unlink(), True),
    "added": (lambda tree: lay(tree / "train/n02", "n02_9.JPEG"), True),
    "another class": (lambda tree: (tree / "train/n01/n01_3.JPEG").rename(tree / "train/n02/n01_3.JPEG"), True),
    "not read": (lambda tree: lay(tree / "train/n02", "n02_9.gif"), False),
}


@pytest.mark.parametrize(("change", "is_other"), CHANGES.values(), ids=CHANGES)
def test_the_digest_is_of_names_and_labels_wherever_the_folder_lies(tree, tmp_path_factory, change, is_other):
    other = shutil.copytree(tree, tmp_path_factory.mktemp("other") / "tree")
    change(other)
    before, after = (datasets.load("imagenet", data_dir=folder).contents() for folder in (tree, other))
    assert before["class names"] == ["n01", "n02"]
    assert (before["training list"] != after["training list"]) is is_other
    assert before["validation list"] == after["validation list"]
