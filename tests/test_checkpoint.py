"""Checkpoints: what goes in comes out, whatever kills the writer or damages the files."""

import errno
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvdtrain import checkpoint
from hvdtrain.checkpoint import ARRAYS, META, Checkpoint, commit, committed, newest, read, take_up
from hvdtrain.errors import CheckpointError, OutputError


def made(step: int, **facts) -> Checkpoint:
    """A checkpoint whose array and meta both tell the step."""
    return Checkpoint({"x": np.full(50, step)}, {"step": step, "model": "m", **facts})


def taken_up(folder: Path):
    return take_up(folder, lambda _: None)


def names(folder: Path) -> list[str]:
    return [path.name for path in committed(folder)]


def test_every_dtype_and_shape_comes_back(tmp_path):
    dtypes = "float64 float32 float16 int64 int32 int16 int8 uint8 bool"
    arrays = {dtype: np.arange(6).reshape(2, 3).astype(dtype) for dtype in dtypes.split()}
    arrays |= {"0-d": np.array(3.25), "0-d integer": np.array(2**62), "empty": np.zeros((0, 4), np.float32)}
    arrays |= {"not contiguous": np.arange(6.0).reshape(2, 3).T, "NaN": np.array([np.nan, -0.0, np.inf])}
    meta = {"step": 7, "model": "m", "loss": 1 / 3, "best": None, "list": [1, {"a": True}], "text": "é"}
    path = commit(tmp_path / "checkpoints", Checkpoint(arrays, meta), keep=1)
    back, damaged = newest(tmp_path / "checkpoints")
    assert path.name == "step-00000007"
    assert damaged == []
    assert {key: back.meta[key] for key in meta} == meta
    assert set(back.arrays) == set(arrays)
    for name, array in arrays.items():
        assert (back.arrays[name].dtype, back.arrays[name].shape) == (array.dtype, array.shape), name
        assert back.arrays[name].tobytes() == array.tobytes(), name


def test_nothing_is_newest_of_an_empty_or_missing_folder(tmp_path):
    assert newest(tmp_path) == newest(tmp_path / "missing") == (None, [])


KEPT = {  # keep, validation scores in order of commits: steps that stay
    "the newest": (2, [None, None, None, None], [3, 4]),
    "one": (1, [None, None, None], [3]),
    "the best too": (2, [0.1, 0.9, 0.3, 0.4, 0.5], [2, 4, 5]),
    "the best is among the newest": (2, [0.1, 0.2, 0.3, 0.4], [3, 4]),
    "the newest of equals": (1, [0.5, 0.5, 0.5, 0.1], [3, 4]),
    "negative losses": (1, [-0.1, -0.01, -0.5], [2, 3]),
    "validated now and then": (1, [None, 0.7, None, 0.6, None], [2, 5]),
    "diverged": (1, [0.1, float("nan"), 0.05], [1, 3]),
}


@pytest.mark.parametrize(("keep", "scores", "stay"), KEPT.values(), ids=KEPT)
def test_kept(keep, scores, stay, tmp_path):
    for step, score in enumerate(scores, 1):
        commit(tmp_path, made(step, valid_score=score), keep)
    assert names(tmp_path) == [f"step-{step:08d}" for step in stay]
    assert sorted(path.name for path in tmp_path.iterdir()) == names(tmp_path)


def test_steps_of_any_length_stay_in_order(tmp_path):
    for step in (9, 99_999_999, 100_000_000, 1_000_000_000):
        commit(tmp_path, made(step), keep=2)
    assert newest(tmp_path)[0].meta["step"] == 1_000_000_000
    assert names(tmp_path) == ["step-100000000", "step-1000000000"]


def test_a_step_committed_again_replaces_the_first(tmp_path):
    commit(tmp_path, made(5, run="first"), keep=1)
    commit(tmp_path, made(5, run="second"), keep=1)
    assert newest(tmp_path)[0].meta["run"] == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_what_a_killed_run_left_is_swept_away(tmp_path):
    for left in (".step-00000001.tmp", ".step-00000002.old"):
        (tmp_path / left).mkdir()
        (tmp_path / left / ARRAYS).write_bytes(b"half")
    assert newest(tmp_path) == (None, [])
    commit(tmp_path, made(3), keep=1)
    assert taken_up(tmp_path)[0].meta["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def flip(name: str, place: int):
    def damage(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[place] ^= 1
        (path / name).write_bytes(content)

    return damage


def truncate(name: str, size: int):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:size])


def change_step(path: Path) -> None:
    meta = (path / META).read_text()
    (path / META).write_text(meta.replace('"step": 20', '"step": 21'))


