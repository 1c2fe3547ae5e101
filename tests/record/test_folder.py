"""Run folders: their names, which one is reopened, and the full text of every refusal."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os
import random
import re
import shutil
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import odd_json
import pytest
from refusals import refusal

from hvdtrain import files
from hvdtrain.core import recipe
from hvdtrain.core.metrics import Totals
from hvdtrain.core.progress import Progress
from hvdtrain.errors import CheckpointError, LoopError, OutputError
from hvdtrain.launch.topology import Topology
from hvdtrain.record import holder
from hvdtrain.record.checkpoint import ARRAYS, Checkpoint, commit
from hvdtrain.record.folder import _is_finished, _metadata, _reserve, hold, identity_of, model_identity, open_run
from hvdtrain.run.session import take_data

ALONE = Topology.alone("here")
IN_JOB = replace(ALONE, job_id="22")
MINE = Path("mine")


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def plan(make_plan):
    return make_plan()


def open_one(plan, topology=IN_JOB, framework="torch", output=None, resume="auto", contents=None):
    identity = identity_of(plan, framework, contents or {})
    folder, resumed = open_run(plan, topology, identity, output, resume)
    return SimpleNamespace(folder=folder, checkpoint=resumed.checkpoint, notes=resumed.notes)


def begin(plan, topology=IN_JOB, output=None, resume="auto"):
    begun = open_one(plan, topology, "torch", output, resume)
    begun.folder.lock.close()  # as when the process ended
    return begun


REST = {"scaler": {}, "optimizer": {}, "data": {}, "samples": {}, "code": {}}


def save(begun, plan, step: int, framework: str = "torch", keep: int = 2) -> None:
    """What rank 0 does at a checkpoint."""
    meta = {"model": model_identity(plan), "framework": framework, **REST, **Progress(step).metadata()}
    commit(begun.folder.checkpoints, Checkpoint({"x": np.arange(3)}, meta), keep)
    begun.folder.write_status("finished" if step >= plan.total_steps else "running", step=step)


def stopped_at(plan, step: int, topology=IN_JOB):
    begun = begin(plan, topology)
    save(begun, plan, step)
    return begun


def set_time(begun, seconds: int) -> None:
    os.utime(begun.folder.path, (seconds, seconds))


def test_an_ended_run_is_running_no_more(tmp_path):
    """A thread that writes a checkpoint may be late."""
    for state in ("finished", "stopped", "left", "failed"):
        folder = hold(tmp_path / state)
        folder.write_status("running", step=1)
        folder.write_status(state)
        folder.write_status("running", step=2)
        assert json.loads((folder.path / "status.json").read_text()).keys() == {"state", "time"}
        folder.write_status("failed", error="RecipeError: é")
        status = json.loads((folder.path / "status.json").read_text())
        assert (status["state"], status["error"]) == ("failed", "RecipeError: é")
        assert status["time"] > 1.7e9
        assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "checkpoints", "status.json"]
        folder.lock.close()


NAMES = {
    "shipped": ("linear", "linear"),
    "entry": ("cifar100:bs256-amp", "cifar100-bs256-amp"),
    "file": ("my.yaml", "my"),
    "file elsewhere, entry": ("/a b/my run.yml:x/y", "my-run-x-y"),
    "accents": ("été.yaml", "été"),
    "up and away": ("...yaml:../..", "--..-.."),
    "hidden": (".yaml:a", "-yaml-a"),
}


@pytest.mark.parametrize(("name", "folder"), NAMES.values(), ids=NAMES)
def test_folder_names(name, folder, make_plan):
    plan = make_plan()
    plan = replace(plan, recipe=plan.recipe.model_copy(update={"name": name}))
    assert begin(plan).folder.path == Path("runs") / folder / "22"


def test_without_a_job_the_folder_is_named_by_the_time(make_plan):
    name = begin(make_plan(), ALONE).folder.path.name
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", name)


def test_a_new_run_has_its_small_files(make_plan):
    plan = make_plan("linear", epochs=3)
    begun = begin(plan)
    path = begun.folder.path
    assert (begun.checkpoint, begun.notes) == (None, ())
    assert recipe.load(str(path / "recipe.yaml")).epochs == 3
    assert json.loads((path / "plan.json").read_text()) == {
        "framework": "torch",
        **json.loads(json.dumps(plan.to_json())),
    }
    status = json.loads((path / "status.json").read_text())
    assert (status["state"], status["step"]) == ("running", 0)
    assert sorted(file.name for file in path.iterdir()) == [
        ".lock",
        "checkpoints",
        "plan.json",
        "recipe.yaml",
        "status.json",
    ]


def test_the_same_command_continues(plan):
    first = stopped_at(plan, 40)
    first.folder.write_status("failed", error="the loss is nan")
    again = begin(plan, replace(ALONE, job_id="23"))
    assert again.folder.path == first.folder.path
    assert again.checkpoint.meta["step"] == 40
    assert again.notes == ("resuming from step 40 of runs/linear/22; another folder starts anew",)
    assert json.loads((again.folder.path / "status.json").read_text())["step"] == 40


def test_the_newest_of_several_is_resumed(plan):
    begun = [begin(plan, replace(ALONE, job_id=str(job))) for job in (1, 2, 3)]
    for age, (run, step) in enumerate(zip(begun, (10, 20, 30), strict=True)):
        save(run, plan, step)
        set_time(run, 2000 - 100 * age)
    assert begin(plan).checkpoint.meta["step"] == 10
    set_time(begun[1], 3000)
    set_time(begun[0], 1000)
    set_time(begun[2], 1000)
    assert begin(plan).checkpoint.meta["step"] == 20


LEFT = {
    "finished": lambda plan, make_plan: stopped_at(plan, plan.total_steps),
    "another LR": lambda plan, make_plan: stopped_at(make_plan("linear", base_lr=0.25), 40),
    "no checkpoint yet": lambda plan, make_plan: begin(plan),
}


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
def test_never_resumed(left, plan, make_plan):
    other = left(plan, make_plan)
    before = (other.folder.path / "recipe.yaml").read_text()
    begun = begin(plan)
    # Even in the same job, as a sweep over the LR is.
    assert begun.folder.path == Path("runs/linear/22-2")
    assert begun.checkpoint is None
    assert (other.folder.path / "recipe.yaml").read_text() == before


LOST = {  # what a power cut left of one file
    "empty": b"",
    "missing": None,
    "zeros": bytes(40),
    "its beginning": b"# linear, resolved\ndefault:\n  mod",
    "a list": b"[]",
    "no text": b"\xff\xfe",
    "deep": b"[" * 50_000,
    "long": b'{"state": "' + b"x" * (2 << 20) + b'"}',
}


def lose(path: Path, content: bytes | None) -> None:
    path.unlink()
    if content is not None:
        path.write_bytes(content)


@pytest.mark.parametrize("content", LOST.values(), ids=LOST)
def test_lost_small_files_hide_no_checkpoints(content, plan):
    path = stopped_at(plan, 40).folder.path
    for name in ("status.json", "plan.json"):
        lose(path / name, content)
    assert begin(plan).checkpoint.meta["step"] == 40


def test_fuzzed_statuses_are_read_or_made_up_for(plan):
    path = stopped_at(plan, 40).folder.path
    meta = _metadata(path)
    for text in odd_json.texts({"state": "finished", "time": 1.5, "step": 3, "error": "x"}, 300):
        (path / "status.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        assert _is_finished(path, meta, plan) in (True, False)
    begin(plan)


@pytest.mark.parametrize("content", LOST.values(), ids=LOST)
def test_a_run_that_ended_stays_ended_without_its_status(content, make_plan):
    plan = make_plan(epochs=1)
    begun = begin(plan)
    metadata = {**Progress(plan.total_steps, epoch=1).metadata(), **REST, "framework": "torch"}
    commit(begun.folder.checkpoints, Checkpoint({}, {"model": model_identity(plan), **metadata}), keep=2)
    lose(begun.folder.path / "status.json", content)
    assert begin(plan).folder.path == Path("runs/linear/22-2")


@pytest.mark.parametrize("content", [content for name, content in LOST.items() if name != "a list"])
def test_a_run_without_its_recipe_is_not_passed_over_in_silence(content, plan):
    lose(stopped_at(plan, 40).folder.path / "recipe.yaml", content)
    begun = begin(plan)
    assert begun.folder.path == Path("runs/linear/22-2")
    assert begun.notes == (
        "runs/linear/22 is passed over: it holds checkpoints, but its recipe.yaml is damaged, so they may be of "
        "another recipe; if they are of this one, resume from them with --output runs/linear/22",
    )
    assert begin(plan, output=Path("runs/linear/22")).checkpoint.meta["step"] == 40


def test_a_run_without_metadata_is_not_passed_over_in_silence(plan):
    stopped_at(plan, 40)
    Path("runs/linear/22/checkpoints/step-00000040/meta.json").write_bytes(b"")
    assert begin(plan).notes == (
        "runs/linear/22 is passed over: it holds checkpoints, but none of them can be read, so they may be of "
        "another recipe; if they are of this one, resume from them with --output runs/linear/22",
    )


def test_what_a_killed_run_left_is_swept(plan):
    path = stopped_at(plan, 40).folder.path
    for left in ("checkpoints/.step-00000050.12-0123456789abcdef.tmp", "checkpoints/.step-00000010.old"):
        (path / left).mkdir()
        (path / left / ARRAYS).write_bytes(b"half")
    (path / ".status.json.12-0123456789abcdef.tmp").write_text("half")
    (path / ".mine.tmp").write_text("kept")
    begin(plan)
    assert [file.name for file in (path / "checkpoints").iterdir()] == ["step-00000040"]
    assert [file.name for file in path.glob(".*.tmp")] == [".mine.tmp"]


def test_a_refused_folder_is_left_as_it_was(plan):
    """Another run's, which a wrong --output names."""
    begun = begin(plan, output=MINE)
    for step in (40, 80):
        save(begun, plan, step, framework="tensorflow")
    (Path("mine/checkpoints/step-00000080") / ARRAYS).write_bytes(b"")
    refusal(CheckpointError, begin, plan, output=MINE)
    assert sorted(path.name for path in Path("mine/checkpoints").iterdir()) == ["step-00000040", "step-00000080"]


