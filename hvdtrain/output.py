"""The run folder `runs/<recipe>/<job or time>/`: found or made, locked, and its small files. The chief's alone."""

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal

from hvdtrain import checkpoint, recipe
from hvdtrain.checkpoint import Checkpoint
from hvdtrain.errors import CheckpointError, HvdtrainError, OutputError
from hvdtrain.plan import Plan
from hvdtrain.topology import Topology

RUNS = Path("runs")
State = Literal["running", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, held by this process until it ends."""

    path: Path
    lock: IO[str]

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_status(self, state: State, **facts: Any) -> None:
        """`status.json`, replaced in one piece: state, the time in seconds since 1970, and the facts."""
        replace(self.path / "status.json", json.dumps({"state": state, "time": time.time(), **facts}, indent=1))


@dataclass(frozen=True)
class Start:
    """Where a run begins: its folder, the checkpoint it goes on from, and lines to tell the user."""

    folder: RunFolder
    checkpoint: Checkpoint | None
    notes: tuple[str, ...]


def start(
    plan: Plan, topology: Topology, framework: str, output: Path | None, resume: Literal["auto", "never"]
) -> Start:
    """Makes or takes up the run folder and reads the checkpoint to go on from.

    Without `output`, takes up the newest unfinished, unlocked run of the same recipe, or makes a new folder.
    Raises OutputError (unwritable, full, in use) and CheckpointError (of another model or framework).
    """
    place = RUNS / _folder_name(plan.recipe.name)
    found = _unfinished(place, plan, framework, topology.job_id) if output is None and resume == "auto" else None
    folder = found or _open(output or _fresh(place, topology))
    try:
        return _begin(folder, plan, framework, resume)
    except HvdtrainError:
        folder.lock.close()
        raise


def _begin(folder: RunFolder, plan: Plan, framework: str, resume: Literal["auto", "never"]) -> Start:
    if resume == "never" and checkpoint.committed(folder.checkpoints):
        raise OutputError(
            f"{folder.path} holds checkpoints and --resume is never; give another --output, or drop --resume never."
        )
    state, damaged = checkpoint.newest(folder.checkpoints)
    if state:
        _check_model(state, plan, folder)
        _check_framework(state, framework, folder)
    notes = _notes(folder, plan, state, damaged)
    _reserve(folder, plan)
    describe(folder, plan, framework, state.meta["step"] if state else 0)
    return Start(folder, state, tuple(notes))


def _notes(folder: RunFolder, plan: Plan, state: Checkpoint | None, damaged: list[str]) -> list[str]:
    if state:
        used = f"going on from step {state.meta['step']} of {folder.path} (--resume never starts anew without --output)"
        return [*(f"{line} The one before it is used." for line in damaged), used, *_changes(folder, plan)]
    return [*damaged, f"no checkpoint of {folder.path} is whole: the run starts anew."] if damaged else []


def _changes(folder: RunFolder, plan: Plan) -> list[str]:
    """A line where the folder's recipe, which a checkpoint was trained with, said otherwise."""
    before: set[str] = set()
    with contextlib.suppress(OSError, ValueError):
        before.update((folder.path / "recipe.yaml").read_text(encoding="utf-8").splitlines())
    now = [line.strip() for line in recipe.dump(plan.recipe).splitlines()[1:] if line not in before]
    return [f"the recipe has changed since; now {', '.join(now)}"] if before and now else []


def replace(path: Path, text: str) -> None:
    """Writes a small file in one piece: a reader sees the old text or the new one."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _folder_name(recipe_name: str) -> str:
    file, _, entry = recipe_name.partition(":")
    stem = Path(file).stem if file.endswith((".yaml", ".yml")) else file
    return re.sub(r"^\.+|[^\w.-]", "-", f"{stem}-{entry}" if entry else stem)


def _fresh(place: Path, topology: Topology) -> Path:
    """A folder of its own, named by job or time: a job may train one recipe several times."""
    name = topology.job_id or datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path, count = place / name, 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except OSError as error:
            if not path.is_dir():
                raise _unwritable(path, error) from None
        count += 1
        path = place / f"{name}-{count}"


def _unfinished(place: Path, plan: Plan, framework: str, job_id: str | None) -> RunFolder | None:
    """The run of this very recipe and framework that has not ended and that nobody is writing to: this job's own,
    where it was queued again, else the newest."""
    text = recipe.dump(plan.recipe)
    folders = [path for path in place.glob("*") if path.is_dir()]
    for path in sorted(folders, key=lambda path: (path.name == job_id, path.stat().st_mtime), reverse=True):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, OutputError):
            finished = json.loads((path / "status.json").read_text(encoding="utf-8"))["state"] == "finished"
            ours = json.loads((path / "plan.json").read_text(encoding="utf-8"))["framework"] == framework
            same = ours and (path / "recipe.yaml").read_text(encoding="utf-8") == text
            if same and not finished and checkpoint.committed(path / "checkpoints"):
                return _open(path)
    return None


def _open(path: Path) -> RunFolder:
    try:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("w", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"{path} is being written by another run; wait for it, or give another --output.") from None
    except OSError:
        pass  # Some parallel file systems have no flock: then nothing guards the folder, as without us.
    return RunFolder(path, lock)


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write to the run folder {path}: {error.strerror}; give a writable --output.")


def _check_model(state: Checkpoint, plan: Plan, folder: RunFolder) -> None:
    theirs, ours = state.meta.get("model"), model_identity(plan)
    if theirs != ours:
        raise CheckpointError(
            f"{folder.path} holds checkpoints of another model ({theirs}), this run trains {ours}; "
            "give another --output."
        )


def _check_framework(state: Checkpoint, framework: str, folder: RunFolder) -> None:
    theirs = state.meta.get("framework")
    if theirs != framework:
        raise CheckpointError(
            f"{folder.path} holds checkpoints of {theirs}, this run trains with {framework}; convert them: "
            f"python -m hvdtrain convert {folder.path} --to {framework}"
        )


def model_identity(plan: Plan) -> str:
    """What two runs must share to exchange checkpoints."""
    r = plan.recipe
    stem = f", {r.stem} stem" if r.model == "resnet50" else ""
    return f"{r.model}{stem}, {plan.parameters:,} parameters, momentum {'kept' if r.momentum else 'none'}"


def _reserve(folder: RunFolder, plan: Plan) -> None:
    """Refuses a folder that has no room for the checkpoints: the kept ones, the best, and one being written."""
    there = len(checkpoint.committed(folder.checkpoints))
    wanted = max(1, plan.recipe.keep_checkpoints + 2 - there) * plan.checkpoint_bytes
    probe = folder.path / ".room"
    try:
        with probe.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, wanted)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise OutputError(
                f"the run folder {folder.path} has no room for {wanted / 2**20:,.1f} MiB of checkpoints: "
                f"{error.strerror}; free space or give another --output."
            ) from None
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise _unwritable(folder.path, error) from None
    finally:
        probe.unlink(missing_ok=True)


def describe(folder: RunFolder, plan: Plan, framework: str, step: int) -> None:
    """Writes what the run is: recipe.yaml, plan.json, and a status of `step` updates. Raises OutputError."""
    try:
        replace(folder.path / "recipe.yaml", recipe.dump(plan.recipe))
        replace(folder.path / "plan.json", json.dumps({"framework": framework, **plan.to_json()}, indent=1))
        folder.write_status("running", step=step)
    except OSError as error:
        raise _unwritable(folder.path, error) from None
