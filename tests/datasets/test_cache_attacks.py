"""On a disk where all users may write, other users cannot change the copy of a packed set; they can only prevent it."""

import contextlib
import fcntl
import hashlib
import itertools
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from images import write_tree
from refusals import refusal
from users import NOBODY, OTHER, needs_root, user

from hvdtrain import datasets, files
from hvdtrain.datasets import cifar100 as download
from hvdtrain.datasets import packed as shards
from hvdtrain.errors import DataError
from hvdtrain.tools import pack

SIZES = {"train_crop": 32, "valid_resize": 48, "valid_crop": 40}


@pytest.fixture(scope="module")
def packed():
    """A set that all may read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        pack.pack(pack.Options(write_tree(Path(folder, "tree"), 2, 1), Path(folder, "set"), shards=2))
        yield Path(folder, "set")


@pytest.fixture
def disk():
    """A folder as /tmp and /dev/shm are."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def digest(packed):
    return hashlib.sha256((packed / shards.INDEX).read_bytes()).hexdigest()[:16]


def pixels(data_dir, cache_dir=None):
    return datasets.load("imagenet", data_dir=data_dir, cache_dir=cache_dir, **SIZES).train.read(np.arange(4), None)[0]


def plant(packed, folder):
    """A copy whose images are other ones of the same sizes, with sums that fit."""
    shutil.copytree(packed, folder)
    with np.load(folder / shards.INDEX) as index:
        arrays = {name: index[name] for name in index.files}
    rows = arrays["train"]
    rows[["shard", "offset", "size", "crc32"]] = rows[["shard", "offset", "size", "crc32"]][::-1].copy()
    np.savez(folder / shards.INDEX, **arrays)


@needs_root
@pytest.mark.parametrize("path", ["hvdtrain-{digest}", "hvdtrain-0/{digest}"])
def test_a_planted_copy_is_not_taken(packed, disk, path):
    expected = pixels(packed)
    planted = disk / path.format(digest=digest(packed))
    with user(NOBODY) as nobody:
        nobody(os.makedirs, planted.parent, 0o755, True)
        nobody(plant, packed, planted)
    try:
        np.testing.assert_array_equal(pixels(packed, disk), expected)
    except DataError as error:
        assert path.startswith("hvdtrain-0/")
        assert str(error) == (
            f"{packed} cannot be copied to cache_dir {disk} ({disk}/hvdtrain-0 must be a folder of uid 0 with mode "
            "700, got a folder of uid 65534 with mode 755): name a folder of this node's own disk, or leave cache_dir "
            "out."
        )
    assert planted.is_dir()


@needs_root
@pytest.mark.parametrize("what", ["a folder for all", "a link", "a link to nowhere", "a file", "a pipe"])
def test_what_lies_in_the_place_of_our_folder_is_refused_and_left_alone(packed, disk, what):
    own, target = disk / "hvdtrain-0", disk / "target"
    with user(NOBODY) as nobody:
        nobody(os.mkdir, target, 0o777)
        match what:
            case "a folder for all":
                nobody(os.mkdir, own)
                nobody(os.chmod, own, 0o777)
            case "a link":
                nobody(os.symlink, target, own)
            case "a link to nowhere":
                nobody(os.symlink, disk / "new", own)
            case "a file":
                nobody(own.touch)
            case "a pipe":
                nobody(os.mkfifo, own)
    with pytest.raises(DataError, match=r"hvdtrain-0 must be a folder of uid 0 with mode 700, got .* of uid 65534 "):
        pixels(packed, disk)
    assert sorted(path.name for path in disk.iterdir()) == ["hvdtrain-0", "target"]
    assert list(target.iterdir()) == []


def hold(path):
    """Makes the lock, and holds it as long as this process lives."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(descriptor, fcntl.LOCK_EX)


@needs_root
def test_the_lock_of_another_user_delays_nobody(packed, disk):
    with user(NOBODY) as nobody:
        nobody(hold, disk / f".hvdtrain-{digest(packed)}.lock")
        pixels(packed, disk)


@needs_root
def test_each_user_has_a_copy_of_his_own_that_others_cannot_read(packed, disk):
    expected = pixels(packed, disk)
    with user(OTHER) as other:
        np.testing.assert_array_equal(other(pixels, packed, disk), expected)
        for copy, uid in ((disk / "hvdtrain-0", 0), (disk / "hvdtrain-12345", OTHER)):
            found = [copy, *copy.rglob("*")]
            assert {path.lstat().st_uid for path in found} == {uid}
            assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in found} == {0}
            assert len(found) == 3 + len(list(packed.iterdir()))
        with pytest.raises(PermissionError):
            other(os.listdir, disk / "hvdtrain-0")


@needs_root
def test_a_shard_of_another_user_is_not_read(packed, disk):
    """As after a swap of our whole folder, where the disk lacks the sticky bit."""
    split = datasets.load("imagenet", data_dir=packed, cache_dir=disk, **SIZES).train
    path = split.files.paths[split.entries["shard"][0]]
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(DataError, match=r"must be a file of uid 0, got one of uid 65534: name another cache_dir\."):
        split.read(np.array([0]), None)


@needs_root
def test_a_folder_swapped_while_it_is_copied_gets_nothing(packed, disk, monkeypatch):
    disk.chmod(0o777)
    copy = shards._copy_file

    def swapped(source, dest, held):
        with contextlib.suppress(FileNotFoundError):
            (disk / "hvdtrain-0").rename(disk / "moved")
            (disk / "hvdtrain-0").symlink_to(disk / "target")
            os.lchown(disk / "hvdtrain-0", NOBODY, NOBODY)
        copy(source, dest, held)

    (disk / "target").mkdir(mode=0o777)
    monkeypatch.setattr(shards, "COPIERS", 1)
    monkeypatch.setattr(shards, "_copy_file", swapped)
    with pytest.raises(DataError):
        pixels(packed, disk)
    assert list((disk / "target").iterdir()) == []


@pytest.mark.parametrize("what", ["a pipe", "a link", "a link to ours", "a folder"])
def test_what_lies_in_the_place_of_a_shard_is_neither_waited_for_nor_written_through(packed, disk, tmp_path, what):
    """As a restored backup or the user's own program may leave it; other users cannot write there."""
    expected = pixels(packed, disk)
    shard, precious = disk / f"hvdtrain-{os.geteuid()}" / digest(packed) / "train-000000.tar", tmp_path / "precious"
    precious.write_text("content")
    shard.unlink()
    match what:
        case "a pipe":
            os.mkfifo(shard)
        case "a link":
            shard.symlink_to(precious)
        case "a link to ours":
            shard.symlink_to(shard.with_name("train-000001.tar"))
        case "a folder":
            shard.mkdir()
    before = shard.with_name("train-000001.tar").read_bytes()
    if what == "a folder":
        with pytest.raises(DataError, match=r"cannot be copied to cache_dir .* \(Is a directory\)"):
            pixels(packed, disk)
    else:
        np.testing.assert_array_equal(pixels(packed, disk), expected)
        assert stat.S_ISREG(shard.lstat().st_mode) or what == "a link to ours"
    assert (precious.read_text(), shard.with_name("train-000001.tar").read_bytes()) == ("content", before)