def test_a_checkpoint_that_is_not_a_runs_is_refused(plan):
    meta = {"step": 3, "model": model_identity(plan), "framework": "torch"}
    commit(Path("mine/checkpoints"), Checkpoint({}, meta), keep=2)
    assert refusal(CheckpointError, begin, plan, output=MINE) == (
        "the checkpoint of step 3 cannot be resumed from: epoch in meta.json: Field required; "
        "remove it, or give another --output."
    )


def test_a_run_that_another_process_writes_is_not_resumed(plan):
    held = open_one(plan, IN_JOB, "torch", None, "auto")
    save(held, plan, 40)
    assert begin(plan).folder.path == Path("runs/linear/22-2")
    held.folder.lock.close()
    assert begin(plan).checkpoint.meta["step"] == 40


def test_resume_never_starts_anew(plan):
    stopped_at(plan, 40)
    begun = begin(plan, resume="never")
    assert (begun.folder.path, begun.checkpoint) == (Path("runs/linear/22-2"), None)


def test_a_given_folder_is_resumed(plan):
    Path("a/b").mkdir(parents=True)
    save(begin(plan, output=MINE), plan, 40)
    for output in (Path("a/b/../../mine"), Path.cwd() / "mine"):
        assert begin(plan, output=output).checkpoint.meta["step"] == 40
    assert not Path("runs").exists()


