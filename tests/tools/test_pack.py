"""`pack`: shards that others read, sets that are whole or not there, and one line for whatever goes wrong."""

import hashlib
import importlib.util
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import warm
from images import scene, write_tree
from marks import marked
from PIL import Image
from refusals import refusal

from hvdtrain import cli, datasets, files, processors
from hvdtrain.errors import DataError, OutputError, PlanError, RecipeError
from hvdtrain.tools import pack

SIZES = {"train_crop": 32, "valid_resize": 48, "valid_crop": 40}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return write_tree(tmp_path_factory.mktemp("tree"))


def read_all(data_dir):
    """Every sample of both splits, the training images augmented."""
    dataset = datasets.load("imagenet", data_dir=data_dir, **SIZES)
    draws = np.random.default_rng(0).random((len(dataset.train), datasets.DRAWS), dtype=np.float32)
    train = dataset.train.read(np.arange(len(dataset.train)), draws)
    return dataset.classes, [*train, *dataset.valid.read(np.arange(len(dataset.valid)), None)]


def packed(source, dest, **options):
    pack.pack(pack.Options(source, dest, **options))
    return dest


def as_index(tree, dest):
    dest.mkdir()
    for split, name in (("train", "train_data.pkl"), ("val", "val_data.pkl")):
        paths = sorted((tree / split).glob("*/*"))
        (dest / name).write_bytes(pickle.dumps({str(path): path.parent.name for path in paths}))
    return dest


@pytest.mark.parametrize("form", ["webdataset", "tfrecord"])
@pytest.mark.parametrize("source", ["folder", "index", "shards"])
def test_every_sample_is_the_sources(tree, tmp_path, form, source):
    sources = {
        "folder": lambda: tree,
        "index": lambda: as_index(tree, tmp_path / "index"),
        "shards": lambda: packed(tree, tmp_path / "first", format="tfrecord", shards=2, seed=5),
    }
    same_samples(packed(sources[source](), tmp_path / "dest", format=form, shards=3), tree)


def same_samples(one, other):
    """Both folders have the same classes and samples."""
    (classes, arrays), (others_classes, others) = read_all(one), read_all(other)
    assert classes == others_classes
    for array, others_array in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(array, others_array)


def test_webdataset_finds_a_label_and_an_image_under_each_key(tree, tmp_path):
    """As webdataset groups them: neighbours in the archive of one name up to its first dot."""
    dest = packed(tree, tmp_path / "dest", shards=3)
    assert sorted(path.name for path in dest.iterdir()) == [
        "index.npz",
        *(f"train-00000{k}.tar" for k in range(3)),
        *(f"val-00000{k}.tar" for k in range(3)),
    ]
    paths = sorted((tree / "train").glob("*/*"))
    found = {}
    for shard in sorted(dest.glob("train-*.tar")):
        with tarfile.open(shard) as tar:
            members = tar.getmembers()
            for label, image in zip(members[::2], members[1::2], strict=True):
                key, suffix = image.name.split(".")
                assert label.name == f"{key}.cls"
                found[int(key)] = suffix, int(tar.extractfile(label).read()), tar.extractfile(image).read()
    assert [found[k] for k in range(16)] == [
        ("png" if path.suffix == ".png" else "jpg", int(path.parent.name == "n02"), path.read_bytes()) for path in paths
    ]


