"""Checkpoints: what goes in comes out, whatever kills the writer or damages the files."""

import contextlib
import importlib
import itertools
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import odd_json
import pytest
from hostile_folders import checksum
from refusals import refusal
from users import NOBODY, needs_root

from hvdtrain import files
from hvdtrain.core.progress import Progress
from hvdtrain.errors import CheckpointError, OutputError
from hvdtrain.record import checkpoint, tensor_file
from hvdtrain.record.checkpoint import (
    ARRAYS,
    CHECKSUM,
    META,
    Checkpoint,
    best_of,
    commit,
    committed,
    newest,
    read,
    recover,
)
from hvdtrain.record.schema import as_checkpoint_error, check_resumable
from hvdtrain.tools.convert import converted

FUZZED = int(os.environ.get("FUZZ_COUNT", "300"))  # each a folder with files


def made(step: int, **metadata) -> Checkpoint:
    """A checkpoint whose array and meta both hold the step."""
    return Checkpoint({"x": np.full(50, step)}, {"step": step, "model": "m", **metadata})


def recovered(folder: Path):
    return recover(folder, lambda _: None)


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


def flip(name: str, index: int):
    def damage(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[index] ^= 1
        (path / name).write_bytes(content)

    return damage


def truncate(name: str, size: int):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:size])


def change_step(path: Path) -> None:
    meta = (path / META).read_text()
    (path / META).write_text(meta.replace('"step": 20', '"step": 21'))