def test_a_damaged_checkpoint_is_reported(plan):
    save(stopped_at(plan, 40), plan, 80)
    damaged = Path("runs/linear/22/checkpoints/step-00000080")
    (damaged / ARRAYS).write_bytes(b"")
    begun = begin(plan)
    assert begun.checkpoint.meta["step"] == 40
    assert begun.notes == (
        f"checkpoint {damaged} is damaged: its checksum differs. It is kept as damaged-step-00000080 and not used.",
        "resuming from step 40 of runs/linear/22; another folder starts anew",
    )


def test_nothing_whole_is_reported(plan):
    stopped_at(plan, 40)
    damaged = Path("runs/linear/22/checkpoints/step-00000040")
    (damaged / ARRAYS).write_bytes(b"")
    begun = begin(plan)
    assert begun.checkpoint is None
    assert begun.notes == (
        f"checkpoint {damaged} is damaged: its checksum differs. It is kept as damaged-step-00000040 and not used.",
        "no checkpoint of runs/linear/22 is whole: the run starts anew.",
    )


def test_resume_never_into_a_folder_with_checkpoints_is_refused(plan):
    save(begin(plan, output=MINE), plan, 40)
    assert refusal(OutputError, begin, plan, output=MINE, resume="never") == (
        "mine holds checkpoints and --resume is never; give another --output, or drop --resume never."
    )