READ_BY_TENSORFLOW = """
import hashlib, json, sys
import tensorflow as tf

spec = {"image/encoded": tf.io.FixedLenFeature((), tf.string), "image/class/label": tf.io.FixedLenFeature((), tf.int64)}
found = []
for record in tf.data.TFRecordDataset(sys.argv[1:]):
    example = tf.io.parse_single_example(record, spec)
    encoded = example["image/encoded"].numpy()
    found.append([hashlib.sha256(encoded).hexdigest(), int(example["image/class/label"])])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_tensorflow_reads_the_records(tree, tmp_path):
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is missing: pip install tensorflow")
    dest = packed(tree, tmp_path / "dest", format="tfrecord", shards=2)
    assert sorted(path.name for path in dest.glob("train*")) == [
        "train-00000-of-00002.tfrecord",
        "train-00001-of-00002.tfrecord",
    ]
    command = [sys.executable, "-c", READ_BY_TENSORFLOW, *sorted(map(str, dest.glob("train*")))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = [
        [hashlib.sha256(path.read_bytes()).hexdigest(), int(path.parent.name == "n02")]
        for path in (tree / "train").glob("*/*")
    ]
    assert sorted(json.loads(done.stdout)) == sorted(expected)


@pytest.mark.parametrize(
    ("content", "crc"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (bytes(range(256)) * 9, 0x29DEF29C),
        (bytes(4096), 0x98F94189),
    ],
    ids=["digits", "zeros", "several blocks", "whole blocks"],
)
def test_a_record_has_the_masked_crc_of_its_bytes(content, crc):
    """The first two: RFC 3720, B.4, and the check value of the CRC catalogue; unmasked as crc32c::Unmask does."""
    rotated = int.from_bytes(pack.masked_crc(content), "little") - 0xA282EAD8 & 0xFFFFFFFF
    assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == crc


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.tar")}


def test_a_seed_decides_the_order_and_each_shard_has_every_class(tree, tmp_path):
    one, again = (packed(tree, tmp_path / name, shards=2) for name in ("one", "again"))
    other = packed(tree, tmp_path / "other", shards=2, seed=1)
    assert contents(one) == contents(again)
    assert contents(one)["train-000000.tar"] != contents(other)["train-000000.tar"]
    for shard in one.glob("train-*.tar"):
        with tarfile.open(shard) as tar:
            labels = {tar.extractfile(member).read() for member in tar if member.name.endswith(".cls")}
        assert labels == {b"0", b"1"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"shard_mb": 2}, [0, 0, 1, 1, 2]), ({"shards": 2}, [0, 0, 0, 1, 1]), ({"shards": 9}, [0, 1, 3, 5, 7])],
    ids=["by size", "by number", "more than images"],
)
def test_where_a_shard_begins(options, expected):
    images = (pack.Sample(k, 0, bytes(1 << 20), "jpg") for k in range(5))
    options = pack.Options(Path("a"), Path("b"), **options)
    assert [shard for shard, _ in pack._in_shards(images, 5, options)] == expected


def test_larger_images_are_reduced_and_smaller_ones_kept(tree, tmp_path):
    dest = packed(tree, tmp_path / "dest", shorter_side=110, quality=80)
    before, after = (datasets.load("imagenet", data_dir=folder, **SIZES).train for folder in (tree, dest))
    for k in range(16):
        was, now = (Image.open(io.BytesIO(split.encoded(k))) for split in (before, after))
        if min(was.size) > 110:
            assert (min(now.size), now.format) == (110, "JPEG")
            assert max(now.size) == round(110 * max(was.size) / min(was.size))
            small = np.asarray(was.convert("RGB").resize(now.size)).astype(int)
            assert abs(np.asarray(now).astype(int) - small).mean() < 4
        else:
            assert after.encoded(k) == before.encoded(k)
    sizes = [Image.open(io.BytesIO(after.encoded(k))).size for k in range(16)]
    assert {min(size) == 110 for size in sizes} == {True, False}


@pytest.mark.parametrize("damage", ["truncated", "text"])
def test_a_damaged_image_ends_it_and_leaves_nothing(tmp_path, damage):
    tree = write_tree(tmp_path / "tree", 2, 1)
    path = tree / "train" / "n01" / "n01_1.JPEG"
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: len(content) // 2], "text": b"hello"}[damage])
    message = refusal(DataError, packed, tree, tmp_path / "dest")
    assert message.startswith(f"{path} cannot be read as an image (")
    assert message.endswith("): fetch it again, or remove it.")
    assert ("(of no known format)" in message) == (damage == "text")
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


@pytest.mark.parametrize(("count", "more"), [(2, ""), (20, ""), (23, " and 3 more")])
def test_every_bad_image_is_named_at_once(tmp_path, count, more):
    tree = write_tree(tmp_path / "tree", 15, 2)
    paths = sorted(tree.glob("*/*/*"))[:count]
    for path in paths:
        path.write_bytes(b"hello")
    message = refusal(DataError, packed, tree, tmp_path / "dest", shard_mb=1)
    start, _, rest = message.partition(": ")
    listed, _, remedy = rest.rpartition(": ")
    assert start == f"{count} of the 34 images of {tree} cannot be read"
    assert (listed[-len(more) :] if more else "", remedy) == (more, "fetch them again, or remove them.")
    named = listed.removesuffix(more).split("; ")
    assert len(named) == min(count, pack.MOST_NAMED) and len(message) < 2000
    assert set(named) <= {f"{path.relative_to(tree)} (of no known format)" for path in paths}
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


def test_images_of_all_formats_keep_their_own_suffix_and_two_jpegs_in_one_are_a_jpeg(tmp_path):
    """Webdataset makes one sample of what stands under .mpo and .cls, and decodes none."""
    folder, image = tmp_path / "tree" / "train" / "n01", scene(64, 48)
    write_tree(tmp_path / "tree", 1, 1)
    image.save(folder / "a.jpg", "MPO", save_all=True, append_images=[scene(64, 48, 1)])
    for suffix in ("webp", "bmp", "tif", "ppm", "png"):
        image.save(folder / f"b.{suffix}")
    dest = packed(tmp_path / "tree", tmp_path / "dest")
    with tarfile.open(dest / "train-000000.tar") as tar:
        suffixes = sorted(name.partition(".")[2] for name in tar.getnames() if not name.endswith(".cls"))
    assert suffixes == ["bmp", "jpg", "jpg", "png", "png", "ppm", "tif", "webp"]
    same_samples(dest, tmp_path / "tree")


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from hvdtrain.tools import pack

dies_at, saved, save = int(sys.argv[3]), [], np.save

def save_or_die(*given):
    saved.append(given)
    if len(saved) == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    save(*given)

def rename_or_die(self, to, rename=Path.rename):
    if dies_at == 0 and Path(to).name.startswith("val"):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, to)

np.save, Path.rename = save_or_die, rename_or_die
options = {"format": sys.argv[4], "shorter_side": int(sys.argv[5]), "shards": 4}
pack.pack(pack.Options(Path(sys.argv[1]), Path(sys.argv[2]), **options))
"""