DAMAGES = {
    "a bit of an array": (flip(ARRAYS, -1), "its checksum differs."),
    "a number in the meta": (change_step, "it is of step 21."),
    "truncated arrays": (truncate(ARRAYS, 100), "its checksum differs."),
    "no arrays": (lambda path: (path / ARRAYS).unlink(), "state.safetensors: No such file or directory."),
    "no meta": (lambda path: (path / META).unlink(), "meta.json: No such file or directory."),
    "empty meta": (truncate(META, 0), "Expecting value: line 1 column 1 (char 0)."),
    "meta that is a number": (lambda path: (path / META).write_text("3"), "meta.json is not as it was written."),
    "meta without checksum": (lambda path: (path / META).write_text('{\n "step": 20\n}'), "its checksum differs."),
    "meta of bytes": (
        lambda path: (path / META).write_bytes(b"\xff"),
        "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte.",
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


def test_every_flipped_bit_is_found(tmp_path):
    path = commit(tmp_path, made(20, loss=1e-5, valid_score=0.1, list=[1, {"a": "é"}]), keep=2)
    sizes = {name: (path / name).stat().st_size for name in (ARRAYS, META)}
    draw = random.Random(odd_json.SEED)
    for _ in range(200):
        for name, size in sizes.items():
            index, bit = draw.randrange(size), 1 << draw.randrange(8)
            with (path / name).open("r+b") as file:
                byte = file.read(index + 1)[index]
                for now in (byte ^ bit, byte):
                    file.seek(index)
                    file.write(bytes([now]))
                    file.flush()
                    if now != byte:
                        with pytest.raises(CheckpointError, match=r"^checkpoint .* is damaged: "):
                            read(path)
    assert read(path).meta["step"] == 20


def test_scores_of_another_metric_than_the_newest_ones_do_not_count(tmp_path):
    for step, best, score in ((1, "", 9.0), (2, "highest f1", 0.4), (3, "highest f1", 0.3), (4, "lowest mae", None)):
        commit(tmp_path, made(step, best=best, valid_score=score), keep=6)
    paths = committed(tmp_path)
    assert [best_of(paths[:count]) for count in (1, 2, 3, 4)] == [paths[0], paths[1], paths[1], paths[1]]
    assert best_of(paths[3:]) is best_of([]) is None


def test_damaged_ones_are_set_aside_and_never_count(tmp_path):
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, 0.4), (6, 0.5)):
        commit(tmp_path, made(step, valid_score=score), keep=6)
    for step in (2, 3, 5, 6):  # the best among them
        truncate(ARRAYS, 100)(tmp_path / f"step-{step:08d}")
    assert newest(tmp_path / "missing") == (None, [])
    found, damaged = recovered(tmp_path)
    assert found.meta["step"] == 4
    assert damaged == [
        f"checkpoint {tmp_path}/step-0000000{step} is damaged: its checksum differs. "
        f"It is kept as damaged-step-0000000{step} and not used."
        for step in (6, 5, 3, 2)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("damaged-step-00000005", "damaged-step-00000006", "step-00000001", "step-00000004")
    ]
    commit(tmp_path, made(5), keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert recovered(tmp_path)[1] == []


def test_a_resume_reads_the_arrays_once(tmp_path):
    large = {"model.x": np.zeros(1 << 20)}
    for step in (1, 2, 3):
        commit(tmp_path, Checkpoint(large, made(step).meta), keep=3)
    before = bytes_read()
    assert recovered(tmp_path)[0].arrays["model.x"].nbytes == 8 << 20
    assert bytes_read() - before < 9 << 20


def bytes_read() -> int:
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_a_replaced_one_outlives_a_damaged_one_of_its_step(tmp_path):
    """As where a kill came between the two renames of a second commit, and a bit flipped since."""
    shutil.copytree(commit(tmp_path, made(10), keep=1), tmp_path / "step-00000010.old")
    truncate(ARRAYS, 100)(tmp_path / "step-00000010")
    found, damaged = recovered(tmp_path)
    assert found.meta["step"] == 10
    assert damaged == [
        f"checkpoint {tmp_path}/step-00000010 is damaged: its checksum differs. It is kept as damaged-step-00000010 "
        "and not used."
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-00000010", "step-00000010"]


def test_a_link_in_a_checkpoints_place_stops_no_commit(tmp_path):
    (tmp_path / "step-00000010").symlink_to("nowhere")
    commit(tmp_path, made(10), keep=1)
    assert newest(tmp_path)[0].meta["step"] == 10


def test_checkpoints_are_never_another_folders(tmp_path):
    """Whoever may put a link there would choose what is removed."""
    folder, link = tmp_path / "precious", tmp_path / "checkpoints"
    path = commit(folder, made(1), keep=1)
    link.symlink_to(folder)
    with pytest.raises(OutputError, match="checkpoints is a link"):
        commit(link, made(2), keep=1)
    assert committed(link) == []
    assert newest(link) == (None, [])
    own = tmp_path / "own"
    own.mkdir()
    (own / path.name).symlink_to(path)
    assert committed(own) == []
    for name in (META, ARRAYS):
        copy = shutil.copytree(path, own / "step-00000001.old", dirs_exist_ok=True)
        (copy / name).unlink()
        (copy / name).symlink_to(path / name)
        assert newest(own)[1] == [f"checkpoint {copy} is damaged: it is a link, which is not followed."]
        (copy / name).unlink()


def test_one_larger_than_the_memory_is_not_read(tmp_path):
    path = commit(tmp_path, made(1), keep=1)
    with (path / ARRAYS).open("r+b") as file:
        file.truncate(1 << 43)  # of holes
    assert newest(tmp_path)[1] == [f"checkpoint {path} is damaged: {ARRAYS} is larger than this host's memory."]


def sparse(path, size):
    """The checkpoint, its arrays' file of holes; its header says so, or, with size 0, the file is larger than that."""
    content = (path / ARRAYS).read_bytes()
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (path / ARRAYS).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header if size else content)
        file.truncate((8 + len(header) + size) if size else 1 << 32)
    assert (path / ARRAYS).stat().st_blocks * 512 < 1 << 20


@needs_root
def test_what_another_user_never_wrote_is_not_read(tmp_path, monkeypatch):
    """Files of some GiB that take no disk: each took seconds and the memory, and their number was unbounded."""
    for step in range(1, 7):
        sparse(commit(tmp_path, made(step), keep=9), 1 << 32 if step > 3 else 0)
    monkeypatch.setattr(tensor_file, "read", pytest.fail)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    stopped = refusal(CheckpointError, newest, tmp_path)
    assert stopped.startswith(f"checkpoint {tmp_path}/step-00000004 is damaged: {ARRAYS} of 4,294,967,3")
    assert stopped.endswith(
        " is another user's and all but 4,096 holes. No more than 3 damaged ones of another user's run are tried; give "
        "another run."
    )
    os.chown(tmp_path, 0, 0)
    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / f"step-{step:08d}")
    assert len(newest(tmp_path)[1]) == 3


def test_of_two_writers_one_is_refused(tmp_path, monkeypatch):
    remove = files.remove

    def other(path: Path) -> None:
        monkeypatch.setattr(files, "remove", remove)
        commit(tmp_path, made(2), keep=1)

    monkeypatch.setattr(files, "remove", other)
    with pytest.raises(OutputError, match=r"another run has removed .*step-00000001: two write to one folder; give ea"):
        commit(tmp_path, made(1), keep=1)
    assert names(tmp_path) == ["step-00000002"]