DAMAGES = {
    "a bit of an array": (flip(ARRAYS, -1), "its checksum differs."),
    "a bit of the header": (flip(ARRAYS, 12), "its checksum differs."),
    "a number in the meta": (change_step, "it is of step 21."),
    "truncated arrays": (truncate(ARRAYS, 100), "its checksum differs."),
    "empty arrays": (truncate(ARRAYS, 0), "its checksum differs."),
    "no arrays": (lambda path: (path / ARRAYS).unlink(), "state.safetensors: No such file or directory."),
    "no meta": (lambda path: (path / META).unlink(), "meta.json: No such file or directory."),
    "empty meta": (truncate(META, 0), "Expecting value: line 1 column 1 (char 0)."),
    "meta that is a number": (lambda path: (path / META).write_text("3"), "meta.json is not as it was written."),
    "meta without checksum": (lambda path: (path / META).write_text('{\n "step": 20\n}'), "its checksum differs."),
    "meta of bytes": (
        lambda path: (path / META).write_bytes(b"\xff"),
        "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte.",
    ),
    "a folder without files": (
        lambda path: [file.unlink() for file in path.iterdir()],
        "meta.json: No such file or directory.",
    ),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_used(damage, reason, tmp_path):
    commit(tmp_path, made(10), keep=2)
    path = commit(tmp_path, made(20), keep=2)
    damage(path)
    found, damaged = newest(tmp_path)
    assert found.meta["step"] == 10
    assert damaged == [f"checkpoint {path} is damaged: {reason}"]
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert str(caught.value) == damaged[0]


def test_all_damaged(tmp_path):
    for step in (1, 2):
        truncate(ARRAYS, 5)(commit(tmp_path, made(step), keep=2))
    found, damaged = newest(tmp_path)
    assert found is None
    assert damaged == [f"checkpoint {tmp_path}/step-0000000{n} is damaged: its checksum differs." for n in (2, 1)]


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


def test_a_forged_pickle_is_never_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = commit(tmp_path / "c", made(1), keep=1)
    (path / ARRAYS).write_bytes(pickle.dumps(Bomb()))
    meta = {"step": 1, "model": "m"}
    meta["sha256"] = checkpoint._digest(path / ARRAYS, meta)  # the forger knows how to seal it
    (path / META).write_text(checkpoint._text(meta))
    with pytest.raises(CheckpointError, match=r"^checkpoint .*step-00000001 is damaged: .*header.*\.$"):
        read(path)
    assert not Path("exploded").exists()


WRITER = """
import sys
from pathlib import Path
import numpy as np
from hvdtrain.checkpoint import Checkpoint, commit
step = int(sys.argv[2])
print("begun", flush=True)
while True:
    step += 1
    again = step - 1 if step % 3 == 0 else step  # now and then a step a second time
    arrays = {"x": np.full(200_000, again), "y": np.array(again)}
    commit(Path(sys.argv[1]), Checkpoint(arrays, {"step": again, "model": "m", "valid_score": -again % 7}), 2)
    print(again, flush=True)
"""


def test_sigkill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    moments = random.Random(0)
    last = 0
    for _ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(last)], stdout=subprocess.PIPE)
        told = [writer.stdout.readline() for _ in range(1 + moments.randint(1, 8))]
        # A random moment of the next commit, found by spinning: sleeping would favour what comes after a wait.
        for _ in range(moments.randint(0, 300_000)):
            pass
        writer.kill()
        told += writer.stdout.readlines()
        writer.wait()
        found, damaged = newest(tmp_path)
        assert damaged == []
        step = found.meta["step"]
        assert step >= max(int(line) for line in told[1:] if line.endswith(b"\n"))
        assert (found.arrays["x"] == step).all()
        assert found.arrays["y"] == step
        last = step
    assert last >= 12


# Commits `step` over a copy of a folder that holds steps 1 (the best), 2 and 3, killed before its k-th operation
# on files, for every k; prints the steps found whole after each.
KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
import numpy as np
from hvdtrain.checkpoint import Checkpoint, commit, committed, newest, read
step = int(sys.argv[1])
EVENTS = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir"}

def save(folder, step, score):
    commit(folder, Checkpoint({"x": np.full(9, step)}, {"step": step, "valid_score": score}), 2)

def killed(folder, k):
    child = os.fork()
    if child == 0:
        counted = []
        def hook(event, arguments):
            if event in EVENTS:
                counted.append(event)
                if len(counted) == k:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        save(folder, step, 0.5)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

for before, score in [(1, 0.9), (2, 0.1), (3, 0.2)]:
    save(Path("template"), before, score)
k, left = 0, True
while left:
    k += 1
    shutil.copytree("template", f"copy-{k}")
    left = killed(Path(f"copy-{k}"), k)
    whole = [read(path) for path in committed(Path(f"copy-{k}"))]
    assert all((found.arrays["x"] == found.meta["step"]).all() for found in whole)
    assert newest(Path(f"copy-{k}"))[0].meta == whole[-1].meta
    print([found.meta["step"] for found in whole])
"""


@pytest.mark.parametrize(
    ("step", "outcomes"),
    [(4, [[1, 2, 3], [1, 2, 3, 4], [1, 3, 4]]), (3, [[1, 2, 3], [1, 2, 3, 3], [1, 2, 3]])],
    ids=["a new step", "a step a second time"],
)
def test_sigkill_before_any_operation_on_files_leaves_only_whole_checkpoints(step, outcomes, python):
    done = python("-c", KILLED, str(step))
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert [key for key, _ in itertools.groupby(seen)] == outcomes
    assert len(seen) > 10


def test_a_full_disk_spares_the_checkpoints_before(tiny_disk):
    folder = tiny_disk / "checkpoints"
    commit(folder, made(1), keep=2)
    big = Checkpoint({"x": np.zeros(2**18)}, {"step": 2, "model": "m"})
    with pytest.raises(OutputError) as caught:
        commit(folder, big, keep=2)
    message = str(caught.value)
    assert message.startswith(f"checkpoint {folder}/step-00000002 could not be written: ")
    assert "No space left on device" in message
    assert message.endswith(
        "; free space or give another --output. "
        "The checkpoints before it are whole: the same command goes on from there."
    )
    assert "\n" not in message
    assert newest(folder)[0].meta["step"] == 1
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    commit(folder, made(3), keep=2)
    assert newest(folder)[0].meta["step"] == 3


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "checkpoints"
    with pytest.raises(OutputError) as caught:
        commit(folder, made(1), keep=1)
    assert str(caught.value) == (
        f"checkpoint {folder}/step-00000001 could not be written: checkpoints: {errno_text(errno.ENOTDIR)}; "
        "free space or give another --output. "
        "The checkpoints before it are whole: the same command goes on from there."
    )


def errno_text(number: int) -> str:
    return os.strerror(number)