def test_checkpoints_of_another_model_are_refused(plan, make_plan):
    save(begin(plan, output=MINE), plan, 40)
    before = Path("mine/recipe.yaml").read_text()
    assert refusal(CheckpointError, begin, make_plan("synthetic:tiny"), output=MINE) == (
        "mine holds checkpoints of another model (linear, 2 parameters, optimizer sgd), this run trains resnet50, "
        "cifar stem, 23,528,522 parameters, optimizer sgd with momentum_buffer; give another --output."
    )
    assert refusal(CheckpointError, begin, make_plan("linear", momentum=0.9), output=MINE) == (
        "mine holds checkpoints of another model (linear, 2 parameters, optimizer sgd), this run trains linear, "
        "2 parameters, optimizer sgd with momentum_buffer; give another --output."
    )
    assert Path("mine/recipe.yaml").read_text() == before


def test_a_checkpoint_of_another_framework_is_refused(plan):
    save(begin(plan, output=MINE), plan, 40, framework="tensorflow")
    assert refusal(CheckpointError, begin, plan, output=MINE) == (
        "mine holds checkpoints of tensorflow, this run trains with torch; convert them: "
        "python -m hvdtrain convert mine --to torch"
    )


def test_another_frameworks_unfinished_run_is_not_resumed(plan):
    theirs = open_one(plan, IN_JOB, "tensorflow", None, "auto")
    save(theirs, plan, 40, framework="tensorflow")
    theirs.folder.lock.close()
    assert begin(plan).folder.path != theirs.folder.path


def test_a_job_that_was_queued_again_continues_with_its_own_run(plan):
    mine, others = (dataclasses.replace(IN_JOB, job_id=job) for job in ("31", "32"))
    paths = []
    for topology in (mine, others):
        begun = open_one(plan, topology, "torch", None, "never")
        save(begun, plan, 40)
        begun.folder.lock.close()
        paths.append(begun.folder.path)
    assert open_one(plan, mine, "torch", None, "auto").folder.path == paths[0]


def test_a_folder_in_use_is_refused(plan):
    held = open_one(plan, ALONE, "torch", MINE, "auto")
    assert refusal(OutputError, begin, plan, output=MINE) == (
        "mine is being written by another run; wait for it, or give another --output."
    )
    held.folder.lock.close()


def test_a_lock_that_somebody_else_has_made_is_refused(make_plan):
    Path("mine").mkdir()
    Path("precious").write_text("kept")
    Path("mine/.lock").symlink_to(Path("precious").resolve())
    assert refusal(OutputError, begin, make_plan(), output=MINE).startswith("cannot write to the run folder mine: ")
    assert Path("precious").read_text() == "kept"
    Path("mine/.lock").unlink()
    os.mkfifo("mine/.lock")
    assert refusal(OutputError, begin, make_plan(), output=MINE).startswith("cannot write to the run folder mine: ")


@pytest.mark.parametrize("name", ["checkpoints", "trackers", "metrics.jsonl", "launches.jsonl", "timeline.json"])
def test_a_run_writes_and_removes_nothing_through_a_link(name, plan):
    precious = stopped_at(plan, 40).folder.path
    (precious / "trackers").mkdir()
    (precious / "timeline.json").touch()
    before = content_of(precious)
    Path("mine").mkdir()
    Path("mine", name).symlink_to((precious / name).resolve())
    assert refusal(OutputError, begin, plan, output=MINE) == (
        f"cannot write to the run folder mine: {name} is a link, which may lead elsewhere; put a copy in its place, "
        "or give another --output."
    )
    shutil.move("mine", "runs/linear/9999")
    if name != "checkpoints":
        shutil.copytree(precious / "checkpoints", "runs/linear/9999/checkpoints")
    os.utime(precious, (1000, 1000))
    begun = begin(plan, ALONE)
    assert (begun.folder.path, content_of(precious)) == (precious, before)
    assert begun.notes[0].startswith("runs/linear/9999 is passed over: cannot write to the run folder runs/linear/9999")