@needs_root
@pytest.mark.parametrize("others", [False, True], ids=["the link ours", "the link another's"])
def test_a_link_in_the_place_of_our_copy_gets_nothing(packed, disk, others):
    pixels(packed, disk)
    copy, target = disk / "hvdtrain-0" / digest(packed), disk / "target"
    shutil.rmtree(copy)
    target.mkdir(mode=0o700)
    copy.symlink_to(target)
    if others:
        os.lchown(copy, NOBODY, NOBODY)
    with pytest.raises(DataError, match=r"must be a folder of uid 0 with mode 700, got something else of uid "):
        pixels(packed, disk)
    assert list(target.iterdir()) == []


HOLDER = """
import pathlib, sys, time
from hvdtrain import files
with files.held(pathlib.Path(sys.argv[1])) as held:
    print("held", flush=True)
    time.sleep(3600)
"""


@contextlib.contextmanager
def holder(path):
    """A process that holds the lock."""
    command = [sys.executable, "-c", HOLDER, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def own_lock(packed, disk):
    own = disk / f"hvdtrain-{os.geteuid()}"
    own.mkdir(mode=0o700)
    return own / f".{digest(packed)}.lock"


def test_a_process_that_makes_progress_is_waited_for(packed, disk, monkeypatch):
    """It touches its lock in time, twenty times."""
    path, naps, now = own_lock(packed, disk), itertools.count(), itertools.count(0, 0.6 * files.PATIENCE_SECONDS)
    with holder(path) as process:

        def sleep(seconds):
            nap = next(naps)
            os.utime(path, (nap // 2, nap // 2))
            if nap == 40:
                process.kill()

        monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=sleep))
        pixels(packed, disk)
        assert next(naps) > 40


def test_a_process_that_is_stuck_is_named(packed, disk, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE_SECONDS", 1.0)
    path = own_lock(packed, disk)
    with holder(path) as process:
        named = f"{path} is held by process {process.pid} on {os.uname().nodename}, without any progress for 1 s: "
        assert refusal(DataError, pixels, packed, disk) == named + "end that process, or name another folder."
    pixels(packed, disk)


def test_waiting_is_reported_once(tmp_path):
    waited = []
    with holder(tmp_path / "lock") as process:
        for _ in range(2):
            with files.held(tmp_path / "lock", waiting=lambda: waited.append(process.kill())):
                pass
    assert len(waited) == 1


def test_a_whole_copy_is_read_whoever_holds_the_lock(packed, disk, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE_SECONDS", 1.0)
    expected = pixels(packed, disk)
    with holder(disk / f"hvdtrain-{os.geteuid()}" / f".{digest(packed)}.lock"):
        np.testing.assert_array_equal(pixels(packed, disk), expected)


@needs_root
@pytest.mark.parametrize("what", ["held", "a link", "a second name"])
def test_the_lock_of_a_shared_data_folder_is_neither_waited_for_nor_written_through(disk, tmp_path, what):
    """The lock of CIFAR-100, where several users share $HVDTRAIN_DATA."""
    precious = disk / "precious"
    precious.write_text("content")
    precious.chmod(0o600)
    paths = [disk / ".cifar-100.lock", disk / ".cifar-100-0.lock"]
    with user(NOBODY) as nobody:
        for path in paths:
            match what:
                case "held":
                    nobody(hold, path)
                case "a link":
                    nobody(os.symlink, precious, path)
                case "a second name":
                    os.link(precious, path)  # the kernel's fs.protected_hardlinks keeps others from it
        with pytest.raises(DataError, match="cannot be fetched"):
            download.download_cifar100(disk, "http://127.0.0.1:1/")
    assert precious.read_text() == "content"