def test_what_fits_nothing_is_refused_by_name():
    message = r"^the checkpoint of step 3 cannot be resumed from: KeyError: 'groups'; remove it, or give another"
    with pytest.raises(CheckpointError, match=message), as_checkpoint_error(3):
        {}["groups"]


def test_numbers_of_a_kind_that_numpy_has_not_are_damage(tmp_path):
    with contextlib.suppress(ImportError):
        importlib.import_module("ml_dtypes")  # as TensorFlow does: NumPy then has some of them
    path = commit(tmp_path, made(1), keep=1)
    for kind in ("BF16", "F8_E4M3", "F4"):
        size = {"BF16": 2, "F8_E4M3": 1, "F4": 1}[kind]
        header = json.dumps({"x": {"dtype": kind, "shape": [2], "data_offsets": [0, 2 * size]}}).encode()
        (path / ARRAYS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(2 * size))
        meta = {key: value for key, value in checkpoint.metadata(path).items() if key != CHECKSUM}
        meta[CHECKSUM] = checksum(path, meta)
        (path / META).write_text(checkpoint._text(meta))
        assert newest(tmp_path)[0] is None


def test_one_of_a_later_step_makes_no_new_one_go(tmp_path):
    """A disk may damage the newest after the run has taken it up, and another run may write here without a lock."""
    commit(tmp_path, made(120, valid_score=0.9), keep=1)
    for step, stay in ((50, [50]), (60, [60]), (70, [70]), (130, [120, 130])):
        commit(tmp_path, made(step), keep=1)
        later = [120] if step < 120 else []
        assert names(tmp_path) == [f"step-{step:08d}" for step in stay + later]


def test_one_that_cannot_be_read_now_is_left_where_it_is(tmp_path, monkeypatch):
    """It may be whole: another error than a missing file."""
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    for step in (1, 2):
        path = commit(Path("c"), made(step), keep=2)
    (path / META).chmod(0)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may read anything
    try:
        with pytest.raises(
            CheckpointError, match=r"step-00000002 cannot be read: meta.json: Permission denied; try ag"
        ):
            recovered(Path("c"))
    finally:
        os.seteuid(user)
    assert names(Path("c")) == ["step-00000001", "step-00000002"]
    Path("c").chmod(0o444)  # names may be listed, and nothing looked at
    os.seteuid(user or 65534)
    try:
        with pytest.raises(CheckpointError, match="the checkpoints in c cannot be read: Permission denied; try again"):
            names(Path("c"))
    finally:
        os.seteuid(user)
        Path("c").chmod(0o755)


def test_what_is_no_file_is_damage_and_not_waited_for(tmp_path):
    path = commit(tmp_path, made(1), keep=1)
    for name in (ARRAYS, META):
        (path / name).rename(tmp_path / "aside")
        os.mkfifo(path / name)
        assert newest(tmp_path)[1] == [f"checkpoint {path} is damaged: it is not a regular file."]
        (path / name).unlink()
        (tmp_path / "aside").rename(path / name)
    assert newest(tmp_path)[1] == []


def test_names_that_only_look_like_checkpoints(tmp_path):
    commit(tmp_path, made(1), keep=1)
    for name in ("step-00000002-backup", "step-", "step-9", "step-٠٠٠٠٠٠٠٩", "step-" + "9" * 30, "damaged-step-mine"):
        (tmp_path / name).mkdir()
    assert names(tmp_path) == ["step-00000001"]
    assert recovered(tmp_path)[0].meta["step"] == 1
    commit(tmp_path, made(2), keep=1)
    assert len(list(tmp_path.iterdir())) == 7


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_both_files_have_the_users_permissions(umask, tmp_path):
    before = os.umask(umask)
    try:
        path = commit(tmp_path, made(1), keep=1)
    finally:
        os.umask(before)
    assert {(path / name).stat().st_mode & 0o777 for name in (ARRAYS, META)} == {0o666 & ~umask}


READ = """
import sys
from pathlib import Path
from hvdtrain.record.checkpoint import newest
reads, step = 0, 0
while reads < 300 or step < 12:  # a disk may be slow
    found, damaged = newest(Path(sys.argv[1]))
    assert found and not damaged, (found, damaged)
    assert (found.arrays["x"] == found.meta["step"]).all()
    reads, step = reads + 1, found.meta["step"]
print("whole")
"""