def content_of(folder: Path) -> dict[str, bytes]:
    """Without what a run replaces as it begins."""
    own = {"status.json", "recipe.yaml", "plan.json"}
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in own}


def chown(path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs a second user: run the tests as root")
    os.chown(path, 65534, 65534, follow_symlinks=False)


@pytest.mark.parametrize("theirs", ["the folder", "a link to a run of ours", "the checkpoints"])
def test_another_users_run_is_not_resumed(theirs, plan):
    path, link = stopped_at(plan, 40).folder.path, Path("runs/linear/9999")
    if theirs == "a link to a run of ours":
        shutil.move(path, "elsewhere")
        link.symlink_to(Path("elsewhere").resolve())
        path = Path("elsewhere")
    else:
        shutil.move(path, link)
        path = link
    chown(path / "checkpoints" if theirs == "the checkpoints" else link)
    before = {each: each.stat().st_mtime_ns for each in path.rglob("*")}
    begun = begin(plan)
    assert (begun.folder.path, begun.checkpoint) == (Path("runs/linear/22"), None)
    assert begun.notes == (
        "runs of other users in runs/linear are passed over; to resume from one, give --output runs/linear/9999",
    )
    assert {each: each.stat().st_mtime_ns for each in path.rglob("*")} == before
    assert begin(plan, output=link).checkpoint.meta["step"] == 40


@pytest.mark.parametrize("where", ["plateau", "train", "scaler"])
def test_a_key_too_many_is_named_and_keeps_no_new_run_from_starting(where, plan):
    """As of a checkpoint that a newer hvdtrain wrote."""
    begun = begin(plan)
    meta = {"model": model_identity(plan), "framework": "torch", **REST, **Progress(40).metadata()}
    meta["scaler"] = {"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9}
    meta["scaler"]["_growth_tracker"] = 1
    meta[where]["a\nkey"] = 1
    commit(begun.folder.checkpoints, Checkpoint({}, meta), 2)
    begun.folder.write_status("running", step=40)
    another = begin(plan)
    assert (another.folder.path.name, another.checkpoint) == ("22-2", None)
    (line,) = another.notes
    assert line.startswith("runs/linear/22 is passed over: the checkpoint of step 40 cannot be resumed from: ")
    assert f"{where}.a\\nkey in meta.json: " in line.replace("ScalerMetadata.", "")
    assert f"{where}." in refusal(CheckpointError, begin, plan, output=Path("runs/linear/22"))


def test_a_folder_that_may_not_be_read_keeps_no_new_run_from_starting(plan):
    path = stopped_at(plan, 40).folder.path
    chown(path)
    for each in ("runs", "runs/linear", "."):
        Path(each).chmod(0o777)
    path.chmod(0o300)
    chown(path / "checkpoints")
    with no_root():
        begun = begin(plan)
    assert begun.folder.path.name == "22-2"
    assert begun.notes == ("runs/linear/22 is passed over: [Errno 13] Permission denied: 'runs/linear/22'",)


@pytest.mark.parametrize("where", ["runs", "runs/linear", "runs/linear/22"])
def test_a_file_in_the_place_of_the_run_folder_is_refused(where, make_plan):
    Path(where).parent.mkdir(parents=True, exist_ok=True)
    Path(where).write_text("")
    reason = "File exists" if where.endswith("22") else "Not a directory"
    assert refusal(OutputError, begin, make_plan()) == (
        f"cannot write to the run folder runs/linear/22: {reason}; give a writable --output."
    )


@contextlib.contextmanager
def no_root():
    """Root may write anywhere: for a while, be nobody."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_write_protected_folder_is_refused(plan):
    Path.cwd().chmod(0o755)
    Path("sealed").mkdir(mode=0o555)
    with no_root():
        message = refusal(OutputError, begin, plan, output=Path("sealed/run"))
    assert message == "cannot write to the run folder sealed/run: Permission denied; give a writable --output."


def test_no_room_for_the_checkpoints_is_refused(make_plan, tiny_disk):
    plan = make_plan("synthetic:tiny")  # two kept, the best and one being written: 4 x 179.5 MiB
    assert refusal(OutputError, begin, plan, output=tiny_disk / "run") == (
        f"the run folder {tiny_disk}/run has no room for 718.0 MiB of checkpoints: No space left on device; "
        "free space or give another --output."
    )


def test_room_is_requested_without_a_write(plan, tmp_path):
    """ext2 cannot reserve: glibc's posix_fallocate writes a byte into each of its blocks."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for command in (["mkfs.ext2", "-q", "-F", image], ["mount", "-o", "loop", image, disk]):
        if not shutil.which(command[0]) or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs ext2 on a loop device: apt install e2fsprogs, and run the tests as root")
    try:
        folder, identity = hold(disk / "run"), replace(identity_of(plan, "torch", {}), checkpoint_bytes=8 << 20)
        before = written()
        _reserve(folder, identity)
        assert written() - before < 10  # of 8,192
        with pytest.raises(OutputError, match=r"has no room for 256\.0 MiB of checkpoints: No space left on device;"):
            _reserve(folder, replace(identity, checkpoint_bytes=64 << 20))
        folder.lock.close()
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def written() -> int:
    """Calls of write and its like that this process has made."""
    return int(re.search(r"syscw: (\d+)", Path("/proc/self/io").read_text())[1])


def test_a_changed_recipe_is_reported(plan, make_plan):
    save(begin(plan, output=MINE), plan, 40)
    changed = begin(make_plan(base_lr=0.25, seed=3), output=MINE)
    assert changed.notes[1:] == ("the recipe has changed since; now seed: 3, base_lr: 0.25",)


def holds(path, pipe):
    """In a forked process: holds the folder, then looks whether it still does. Sends what comes of it."""
    try:
        held = hold(path)
        pipe.send("held")
        pipe.recv()
        held.holder.check_held()
        pipe.send("")
    except OutputError as error:
        pipe.send(str(error))
    held = None


@pytest.fixture
def process_that_holds(tmp_path, monkeypatch):
    """`process_that_holds(errno)`: a process and its pipe, on a file system whose flock has that error."""

    def begin(number, heartbeat=0.1):
        def flock(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)
        monkeypatch.setattr(holder, "HEARTBEAT", heartbeat)
        ours, theirs = fork.Pipe()
        process = fork.Process(target=holds, args=(tmp_path / "run", theirs), daemon=True)
        process.start()
        return process, ours

    fork = multiprocessing.get_context("fork")
    return begin


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EIO])
def test_without_flock_one_run_holds_a_folder(tmp_path, process_that_holds, number):
    first, pipe = process_that_holds(number)
    assert pipe.recv() == "held"
    another = f"{tmp_path}/run is being written by another run (process {first.pid} on {socket.gethostname()});"
    assert process_that_holds(number)[1].recv().startswith(another)
    first.kill()
    first.join()
    _, pipe = process_that_holds(number, heartbeat=600)  # a killed run holds nothing
    assert pipe.recv() == "held"
    held = tmp_path / "run" / holder.NAME
    held.write_text(held.read_text().replace('"pid": ', '"pid": 9'))
    pipe.send("look")
    assert f"{tmp_path}/run was taken by another run while this one stood still" in pipe.recv()
    held.unlink()
    last, pipe = process_that_holds(number)
    assert pipe.recv() == "held"
    pipe.send("look")
    assert pipe.recv() == ""
    last.join()
    assert not held.exists()


