"""Files are written whole or not at all, also by several writers and by one that is killed; reading is bounded."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import odd_json
import pytest

from hvdtrain import files


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_written_with_the_users_permissions(umask, tmp_path):
    before = os.umask(umask)
    try:
        files.write(tmp_path / "a", "é\n")
    finally:
        os.umask(before)
    assert (tmp_path / "a").read_bytes() == "é\n".encode()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~umask
    assert names(tmp_path) == ["a"]


def test_an_error_leaves_the_old_text_and_nothing_else(tmp_path):
    files.write(tmp_path / "a", "old")
    with pytest.raises(UnicodeEncodeError):
        files.write(tmp_path / "a", "\ud800")
    with pytest.raises(KeyboardInterrupt), files.replacing(tmp_path / "a") as file:
        file.write("half")
        raise KeyboardInterrupt
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_several_writers_leave_the_text_of_one(tmp_path):
    def write(who: int) -> None:
        for count in range(50):
            files.write(tmp_path / "a", f"{who} {count}\n" * 50)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert len(set((tmp_path / "a").read_text().splitlines())) == 1
    assert names(tmp_path) == ["a"]


def test_folders(tmp_path):
    files.make_folder(tmp_path / "a" / "b" / "c")
    files.make_folder(tmp_path / "a" / "b" / "c")
    files.make_folder(tmp_path / "a" / "d" / "e", must_be_new=True)
    with pytest.raises(FileExistsError):
        files.make_folder(tmp_path / "a" / "d" / "e", must_be_new=True)
    assert (tmp_path / "a" / "b" / "c").is_dir()
    files.write(tmp_path / "file", "")
    with pytest.raises(NotADirectoryError):
        files.make_folder(tmp_path / "file" / "sub" / "sub")


def test_a_new_folder_is_there_whole_or_not_at_all(tmp_path):
    with files.new_folder(tmp_path / "a", 0o700) as folder:
        (folder / "file").write_text("whole")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    for path, error in ((tmp_path / "b", KeyboardInterrupt), (tmp_path / "a", OSError)):
        with pytest.raises(error), files.new_folder(path) as folder:
            (folder / "file").write_text("other")
            if error is KeyboardInterrupt:
                raise error
    assert (tmp_path / "a" / "file").read_text() == "whole"
    assert names(tmp_path) == ["a"]


def test_of_private_files_created_at_once_one_stays(tmp_path):
    def created(number: int) -> bytes:
        files.create_private(tmp_path / "a", bytes([number]))
        return (tmp_path / "a").read_bytes()

    before = os.umask(0)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(created, range(8)))
    finally:
        os.umask(before)
    assert len(set(found)) == 1
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["a"]


def test_sweep_removes_temporary_files_alone(tmp_path):
    files.temporary(tmp_path / "a").write_text("half")
    files.temporary(tmp_path / ".hidden").mkdir()
    for theirs in (".a.tmp", "a.1-0123456789abcdef.tmp", ".lock"):
        (tmp_path / theirs).write_text("")
    files.sweep(tmp_path, "a")
    assert len(names(tmp_path)) == 4
    files.sweep(tmp_path)
    assert names(tmp_path) == [".a.tmp", ".lock", "a.1-0123456789abcdef.tmp"]


# Forks, for every k, a writer that is killed before its k-th operation on files; prints what a reader then finds.
KILLED = """
import os, signal, sys
from pathlib import Path
from hvdtrain import files
EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir"}
folder, k, left = Path("a/b"), 0, True

def killed(k):
    child = os.fork()
    if child == 0:
        counted, fsync = [], os.fsync
        def count(event, *_):
            counted.append(event)
            if len(counted) == k:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(lambda event, _: count(event) if event in EVENTS else None)
        os.fsync = lambda descriptor: (count("fsync"), fsync(descriptor))
        files.make_folder(folder)
        files.write(folder / "file", f"new {k}")
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

while left:
    k += 1
    left = killed(k)
    text = (folder / "file").read_text() if (folder / "file").exists() else None
    assert text in (None, f"new {k}"), text
    print(int(text is not None))
    if folder.is_dir():
        files.sweep(folder)
        assert [path.name for path in folder.iterdir()] == ["file"] * (text is not None)
    os.system("rm -r a 2> /dev/null")
"""


def test_sigkill_before_any_operation_leaves_the_file_or_none(python):
    done = python("-c", KILLED)
    assert done.returncode == 0, done.stderr
    seen = list(map(int, done.stdout.split()))
    assert seen == sorted(seen)
    assert seen.count(0) >= 9  # 2 folders, their fsyncs, the file's open and fsync, its rename
    assert seen.count(1) >= 3  # the folder's open and fsync, and the last, which lives


def test_a_full_disk_leaves_the_old_text(tiny_disk):
    files.write(tiny_disk / "a", "old")
    written = 0
    for free in range(0, 10 * 4096, 4096):
        room = os.statvfs(tiny_disk).f_bavail * 4096
        (tiny_disk / "filler").write_bytes(bytes(room - free))
        try:
            files.write(tiny_disk / "a", "new" * 7000)
        except OSError as error:
            assert error.strerror == "No space left on device"
            assert (tiny_disk / "a").read_text() == "old"
        else:
            written += 1
            files.write(tiny_disk / "a", "old")
        assert names(tiny_disk) == ["a", "filler"]
        (tiny_disk / "filler").unlink()
    assert 0 < written < 10


def test_pipes_devices_and_large_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10 << 30)
    for name, why in (
        ("pipe", "not a regular file"),
        ("endless", "not a regular file"),
        ("large", "at most 1,048,576"),
    ):
        with pytest.raises(ValueError, match=why):
            files.read_json(tmp_path / name)


def test_fuzzed_json_is_refused_or_small():
    good = {"a": {"b": {"c": [1, 2.5, "x"]}}, "d": None}
    for text in odd_json.texts(good):
        try:
            value = files.parse_json(text)
        except ValueError:
            continue
        assert len(json.dumps(value, indent=1)) <= 50 * len(text), text[:80]


def test_a_text_written_before_exit_is_visible_before_it_is_synced(tmp_path, monkeypatch):
    """A launcher kills a rank of a lost run while a busy disk syncs."""
    seen = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append((tmp_path / "status").read_text()))
    (tmp_path / "status").write_text("old")
    files.write_before_exit(tmp_path / "status", "new")
    assert seen == ["new", "new"]
    assert [path.name for path in tmp_path.iterdir()] == ["status"]
    with pytest.raises(OSError, match="No such file"):
        files.write_before_exit(tmp_path / "none" / "status", "new")
