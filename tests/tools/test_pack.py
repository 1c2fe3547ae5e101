"""`pack`: shards that others read, sets that are whole or not there, and one line for whatever goes wrong."""

import hashlib
import importlib.util
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from images import scene, write_tree
from paths import REPOSITORY
from PIL import Image

from hvdtrain import cli, datasets, files
from hvdtrain.errors import DataError, OutputError, RecipeError
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
    dest = packed(sources[source](), tmp_path / "dest", format=form, shards=3)
    (classes, ours), (others_classes, others) = read_all(dest), read_all(tree)
    assert (classes, len(ours)) == (others_classes, len(others))
    for one, other in zip(ours, others, strict=True):
        np.testing.assert_array_equal(one, other)


def test_webdataset_finds_a_label_and_a_image_under_each_key(tree, tmp_path):
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
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
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


def test_larger_images_are_shrunk_and_smaller_ones_kept(tree, tmp_path):
    dest = packed(tree, tmp_path / "dest", resize=110, quality=80)
    before, after = (datasets.load("imagenet", data_dir=folder).train for folder in (tree, dest))
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


def test_the_command_tells_what_it_wrote(tree, tmp_path, capsys):
    assert cli.main(["pack", str(tree), str(tmp_path / "new" / "dest"), "--shards", "2"]) == 0
    size = sum(path.stat().st_size for path in (tmp_path / "new" / "dest").glob("*.tar"))
    assert capsys.readouterr().out == (
        f"{tmp_path}/new/dest: 16 images in 2 shards and 6 images in 2 shards to train and to validate with, "
        f"{size / 1e6:.1f} MB\n"
    )


@pytest.mark.parametrize("damage", ["truncated", "text"])
def test_a_damaged_image_ends_it_and_leaves_nothing(tmp_path, damage):
    tree = write_tree(tmp_path / "tree", 2, 1)
    path = tree / "train" / "n01" / "n01_1.JPEG"
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: len(content) // 2], "text": b"hello"}[damage])
    with pytest.raises(DataError) as refusal:
        packed(tree, tmp_path / "dest")
    assert str(refusal.value).startswith(f"{path} cannot be read as an image (")
    assert str(refusal.value).endswith("): fetch it again, or remove it.")
    if damage == "text":
        assert "(of no known format)" in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


