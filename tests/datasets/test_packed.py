"""Packed sets: read by offset or shard after shard, refused where damaged, and copied once a node."""

import errno
import fcntl
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from images import draws, write_tree
from paths import SUPPORT
from refusals import refusal

from hvdtrain import cli, datasets
from hvdtrain.core import plan as plans
from hvdtrain.core import recipe
from hvdtrain.core.progress import Progress, train_requests
from hvdtrain.datasets import packed as shards
from hvdtrain.engines import frameworks
from hvdtrain.errors import DataError, RecipeError
from hvdtrain.tools import pack

SIZES = {"train_crop": 32, "valid_resize": 48, "valid_crop": 40}
REMEDY = "pack the set again, or copy it whole."
OUTSIDE = "points outside of its shards or classes"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """16 training images in 4 shards, 6 to validate with in 4."""
    folder = tmp_path_factory.mktemp("whole")
    pack.pack(pack.Options(write_tree(folder / "tree"), folder / "set", shards=4))
    return folder / "set"


@pytest.fixture
def packed(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "set"))


def load(data_dir, **options):
    return datasets.load("imagenet", data_dir=data_dir, **SIZES, **options)


def test_a_copy_in_another_process_reads_the_same(packed):
    split = load(packed).train
    x, y = split.read(np.arange(16), draws(16))
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        elsewhere, labels = pool.apply(split.read, (np.arange(16), draws(16)))
    np.testing.assert_array_equal(elsewhere, x)
    np.testing.assert_array_equal(labels, y)


def test_the_digest_is_of_the_images_wherever_and_however_they_are_packed(packed, tmp_path):
    dataset = load(packed)
    tree = write_tree(tmp_path / "tree")
    pack.pack(pack.Options(tree, tmp_path / "otherwise", format="tfrecord", shards=2, seed=5))
    assert load(tmp_path / "otherwise").contents() == dataset.contents()
    assert (dataset.classes, dataset.contents()["class names"]) == (2, ["n01", "n02"])
    lists = {load(packed, shuffle="shards").train.digest(), dataset.train.digest(), dataset.valid.digest()}
    path = tree / "train" / "n01" / "n01_0.JPEG"
    path.write_bytes(path.read_bytes() + b"\0")
    pack.pack(pack.Options(tree, tmp_path / "changed"))
    assert len(lists | {load(tmp_path / "changed").train.digest()}) == 4


def test_each_shard_is_opened_once_and_closed_with_the_split(packed, monkeypatch):
    opened = []
    real = os.open
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    split = load(packed).train
    monkeypatch.setattr(os, "open", lambda path, flags: opened.append(path.name) or real(path, flags))
    for _ in range(2):
        split.read(np.arange(16), None)
    assert sorted(opened) == [f"train-00000{k}.tar" for k in range(4)]
    del split
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_batch_is_read_in_the_order_of_the_shards(packed):
    split = load(packed).train
    indices = np.random.default_rng(0).permutation(16)
    places = split.entries[indices][split.in_order(indices)]
    assert (np.diff(places["shard"] * 2.0**40 + places["offset"]) > 0).all()
    np.testing.assert_array_equal(split.read(indices, None)[0][3], split.read(indices[3:4], None)[0][0])


def flip(path, index):
    content = bytearray(path.read_bytes())
    content[index] ^= 1
    path.write_bytes(content)