def test_a_lock_that_may_not_be_had_is_another_runs(process_that_holds):
    _, pipe = process_that_holds(errno.EACCES)  # CIFS's, of a lock that another one holds
    assert "run is being written by another run; wait for it, or give another --output." in pipe.recv()


def test_a_file_system_that_is_away_is_no_other_run(tmp_path):
    held = holder.Holder(tmp_path)
    content = json.loads((tmp_path / holder.NAME).read_text())
    (tmp_path / holder.NAME).unlink()
    held.check_held()
    other = content["token"] = "x"  # noqa: S105 - a container's processes have their own numbers
    (tmp_path / holder.NAME).write_text(json.dumps(content))
    with pytest.raises(OutputError, match="was taken by another run"):
        held.check_held()
    held.close()
    assert json.loads((tmp_path / holder.NAME).read_text())["token"] == other


def test_a_holder_that_cannot_be_removed_is_reported(tmp_path, monkeypatch):
    """As another user's in a folder like /tmp."""
    monkeypatch.setattr(holder, "DEAD", 0.0)
    (tmp_path / holder.NAME).write_text("{}")
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o1777 if os.geteuid() == 0 else 0o555)
    with no_root(), pytest.raises(PermissionError):
        holder.Holder(Path())


def test_a_run_on_another_host_is_known_by_its_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(holder, "HEARTBEAT", 0.05)
    monkeypatch.setattr(holder, "DEAD", 0.1)
    (tmp_path / holder.NAME).write_text('{"host": "b", "boot": "x", "pid": 1, "heartbeat": 7}')
    holder.Holder(tmp_path).close()  # no heartbeat
    for odd in ("", "[", "null", '{"pid": "\\u001b[2J"}', "x" * 2**21):
        (tmp_path / holder.NAME).write_text(odd)
        holder.Holder(tmp_path).close()
    (tmp_path / holder.NAME).symlink_to("/dev/zero")
    holder.Holder(tmp_path).close()
    stop = threading.Event()

    def live():
        while not stop.wait(0.05):
            files.write(
                tmp_path / holder.NAME, json.dumps({"host": "b", "boot": "x", "pid": 1, "heartbeat": random.random()})
            )

    other = threading.Thread(target=live)
    other.start()
    try:
        stop.wait(0.2)
        monkeypatch.setattr(holder, "DEAD", 30.0)
        message = f"{tmp_path} is being written by another run (process 1 on b); wait for it, or give another --output."
        assert refusal(OutputError, holder.Holder, tmp_path) == message
    finally:
        stop.set()
        other.join()