def call(tree, dest, form, at, side=0):
    """A call that is killed as it keeps a shard for the at-th time, or names the shards (0)."""
    command = warm.command("hvdtrain", "-c", KILLED, tree, dest, at, form, side)
    return subprocess.run(command, check=False, capture_output=True, text=True)


def killed(tree, dest, form="webdataset", at=3, side=0):
    """What such a call leaves."""
    assert call(tree, dest, form, at, side).returncode == -signal.SIGKILL
    (left,) = dest.parent.glob(f".{dest.name}.*.tmp")
    return left


def test_no_shard_is_kept_behind_a_bad_image(tmp_path):
    """Its shards have other images than those of a call in which the image was fetched again."""
    tree = write_tree(tmp_path / "tree")
    fifth = np.random.default_rng([0, 0]).permutation(16)[5]
    sorted((tree / "train").glob("*/*"))[fifth].write_bytes(b"hello")
    ended = call(tree, tmp_path / "dest", "webdataset", 2)
    assert (ended.returncode, "cannot be read as an image" in ended.stderr) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


LEFT = (1, 0, 0), (3, 2, 8), (6, 4, 18), (0, 0, 6)  # when it is killed; whole training shards, and images, that it left


@pytest.mark.parametrize(
    ("at", "train", "kept", "form"),
    marked(
        [(*left, form) for left in LEFT for form in ("webdataset", "tfrecord")],
        fast={(3, "webdataset"), (0, 6, "tfrecord")},
    ),
)
def test_a_call_that_was_killed_is_continued(tree, tmp_path, form, at, train, kept):
    dest = tmp_path / "dest"
    left = killed(tree, dest, form, at)
    whole = {path.name: path.stat() for path in left.glob("train-?")} if at else {}
    written = pack.pack(pack.Options(tree, dest, format=form, shards=4))
    also = f"; {kept} of the images had been packed by a call that was killed" if kept else ""
    assert written.partition(" of memory")[2] == also
    other = packed(tree, tmp_path / "other", format=form, shards=4)
    assert {path.name: path.read_bytes() for path in dest.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }
    assert dest.stat().st_mode == other.stat().st_mode == tmp_path.stat().st_mode | 0o055
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest", "other"]
    for number, path in enumerate(sorted(dest.glob("train*"))[:train]):
        before, now = whole[f"train-{number}"], path.stat()
        assert (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_reducing_call_that_was_killed_is_continued_to_the_same_bytes(tree, tmp_path):
    killed(tree, tmp_path / "dest", at=6, side=60)
    written = pack.pack(pack.Options(tree, tmp_path / "dest", shards=4, shorter_side=60))
    assert written.endswith("; 18 of the images had been packed by a call that was killed")
    other = packed(tree, tmp_path / "other", shards=4, shorter_side=60)
    assert {path.name: path.read_bytes() for path in (tmp_path / "dest").iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }


def test_images_are_reduced_by_as_many_threads_as_processors_and_at_least_16(tree, tmp_path, monkeypatch):
    for count, threads in ((2, 16), (40, 40)):
        monkeypatch.setattr(processors, "count", lambda number=count: number)
        asked = []
        monkeypatch.setattr(
            pack, "read_ahead", lambda read, requests, readers, to=asked: to.append(readers) or map(read, requests)
        )
        packed(tree, tmp_path / f"of {count}")
        assert asked == [threads, threads]


SIX = {0x0112: 6, 0x010F: "a maker"}  # the right side is up


def test_a_reduced_image_keeps_its_orientation_and_nothing_else_of_its_exif(tmp_path):
    tree = write_tree(tmp_path / "tree", 1, 1)
    exif = Image.Exif()
    exif.update(SIX)
    scene(100, 80).save(tree / "train" / "n01" / "n01_0.JPEG", exif=exif)
    dest = packed(tree, tmp_path / "dest", shorter_side=60)
    train = datasets.load("imagenet", data_dir=dest, **SIZES).train
    turned, other = (Image.open(io.BytesIO(train.encoded(k))) for k in (0, 1))
    assert (turned.size, dict(turned.getexif()), dict(other.getexif())) == ((75, 60), {0x0112: 6}, {})


def about(folder):
    with np.load(folder / "index.npz") as index:
        return json.loads(str(index["about"]))


def test_a_set_says_how_its_images_were_reduced(tree, tmp_path, capsys):
    """Also where it was packed again, and where it was packed by an older hvdtrain."""
    whole, reduced = packed(tree, tmp_path / "whole"), packed(tree, tmp_path / "reduced", shorter_side=64, quality=80)
    assert not {"shorter_side", "quality"} & set(about(whole))
    again = {
        "kept": packed(reduced, tmp_path / "kept"),
        "not enlarged": packed(reduced, tmp_path / "larger", shorter_side=90),
    }
    smaller = packed(reduced, tmp_path / "smaller", shorter_side=50)
    for folder, expected in ((reduced, (64, 80)), *((each, (64, 80)) for each in again.values()), (smaller, (50, 90))):
        assert (about(folder)["shorter_side"], about(folder)["quality"]) == expected
    assert "pictures" not in datasets.load("imagenet", data_dir=whole).contents()
    line = "pictures reduced to a shorter side of 64 at quality 80"
    assert datasets.load("imagenet", data_dir=reduced, **SIZES).contents()["pictures"] == line
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in SIZES.items()]
    assert cli.main(["plan", "imagenet", "--data-dir", str(reduced), "--batch-size=4", *flags]) == 0
    assert f"\ndata        {line}\n" in capsys.readouterr().out
    larger = {**SIZES, "valid_resize": 65, "cache_dir": tmp_path / "node"}
    message = refusal(PlanError, datasets.load, "imagenet", data_dir=reduced, **larger)
    assert not (tmp_path / "node").exists()  # nothing is copied first
    assert message == (
        f"valid_resize must be at most 64, to which the pictures of {reduced} were reduced, got 65: it would enlarge "
        "them again; lower it, or pack with --shorter-side 65."
    )