def test_a_reader_beside_the_run_sees_a_whole_one(tmp_path):
    """keep=1: what a reader has just found is removed, or replaced, while it reads."""
    commit(tmp_path, made(0), keep=1)
    reader = subprocess.Popen([sys.executable, "-c", READ, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    for step in itertools.count():
        commit(tmp_path, made(step // 2), keep=1)
        if reader.poll() is not None:
            break
    assert reader.stdout.read() == "whole\n"
    assert step > 20


@pytest.mark.parametrize("step", [1, 2], ids=["the same step", "the next step"])
def test_a_commit_between_a_readers_listing_and_its_look_hides_none(step, tmp_path, monkeypatch):
    commit(tmp_path, made(1), keep=1)
    is_dir = Path.is_dir

    def look(path: Path) -> bool:
        if path.name == "step-00000001":
            monkeypatch.setattr(Path, "is_dir", is_dir)
            path.rename(tmp_path / "step-00000001.old")
            commit(tmp_path, made(step), keep=1)
            return False
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", look)
    found, damaged = newest(tmp_path)
    assert found.meta["step"] == step
    assert damaged == []


META_OF_A_RUN = {
    "step": 1,
    "epoch": 0,
    "sample": 64,
    "plateau": {"best": None, "waited": 0, "drops": 1},
    "patience": {"metric": "lowest valid_loss", "best": 0.5, "epoch": 1, "waited": 2, "is_over": False},
    "train": {"loss": 1.5, "count": 64.0, "metrics": {"acc1": [3.0, 64.0]}},
    "ended": "the loss is no better",
    "framework": "torch",
    "model": "linear",
    "recipe": "linear",
    "ranks": 2,
    "scaler": {
        **{"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5},
        **{"growth_interval": 2000, "_growth_tracker": 1},
    },
    **{"optimizer": {}, "data": {}, "samples": {}, "code": {}, "valid_score": 0.5},
}


def seal(path: Path, text: str) -> None:
    """Puts the text into the checkpoint's meta as a forger does, who knows the checksum."""
    try:
        meta = json.loads(text)
        meta[CHECKSUM] = checksum(path, meta)
        text = checkpoint._text(meta)
    except (ValueError, RecursionError, TypeError, AttributeError):
        pass
    (path / META).write_bytes(text.encode("utf-8", "surrogatepass"))


def test_fuzzed_metadata_are_damage_or_can_be_worked_with(tmp_path, make_plan):
    plan, read_well = make_plan(), 0
    for count, text in enumerate(odd_json.texts(META_OF_A_RUN, FUZZED)):
        folder = tmp_path / str(count)
        (folder / "step-00000001").mkdir(parents=True)
        (folder / "step-00000001" / ARRAYS).write_bytes(EMPTY)
        seal(folder / "step-00000001", text)
        with contextlib.suppress(CheckpointError):
            found, _ = recover(folder, lambda found: check_resumable(found.meta))
            if found:
                read_well += 1
                progress = Progress.from_metadata(dict(found.meta))
                assert 0 <= progress.lr(plan) < 1
                assert progress.is_done(plan) in (True, False)
                assert progress.next_epoch(plan, {"valid_loss": 1.0}).epoch == found.meta["epoch"] + 1
                (progress.train + progress.train).over_ranks(lambda array: array)
                commit(folder, made(2), keep=1)
    assert 0 < read_well < count / 2


EMPTY = b"\x08\0\0\0\0\0\0\0{}      "
TENSOR = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
HEADER = {"model.fc.weight": TENSOR, "model.fc.bias": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]}}
LENGTHS = [0, 1, 7, 2**31, 2**63, 2**64 - 1, 100_000_000, 99_999_999]


def test_fuzzed_arrays_are_damage_or_can_be_worked_with(tmp_path):
    draw, path, read_well = random.Random(odd_json.SEED), tmp_path / "step-00000001", 0
    path.mkdir()
    for text in odd_json.texts(HEADER, FUZZED):
        header = text.encode("utf-8", "surrogatepass")
        if draw.random() < 0.3:
            swapped = draw.choice([b"F32", b"BF16", b"F8_E4M3", b"U64", b"C64", b"BOOL", b"F4", b"x"])
            header = header.replace(b"F32", swapped).replace(
                b"[2, 3]", draw.choice([b"[6]", b"[0, 99999999999]", b"[]"])
            )
        length = draw.choice(LENGTHS) if draw.random() < 0.1 else len(header)
        (path / ARRAYS).write_bytes(length.to_bytes(8, "little") + header + bytes(32))
        seal(path, json.dumps(META_OF_A_RUN))
        with contextlib.suppress(CheckpointError):
            found = read(path)
            read_well += 1
            found.array("model.fc.weight", (2, 3))
            for to in ("torch", "tensorflow"):
                with contextlib.suppress(CheckpointError):
                    converted(found, to)
    assert read_well


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


def test_a_forged_pickle_is_never_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = commit(tmp_path / "c", made(1), keep=1)
    (path / ARRAYS).write_bytes(pickle.dumps(Bomb()))
    meta = {"step": 1, "model": "m"}
    meta[CHECKSUM] = checksum(path, meta)  # the forger knows how to seal it
    (path / META).write_text(checkpoint._text(meta))
    with pytest.raises(CheckpointError, match=r"^checkpoint .*step-00000001 is damaged: .*header.*\.$"):
        read(path)
    assert not Path("exploded").exists()


# Forks `rounds` writers, each killed at a random moment, and looks at what each has left as the next run does. Every
# second one commits beside its loop, the others in it.
WRITERS = """
import json, os, random, signal, sys, time
from pathlib import Path
import numpy as np
from hvdtrain import files
from hvdtrain.record import tensor_file
from hvdtrain.record.checkpoint import Checkpoint, commit, newest, recover
from hvdtrain.record.folder import RunFolder
from hvdtrain.record.writer import Writer
tensor_file.BLOCK = 1 << 16  # several of a file pass by the page cache
rounds, seed = map(int, sys.argv[1:])
draw, folder, status, step = random.Random(seed), Path("checkpoints"), Path("status.json"), 0
stated = 0

def write(step, pipe):
    while True:
        step += draw.random() < 0.7  # now and then a step a second time
        arrays = {"x": np.full(50_000, step), "y": np.array(step)}
        commit(folder, Checkpoint(arrays, {"step": step, "valid_score": -step % 7}), draw.choice([1, 2, 3]))
        os.write(pipe, b"%d\\n" % step)
        files.write(status, json.dumps({"step": step}))
        os.write(pipe, b"-%d\\n" % step)

class Live:
    def __init__(self):
        self.arrays = {"x": np.zeros(50_000, int), "y": np.array(0)}
        self.held = {name: array.copy() for name, array in self.arrays.items()}
    def train(self, step):
        for array in self.arrays.values():
            array[...] = step
    def snapshot(self):
        for name, array in self.arrays.items():
            np.copyto(self.held[name], array)
        return self.held

def write_beside(step, pipe):
    live, writer = Live(), Writer(RunFolder(Path("."), None), draw.choice([1, 2, 3]))
    while True:
        step += draw.random() < 0.7
        live.train(step)
        writer.write(live, {"step": step, "valid_score": -step % 7})
        live.train(-1)
        time.sleep(draw.random() * 0.002)
        writer.wait()
        os.write(pipe, b"%d\\n-%d\\n" % (step, step))

for round in range(rounds):
    ours, theirs = os.pipe()
    draw.seed(f"{seed} {round}")
    writer = os.fork()
    if writer == 0:
        (write, write_beside)[round % 2](step, theirs)
    os.close(theirs)
    reported = os.fdopen(ours)
    first = reported.readline()
    time.sleep(draw.random() * draw.choice([0.002, 0.02]))
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    done = [int(first), *map(int, reported)]
    last, stated = max(done), max(stated, -min(done))
    for look in (newest, lambda folder: recover(folder, lambda found: None)):
        found, damaged = look(folder)
        assert damaged == [] and found.meta["step"] in (last, last + 1), (last, found, damaged)
        assert (found.arrays["x"] == found.meta["step"]).all() and found.arrays["y"] == found.meta["step"]
    assert all(path.name.startswith("step-") for path in folder.iterdir())
    assert not status.exists() or stated <= json.loads(status.read_text())["step"] <= found.meta["step"]
    step = found.meta["step"]
print(step)
"""


def test_sigkill_at_any_moment_leaves_a_whole_checkpoint(python):
    done = python("-c", WRITERS, os.environ.get("KILLS", "40"), str(odd_json.SEED))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


# Commits each `step` over a copy of a folder that holds steps 1 (the best), 2 and 3, killed before its k-th operation
# on files, for every k; prints for each the step and the steps found whole.
KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
import numpy as np
from hvdtrain.record.checkpoint import Checkpoint, commit, committed, newest, read, recover
EVENTS = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir"}

def save(folder, step, score):
    commit(folder, Checkpoint({"x": np.full(9, step)}, {"step": step, "valid_score": score}), 2)

def killed(folder, step, k):
    child = os.fork()
    if child == 0:
        counted = []
        def hook(event, arguments):
            if event in EVENTS:
                count(event)
        def count(event):
            counted.append(event)
            if len(counted) == k:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        fsync = os.fsync
        os.fsync = lambda descriptor: (count("fsync"), fsync(descriptor))
        save(folder, step, 0.5)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

for before, score in [(1, 0.9), (2, 0.1), (3, 0.2)]:
    save(Path("template"), before, score)
for step in map(int, sys.argv[1:]):
    k, left = 0, True
    while left:
        k += 1
        copy = Path(f"copy-{step}-{k}")
        shutil.copytree("template", copy)
        left = killed(copy, step, k)
        whole = [read(path) for path in committed(copy)]
        assert all((found.arrays["x"] == found.meta["step"]).all() for found in whole)
        assert newest(copy)[0].meta == whole[-1].meta
        assert recover(copy, lambda found: None)[0].meta == whole[-1].meta
        assert all(path.name.startswith("step-") for path in copy.iterdir())
        print([step, [found.meta["step"] for found in whole]])
"""
OUTCOMES = [  # of a new step, and of a step a second time
    *([4, [1, 2, 3]], [4, [1, 2, 3, 4]], [4, [1, 3, 4]]),
    *([3, [1, 2, 3]], [3, [1, 2, 3, 3]], [3, [1, 2, 3]]),
]


def test_sigkill_before_any_operation_on_files_leaves_only_whole_checkpoints(python):
    done = python("-c", KILLED, "4", "3")
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert [key for key, _ in itertools.groupby(seen)] == OUTCOMES
    assert len(seen) > 40


def test_a_disk_that_fills_at_any_byte_spares_the_checkpoints_before(tiny_disk, monkeypatch):
    monkeypatch.setattr(tensor_file, "BLOCK", 1 << 14)
    folder = tiny_disk / "checkpoints"
    written = 0
    commit(folder, made(1), keep=1)
    for free in range(0, 60 * 4096, 4096):
        room = os.statvfs(tiny_disk).f_bavail * 4096
        (tiny_disk / "filler").write_bytes(bytes(room - free))
        try:
            commit(folder, Checkpoint({"x": np.zeros(20_000)}, {"step": 2}), keep=2)
        except OutputError as error:
            assert str(error).startswith(f"checkpoint {folder}/step-00000002 could not be written: ")
            assert "No space left on device; free space or give another --output. The checkpoints before" in str(error)
            assert [path.name for path in folder.iterdir()] == ["step-00000001"]
        else:
            written += 1
            read(folder / "step-00000002")
            shutil.rmtree(folder / "step-00000002")
        assert newest(folder)[0].meta["step"] == 1
        (tiny_disk / "filler").unlink()
    assert 0 < written < 40
    commit(folder, made(3), keep=2)
    assert newest(folder)[0].meta["step"] == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_without_a_value_is_resumed_from(tmp_path, value):
    totals = {"loss": 1.0, "count": 4.0, "metrics": {"dice": [value, 4.0]}}
    meta = {**META_OF_A_RUN, "train": totals, "optimizer": {"x.w": value}}
    commit(tmp_path, Checkpoint({"x": np.zeros(3)}, meta), 1)
    (found, _) = newest(tmp_path)
    check_resumable(found.meta)
    assert str(found.meta["train"]["metrics"]) == str(totals["metrics"])


def test_what_is_written_is_held_to_what_is_read(tmp_path):
    large = made(2, text="x" * (3 << 19))  # 1.5 MiB, which was once too much to read
    commit(tmp_path, large, 2)
    assert newest(tmp_path)[0].meta["text"] == large.meta["text"]
    deep = []
    for _ in range(30):
        deep = [deep]
    for beyond in ({"text": "x" * checkpoint.META_LIMIT}, {"deep": deep}):
        with pytest.raises(
            OutputError, match=r"could not be written: it (must have at most 16,777,216 bytes|is nested too deeply)"
        ):
            commit(tmp_path, made(3, **beyond), 2)
        assert names(tmp_path) == ["step-00000002"]