CONTENTS = {"training examples": 16, "validation examples": 6, "class names": ["a", "b"], "training list": "1f"}
NEWS = {  # what has changed -> the line, and where in the order the epoch continues
    "nothing": ({}, "", 8),
    "more": ({"training examples": 19, "training list": "2e"}, "(19 training examples, 16 then): this epoch begins", 0),
    "others": ({"training list": "2e"}, "(another training list): this epoch begins anew with them", 0),
    "to validate": ({"validation examples": 5}, "(5 validation examples, 6 then): the run continues with them", 8),
    "what no checkpoint had": ({"validation list": "3d"}, "", 8),
    "seed": ({"seed": 3}, None, 8),
    "batch": ({"batch_size": 2}, None, 8),
    "class": ({"class names": ["a", "c"]}, "class 1 is 'c' in the data, 'b' in the checkpoint of step 9 (2 classes", 8),
    "class less": ({"class names": ["a"]}, "class 1 is not there in the data, 'b' in the checkpoint of step 9 (1 ", 8),
    "class name with a terminal's": ({"class names": ["\x1b[2J", "b"]}, "class 0 is '\\x1b[2J' in the data, 'a' in", 8),
}


@pytest.mark.parametrize("case", NEWS)
def test_what_has_changed_in_the_data_since_the_checkpoint(case):
    changes, text, sample = NEWS[case]
    before = {**CONTENTS, "batch_size": 4, "seed": 0}
    progress = Progress(9, 2, 8, train=Totals(3.0, 8.0))
    if text is None:
        with pytest.raises(LoopError, match=f"this epoch began with {next(iter(changes))} "):
            take_data(before, {**before, **changes}, progress)
    elif text.startswith("class"):
        with pytest.raises(CheckpointError) as caught:
            take_data(before, {**before, **changes}, progress)
        assert str(caught.value).startswith(text)
    else:
        assert text in take_data(before, {**before, **changes}, progress)
    assert (progress.step, progress.epoch, progress.sample, progress.train.count) == (9, 2, sample, float(sample))


def test_between_two_epochs_a_run_continues_with_other_data():
    progress = Progress(9, 2)
    assert take_data({}, CONTENTS, progress) == ""
    assert "the run continues with them" in take_data(CONTENTS, {**CONTENTS, "training list": "2e"}, progress)
    assert take_data({**CONTENTS, "seed": 0}, {**CONTENTS, "seed": 1}, progress) == ""