@pytest.mark.parametrize(("memory", "fits"), [(10**12, "fits into"), (10**3, "is more than")])
def test_whether_a_set_fits_into_memory_is_said(tree, tmp_path, monkeypatch, memory, fits):
    monkeypatch.setattr(processors, "memory", lambda: memory)
    written = pack.pack(pack.Options(tree, tmp_path / "dest"))
    assert written.endswith(f" MB, which {fits} half of this node's {memory / 1e9:,.1f} GB of memory")


@pytest.mark.parametrize("what", ["other options", "another image", "another source"])
def test_what_was_killed_of_another_set_is_removed(tree, tmp_path, what):
    dest, source = tmp_path / "dest", Path(shutil.copytree(tree, tmp_path / "tree"))
    left, older = killed(source, dest), tmp_path / ".dest.123-0123456789abcdef.tmp"
    older.mkdir(0o700)
    if what == "another image":
        scene(60, 50).save(source / "train" / "n01" / "new.png")
    if what == "another source":
        source = Path(shutil.copytree(tree, tmp_path / "again"))
    written = pack.pack(pack.Options(source, dest, shards=3 if what == "other options" else 4))
    assert "killed" not in written
    assert not left.exists() and not older.exists()


def test_a_call_that_goes_on_is_left_alone(tree, tmp_path):
    dest = tmp_path / "dest"
    left = killed(tree, dest)
    before = sorted(path.name for path in left.iterdir())
    with files.held(left / ".lock"):
        message = f"{dest} is being packed by another process: wait for it, or name another DEST."
        assert refusal(OutputError, packed, tree, dest, shards=4) == message
        assert len(list(packed(tree, dest, shards=3).glob("train*"))) == 3
    assert sorted(path.name for path in left.iterdir()) == before