@pytest.mark.parametrize(("count", "more"), [(2, ""), (20, ""), (23, " and 3 more")])
def test_every_bad_image_is_named_at_once(tmp_path, count, more):
    tree = write_tree(tmp_path / "tree", 15, 2)
    paths = sorted(tree.glob("*/*/*"))[:count]
    for path in paths:
        path.write_bytes(b"hello")
    with pytest.raises(DataError) as refusal:
        packed(tree, tmp_path / "dest", shard_mb=1)
    start, _, rest = str(refusal.value).partition(": ")
    listed, _, remedy = rest.rpartition(": ")
    assert start == f"{count} of the 34 images of {tree} cannot be read"
    assert (listed[-len(more) :] if more else "", remedy) == (more, "fetch them again, or remove them.")
    named = listed.removesuffix(more).split("; ")
    assert len(named) == min(count, pack.MOST_NAMED) and len(str(refusal.value)) < 2000
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
    for ours, others in zip(read_all(dest)[1], read_all(tmp_path / "tree")[1], strict=True):
        np.testing.assert_array_equal(ours, others)


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
pack.pack(pack.Options(Path(sys.argv[1]), Path(sys.argv[2]), format=sys.argv[4], shards=4))
"""


def call(tree, dest, form, at):
    """A call that is killed as it keeps a shard for the at-th time, or names the shards (0)."""
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", KILLED, tree, dest, str(at), form]
    return subprocess.run(command, env=environ, check=False, capture_output=True, text=True)


def killed(tree, dest, form="webdataset", at=3):
    """What such a call leaves."""
    assert call(tree, dest, form, at).returncode == -signal.SIGKILL
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


@pytest.mark.parametrize("form", ["webdataset", "tfrecord"])
@pytest.mark.parametrize(("at", "train", "kept"), [(1, 0, 0), (3, 2, 8), (6, 4, 18), (0, 0, 6)])
def test_a_call_that_was_killed_is_continued(tree, tmp_path, form, at, train, kept):
    dest = tmp_path / "dest"
    left = killed(tree, dest, form, at)
    whole = {path.name: path.stat() for path in left.glob("train-?")} if at else {}
    written = pack.pack(pack.Options(tree, dest, format=form, shards=4))
    also = f"; {kept} of the images had been packed by a call that was killed" if kept else ""
    assert written.partition("MB")[2] == also
    other = packed(tree, tmp_path / "other", format=form, shards=4)
    assert {path.name: path.read_bytes() for path in dest.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }
    assert dest.stat().st_mode == other.stat().st_mode == tmp_path.stat().st_mode | 0o055
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest", "other"]
    for number, path in enumerate(sorted(dest.glob("train*"))[:train]):
        before, now = whole[f"train-{number}"], path.stat()
        assert (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


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
        with pytest.raises(OutputError) as refusal:
            packed(tree, dest, shards=4)
        assert str(refusal.value) == f"{dest} is being packed by another process: wait for it, or name another DEST."
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
    with pytest.raises(OutputError) as refusal:
        packed(tree, dest, shards=4)
    assert str(refusal.value) == f"{left} is not a folder of yours alone: have it removed, or name another DEST."
    packed(tree, dest, shards=3)
    assert {path.name: path.read_bytes() for path in left.iterdir()} == before


def test_paths_are_expanded(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TREE", str(tree))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["pack", "${TREE}", "~/dest"]) == 0
    assert (tmp_path / "dest" / "index.npz").exists()
    assert cli.main(["pack", "$NO_SUCH/tree", "~/other"]) == 2
    assert capsys.readouterr().err == (
        "RecipeError: SOURCE needs the environment variable $NO_SUCH, which is not set; export it.\n"
    )


def test_files_that_are_left_out_are_counted(tmp_path, capsys):
    tree = write_tree(tmp_path / "tree", 2, 1)
    (tree / "train" / "n01" / "a.gif").write_bytes(b"GIF89a")
    packed(tree, tmp_path / "dest")
    assert capsys.readouterr().out == f"{datasets.load('imagenet', data_dir=tree).left_out}\n" != "\n"


def test_a_full_disk_ends_it_and_leaves_nothing(tree, tmp_path):
    command = [sys.executable, "-m", "hvdtrain", "pack", tree, tmp_path / "dest"]
    done = subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        2,
        f"OutputError: {tmp_path}/dest cannot be written (File too large): free space, or name another folder.\n",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["a set", "a file"])
def test_what_is_there_is_not_written_over(tree, tmp_path, there):
    dest = tmp_path / "dest"
    if there == "a set":
        packed(tree, dest)
    else:
        dest.write_text("mine")
    before = contents(dest)
    with pytest.raises(OutputError) as refusal:
        packed(tree, dest, seed=1)
    assert str(refusal.value) == f"{dest} is there already: remove it, or name a new folder."
    assert contents(dest) == before


def test_an_empty_folder_is_filled(tree, tmp_path):
    assert len(list(packed(tree, tmp_path).glob("*.tar"))) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shard-mb", "0"], "--shard-mb must be at least 1, got '0'; --help lists the flags."),
        (["--quality", "96"], "--quality must be at most 95, got '96'; --help lists the flags."),
        (["--format", "zip"], "--format must be 'webdataset' or 'tfrecord', got 'zip'; --help lists the flags."),
    ],
    ids=["shard-mb", "quality", "format"],
)
def test_a_wrong_flag_is_refused(tmp_path, flags, message):
    with pytest.raises(RecipeError) as refusal:
        pack.main([str(tmp_path), str(tmp_path / "dest"), *flags])
    assert str(refusal.value) == message


def test_the_images_so_far_and_the_time_left_are_shown():
    assert pack.progress("train", 1200, 4000, 4.0) == "train: 1,200 of 4,000 images, 300 a second, 0:00:09 left"


def test_how_far_it_is_can_be_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "INTERVAL", 0)
    seen = []
    pack.pack(pack.Options(write_tree(tmp_path / "tree", 2, 1), tmp_path / "packed"), seen.append)
    assert [line.partition(",")[0] for line in seen[:2]] == ["train: 1 of 4 images", "train: 2 of 4 images"]