def test_damaged_bytes_are_never_decoded(packed):
    split = load(packed).train
    entry = split.entries[5]
    path = packed / f"train-00000{entry['shard']}.tar"
    flip(path, int(entry["offset"]) + int(entry["size"]) // 2)
    message = f"{path} at byte {entry['offset']} is damaged: {REMEDY}"
    assert refusal(DataError, split.read, np.arange(16), None) == message
    assert len(split.read(np.delete(np.arange(16), 5), None)[1]) == 15


def rewritten(change):
    """A change of the index's arrays."""

    def rewrite(folder):
        with np.load(folder / "index.npz") as index:
            arrays = dict(index)
        change(arrays)
        np.savez(folder / "index.npz", **arrays)

    return rewrite


def cut(name):
    def shorten(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return shorten


def put(split, key, value):
    def change(arrays):
        arrays[split][key][2] = value

    return rewritten(change)


IS_DAMAGED = "{set}/index.npz is damaged "
NO_ZIP = f"{IS_DAMAGED}(BadZipFile: File is not a zip file): "
DAMAGES = {
    "no shard": (lambda folder: (folder / "val-000001.tar").unlink(), "{set}/val-000001.tar is missing: "),
    "short shard": (cut("train-000002.tar"), "{set}/train-000002.tar must hold {size} bytes, got {half}: "),
    "short index": (cut("index.npz"), NO_ZIP),
    "empty index": (lambda folder: (folder / "index.npz").write_bytes(b""), NO_ZIP),
    "no split": (
        rewritten(lambda arrays: arrays.pop("val")),
        f"{IS_DAMAGED}(KeyError: \"There is no item named 'val.npy' in the archive\"): ",
    ),
    "other rows": (
        rewritten(lambda arrays: arrays.update(val=np.zeros(3))),
        f"{IS_DAMAGED}(ValueError: no index of version 1): ",
    ),
    "no such shard": (put("train", "shard", 4), f"{IS_DAMAGED}(train {OUTSIDE}): "),
    "beyond": (put("train", "offset", 1 << 40), f"{IS_DAMAGED}(train {OUTSIDE}): "),
    "no such class": (put("val", "label", 2), f"{IS_DAMAGED}(val {OUTSIDE}): "),
    "no samples": (rewritten(lambda arrays: arrays.update(val=arrays["val"][:0])), f"{IS_DAMAGED}(val {OUTSIDE}): "),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_set_is_refused(packed, damage, message):
    size = (packed / "train-000002.tar").stat().st_size
    damage(packed)
    assert refusal(DataError, load, packed) == message.format(set=packed, size=size, half=size // 2) + REMEDY


@pytest.mark.slow
def test_a_thousand_forged_sets_end_in_a_line_each(tmp_path):
    """In a process that a hang, or 1 GB of memory, would end."""
    command = [sys.executable, SUPPORT / "hostile_data.py", "1000", "1", tmp_path]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr.rpartition("\r")[2]
    assert " 0 failed, " in ended.stdout


def test_too_many_shards_for_the_system(packed, monkeypatch):
    def refuse(path, flags):
        raise OSError(errno.EMFILE, "Too many open files")

    split = load(packed).train
    monkeypatch.setattr(os, "open", refuse)
    path = split.files.paths[split.entries["shard"][0]]
    assert refusal(DataError, split.encoded, 0) == (
        f"{path} cannot be opened (Too many open files): raise `ulimit -n`, or pack into fewer, larger shards."
    )


def test_by_shard_samples_are_numbered_as_they_lie(packed):
    dataset, usual = load(packed, shuffle="shards"), load(packed)
    assert (dataset.shards, usual.shards) == ((4, 4, 4, 4), ())
    offsets = list(zip(dataset.train.entries["shard"], dataset.train.entries["offset"], strict=True))
    assert offsets == sorted(offsets)
    assert offsets != list(zip(usual.train.entries["shard"], usual.train.entries["offset"], strict=True))
    for k in range(16):
        (there,) = np.flatnonzero(usual.train.entries == dataset.train.entries[k])
        assert dataset.train.encoded(k) == usual.train.encoded(int(there))
        assert dataset.train.labels[k] == usual.train.labels[there]


def test_by_shard_each_shard_is_read_ahead_as_it_is_begun(packed, monkeypatch):
    advised = []
    advise = lambda file, offset, size, advice: advised.append((os.readlink(f"/proc/self/fd/{file}")[-5], offset, size))  # noqa: E731, PTH115
    monkeypatch.setattr(os, "posix_fadvise", advise)
    split = load(packed, shuffle="shards").train
    for indices in ([0, 1], [3, 2], [5, 2], [7, 6], [0, 1]):
        split.read(np.array(indices), None)
    assert advised == [("0", 0, 0), ("1", 0, 0), ("0", 0, 0)]
    load(packed).train.read(np.arange(16), None)
    assert len(advised) == 3


@pytest.mark.parametrize(("size", "global_batch"), [(1, 4), (2, 4), (3, 6), (4, 4), (3, 5)])
def test_by_shard_ranks_take_equal_steps_and_no_image_twice(packed, size, global_batch):
    keys = {"data_dir": packed, "shuffle": "shards", "batch_norm": "frozen", "batch_size_per_rank": None}
    chosen = recipe.load("imagenet", {**keys, "batch_size": global_batch})
    dataset = load(packed, shuffle="shards")
    plan = plans.make(chosen, size, dataset, frameworks.network_of(chosen, "torch", dataset))
    all_requests = [train_requests(plan, Progress(epoch=2), rank) for rank in range(size)]
    assert {starts for starts, _ in all_requests} == {range(0, 16 - global_batch + 1, global_batch)}
    read = np.concatenate([indices for _, requests in all_requests for indices, _ in requests])
    assert len(set(read.tolist())) == len(read) == 16 // global_batch * global_batch
    assert "shards" not in plan.to_json()


def test_the_plan_of_a_packed_set(packed, capsys):
    flags = ["--shuffle", "shards", "--batch-size", "4", "--train-crop", "64", "--ranks", "2"]
    assert cli.main(["plan", "imagenet", "--data-dir", str(packed), *flags]) == 0
    assert "on imagenet, 16 examples to train, 6 to validate\n" in capsys.readouterr().out


def test_what_only_packed_sets_have(tmp_path):
    tree = write_tree(tmp_path / "tree", 1, 1)
    rule = f"needs a packed data_dir: python -m hvdtrain pack {tree} DEST"
    assert refusal(DataError, load, tree, shuffle="shards") == f"shuffle shards {rule}"
    assert refusal(DataError, load, tree, cache_dir=Path("/dev/shm")) == f"cache_dir {rule}"
    for keys in ({"shuffle": "shards"}, {"cache_dir": "/tmp"}):
        assert refusal(RecipeError, recipe.load, "digits", keys) == (
            "shuffle shards and cache_dir go with dataset imagenet, got digits; drop them."
        )


def own(folder):
    return folder / f"hvdtrain-{os.geteuid()}"


def copies(folder):
    return sorted(path.name for path in own(folder).iterdir() if path.is_dir())


def test_the_copy_of_each_set_is_made_once_and_read(packed, tmp_path):
    x, _ = load(packed).train.read(np.arange(16), draws(16))
    for _ in range(2):
        dataset = load(packed, cache_dir=tmp_path / "node")
        assert {path.parents[2] for path in dataset.train.files.paths} == {tmp_path / "node"}
        np.testing.assert_array_equal(dataset.train.read(np.arange(16), draws(16))[0], x)
        flip(packed / "train-000000.tar", 5000)  # the second time, only the copy is whole
    assert len(copies(tmp_path / "node")) == 1
    pack.pack(pack.Options(write_tree(tmp_path / "tree"), tmp_path / "other", shards=3))
    split = load(tmp_path / "other", cache_dir=tmp_path / "node").train
    assert (len(copies(tmp_path / "node")), len(split.files.paths)) == (2, 3)


def test_of_two_processes_one_copies_and_one_waits(packed, tmp_path, monkeypatch):
    """The first is held up in its copying until the second has requested the lock."""
    requested, copied = threading.Semaphore(0), []
    lock, copy = fcntl.flock, shards._copy

    def request(file, operation):
        requested.release()
        lock(file, operation)

    def copy_late(data_dir, digest, folder, *others):
        copied.append(own(tmp_path / "node") / folder.name)
        assert all(requested.acquire(timeout=120) for _ in range(2))
        copy(data_dir, digest, folder, *others)

    monkeypatch.setattr(fcntl, "flock", request)
    monkeypatch.setattr(shards, "_copy", copy_late)
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(shards.on_node, [packed] * 2, [tmp_path / "node"] * 2))
    assert folders == [copied[0]] * 2
    assert (len(copied), copies(tmp_path / "node")) == (1, [copied[0].name])


def test_a_copy_that_was_broken_off_is_made_anew(packed, tmp_path, monkeypatch):
    node = tmp_path / "node"
    name = shards.on_node(packed, node).name
    shutil.rmtree(own(node) / name)
    (own(node) / f".{name}.1-0123456789abcdef.tmp" / "set").mkdir(parents=True)

    def full(source, dest, held):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "_copy_file", full)
        assert refusal(DataError, shards.on_node, packed, node) == (
            f"{packed} cannot be copied to cache_dir {node} (No space left on device): name a folder of this node's "
            "own disk, or leave cache_dir out."
        )
    assert copies(node) == []
    shards.on_node(packed, node)
    assert copies(node) == [name]


def empty(folder):
    for path in folder.iterdir():
        path.unlink()


def state(path):
    found = path.lstat()
    return found.st_ino, found.st_size, found.st_mtime_ns


MISSING_FILES = {  # what a cleaner, a full disk or a power cut leaves of a copy
    "two are gone": lambda folder: [(folder / name).unlink() for name in ("val-000001.tar", "train-000000.tar")],
    "a shard is shorter": cut("train-000002.tar"),
    "a shard is empty": lambda folder: (folder / "train-000002.tar").write_bytes(b""),
    "the index is gone": lambda folder: (folder / shards.INDEX).unlink(),
    "all is gone": empty,
    "the folder is gone": shutil.rmtree,
    "a link to nowhere": lambda folder: (
        (folder / "train-000000.tar").unlink(),
        (folder / "train-000000.tar").symlink_to(folder / "no"),
    ),
}


@pytest.mark.parametrize("thin", MISSING_FILES.values(), ids=MISSING_FILES)
def test_files_missing_in_a_copy_are_copied_again(packed, tmp_path, thin):
    folder = shards.on_node(packed, tmp_path / "node")
    x, _ = load(packed, cache_dir=tmp_path / "node").train.read(np.arange(16), draws(16))
    thin(folder)
    whole = {path.name: state(path) for path in folder.glob("*") if path.is_file()}
    again = load(packed, cache_dir=tmp_path / "node").train
    np.testing.assert_array_equal(again.read(np.arange(16), draws(16))[0], x)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in packed.iterdir()
    }
    untouched = {name for name, before in whole.items() if state(folder / name) == before}
    assert untouched == {name for name, (_, size, _) in whole.items() if size == (packed / name).stat().st_size}


def test_a_job_that_reads_is_not_disturbed_by_another_that_fills_its_copy(packed, tmp_path):
    folder = shards.on_node(packed, tmp_path / "node")
    reading = load(packed, cache_dir=tmp_path / "node").train
    x, _ = reading.read(np.arange(16), None)
    flip(packed / "train-000001.tar", 5000)  # what is copied now is another file
    with (folder / "train-000001.tar").open("ab") as file:
        file.write(b"longer")
    shards.on_node(packed, tmp_path / "node")
    assert (folder / "train-000001.tar").read_bytes() == (packed / "train-000001.tar").read_bytes()
    np.testing.assert_array_equal(reading.read(np.arange(16), None)[0], x)


def test_a_set_that_is_not_whole_is_not_copied(packed, tmp_path):
    (packed / "val-000001.tar").unlink()
    assert refusal(DataError, load, packed, cache_dir=tmp_path / "node") == (
        f"{packed}/val-000001.tar is missing, or not as long as index.npz has it: {REMEDY}"
    )
    assert copies(tmp_path / "node") == []


def test_a_copy_that_could_not_be_filled_keeps_what_it_has(packed, tmp_path, monkeypatch):
    folder = shards.on_node(packed, tmp_path / "node")
    (folder / "val-000001.tar").unlink()
    left = sorted(folder.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space left")))
        assert "(no space left): name a folder of this node's own disk" in refusal(
            DataError, shards.on_node, packed, tmp_path / "node"
        )
    assert sorted(folder.iterdir()) == left
    (folder / ".val-000001.tar.1-0123456789abcdef.tmp").write_text("of a killed one")
    shards.on_node(packed, tmp_path / "node")
    assert sorted(folder.iterdir()) == sorted([*left, folder / "val-000001.tar"])


@pytest.fixture
def full_disk(monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 0, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


@pytest.mark.usefixtures("full_disk")
def test_a_copy_must_fit(packed, tmp_path):
    size = sum(path.stat().st_size for path in packed.iterdir())
    assert refusal(DataError, load, packed, cache_dir=tmp_path / "node") == (
        f"cache_dir {tmp_path}/node must have room for the {size / 1e6:.1f} MB of {packed}, got 0.0 MB: name a larger "
        "disk, or leave cache_dir out."
    )


@pytest.mark.usefixtures("full_disk")
def test_where_a_copy_does_not_fit_those_of_other_sets_are_named_and_stay(packed, tmp_path, monkeypatch):
    node = tmp_path / "a node"
    (own(node) / "0123").mkdir(parents=True)
    own(node).chmod(0o700)
    (own(node) / "0123" / "train-000000.tar").write_bytes(bytes(1_500_000))
    killed = own(node) / ".4567.1-0123456789abcdef.tmp"  # maybe of a job that copies
    killed.mkdir()
    for folder, days in ((own(node) / "0123", 3), (killed, 40)):
        os.utime(folder, (time.time() - days * 86400,) * 2)
    message = refusal(DataError, load, packed, cache_dir=node)
    uid = own(node).name
    named = f"{uid}/.4567.1-0123456789abcdef.tmp (0.0 MB, 40 days old), {uid}/0123 (1.5 MB, 3 days old)"
    command = f"rm -r '{killed}' '{own(node)}/0123'"
    assert message.partition("got 0.0 MB: ")[2] == (
        f"where no job needs them, remove copies of other sets, {named}: {command}; or name a larger disk, or leave "
        "cache_dir out."
    )
    assert copies(node) == [killed.name, "0123"]
    subprocess.run(shlex.split(command), check=True)
    monkeypatch.undo()
    assert len(load(packed, cache_dir=node).train) == 16