@pytest.mark.parametrize("what", ["of another user", "open to others", "a link"])
def test_what_another_user_left_in_the_place_of_ours_is_not_continued(tree, tmp_path, what):
    dest = tmp_path / "dest"
    left = killed(tree, dest)
    match what:
        case "of another user":
            if os.geteuid() != 0:
                pytest.skip("plays other users: run the tests as root")
            os.chown(left, 65534, 65534)
        case "open to others":
            left.chmod(0o770)
        case "a link":
            left.rename(tmp_path / "elsewhere")
            left.symlink_to(tmp_path / "elsewhere")
    before = {path.name: path.read_bytes() for path in left.iterdir()}
    message = f"{left} is not a folder of yours alone: have it removed, or name another DEST."
    assert refusal(OutputError, packed, tree, dest, shards=4) == message
    packed(tree, dest, shards=3)
    assert {path.name: path.read_bytes() for path in left.iterdir()} == before


def test_the_command_expands_paths_and_prints_what_it_wrote(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TREE", str(tree))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["pack", "${TREE}", "~/new/dest", "--shards", "2"]) == 0
    size = sum(path.stat().st_size for path in (tmp_path / "new" / "dest").glob("*.tar"))
    assert capsys.readouterr().out == (
        f"{tmp_path}/new/dest: 16 images in 2 shards and 6 images in 2 shards to train and to validate with, "
        f"{size / 1e6:.1f} MB, which fits into half of this node's {processors.memory() / 1e9:,.1f} GB of memory\n"
    )
    assert cli.main(["pack", "$NO_SUCH/tree", "~/other"]) == 2
    assert capsys.readouterr().err == (
        "RecipeError: SOURCE needs the environment variable $NO_SUCH, which is not set; export it.\n"
    )


def test_files_that_are_left_out_are_counted(tmp_path, capsys):
    tree = write_tree(tmp_path / "tree", 2, 1)
    (tree / "train" / "n01" / "a.gif").write_bytes(b"GIF89a")
    packed(tree, tmp_path / "dest")
    assert capsys.readouterr().out == f"{datasets.load('imagenet', data_dir=tree).notes[0]}\n" != "\n"


FULL = """
import resource, sys
from hvdtrain import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(cli.main(["pack", *sys.argv[1:]]))
"""


def test_a_full_disk_ends_it_and_leaves_nothing(tree, tmp_path, warm_python):
    done = warm_python("-c", FULL, str(tree), str(tmp_path / "dest"))
    message = f"{tmp_path}/dest cannot be written (File too large): free space, or name another folder."
    assert (done.returncode, done.stderr) == (2, f"OutputError: {message}\n")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_filled_and_what_is_there_is_not_written_over(tree, tmp_path):
    (tmp_path / "dest").mkdir()
    dest, file = packed(tree, tmp_path / "dest"), tmp_path / "file"
    file.write_text("mine")
    before = contents(dest)
    assert len(before) == 2
    for there in (dest, file):
        message = f"{there} is there already: remove it, or name a new folder."
        assert refusal(OutputError, packed, tree, there, seed=1) == message
    assert (contents(dest), file.read_text()) == (before, "mine")


@pytest.mark.parametrize("flags", ["--shard-mb=0", "--shorter-side=-1", "--quality=96", "--format=zip"])
def test_a_wrong_flag_is_refused(flags):
    name, _, value = flags.partition("=")
    assert re.match(f"{name} must be .*, got '{value}'; ", refusal(RecipeError, pack.main, ["a", "b", flags]))


def test_how_far_it_is_and_the_time_left_are_shown(tmp_path, monkeypatch):
    assert pack.progress("train", 1200, 4000, 4.0) == "train: 1,200 of 4,000 images, 300 a second, 0:00:09 left"
    monkeypatch.setattr(pack, "INTERVAL", 0)
    seen = []
    pack.pack(pack.Options(write_tree(tmp_path / "tree", 2, 1), tmp_path / "packed"), seen.append)
    assert [line.partition(",")[0] for line in seen[:2]] == ["train: 1 of 4 images", "train: 2 of 4 images"]
