"""The run folder `runs/<recipe>/<job or time>/`, which rank 0 finds or makes, and locks; and its small files."""

import contextlib
import errno
import fcntl
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal, get_args

from hvdtrain import files
from hvdtrain.core import optimizers, recipe
from hvdtrain.core.compatibility import Framework
from hvdtrain.core.network import GPT
from hvdtrain.core.plan import Plan
from hvdtrain.core.progress import Progress
from hvdtrain.errors import CheckpointError, HvdtrainError, OutputError
from hvdtrain.launch.topology import Topology
from hvdtrain.record import checkpoint, reader
from hvdtrain.record.checkpoint import Checkpoint
from hvdtrain.record.holder import BUSY, Holder
from hvdtrain.record.schema import check_names, check_resumable, on_other_data
from hvdtrain.untrusted import printable

RUNS, LOCK = Path("runs"), ".lock"
LONGEST_IDENTITY = 500  # characters of an optimizer's; a checkpoint's metadata allow 1000 for the model's
RECIPE, MODEL, BEST = "recipe.yaml", "model.json", "best.json"
WRITTEN = re.compile(
    r"checkpoints|trackers|\..*|events\..*|(step|damaged|best)-.*|.*\.(yaml|jsonl?|html)|job\.sh|rank.*", re.DOTALL
)
"""The names of everything that a run writes into its folder."""
State = Literal["running", "finished", "failed", "stopped", "left"]


@dataclass
class RunFolder:
    """A run's folder, held by this process until it ends."""

    path: Path
    lock: IO[str]
    holder: Holder | None = None
    """The file that holds the folder, on a file system without flock."""
    _is_over: bool = field(default=False, init=False, repr=False)
    """Whether the status of the run's end is written. After it, no thread may write that the run is running."""
    _best: str = field(default="", init=False, repr=False)
    """The checkpoint that `best.json` names."""
    _ending: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def check_held(self) -> None:
        """Raises OutputError where the folder is not the one that this process holds: a write would make it anew."""
        if getattr(self.lock, "closed", True):
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self.lock.fileno()), (self.path / LOCK).lstat()):
                return
        raise OutputError(
            f"the run folder {self.path} was removed, replaced or unmounted while the run wrote to it; nothing more is "
            "written. Put it back, and the same command continues from its last checkpoint; else it begins anew."
        )

    def write_status(self, state: State, **more: Any) -> None:
        """Replaces `status.json`: the state, the time in seconds since 1970, and more. Once the run has
        ended, the state "running" is no longer written. Raises OSError, and OutputError as `check` does."""
        self.check_held()
        path, text = self.path / "status.json", json.dumps({"state": state, "time": time.time(), **more}, indent=1)
        if state == "running":
            self._write_running(path, text)
            return
        with self._ending:
            self._is_over = True
        write = files.write if state == "finished" else files.write_before_exit  # a launcher ends it soon
        write(path, text)

    def mark_best(self) -> None:
        """Names the best checkpoint in `best.json`, for a person: not every file system has links."""
        best = checkpoint.best_of(checkpoint.committed(self.checkpoints))
        if best and best.name != self._best:
            with contextlib.suppress(OSError):  # training and resuming do not need it
                files.write(self.path / BEST, json.dumps({"checkpoint": f"checkpoints/{best.name}"}))
                self._best = best.name

    def _write_running(self, path: Path, text: str) -> None:
        unfinished = files.temporary(path)
        try:
            unfinished.write_text(text, encoding="utf-8")
            files.sync(unfinished)
            with self._ending:  # not while the disk syncs, for which a run that ends does not wait
                if not self._is_over:
                    unfinished.replace(path)
            files.sync(path.parent)
        finally:
            files.remove(unfinished)


@dataclass(frozen=True)
class Identity:
    """What a run is: what its folder shows, and which checkpoints belong to it."""

    name: str
    """The recipe and its entry, as in cifar100:bs256, for reports."""
    framework: Framework
    model: str
    """Two runs can use each other's checkpoints where this is equal."""
    lines: tuple[str, ...]
    """Lines for the log."""
    files: Mapping[str, str]
    """The texts of the folder's small files, by file name."""
    checkpoint_bytes: int
    keep_checkpoints: int
    contents: Mapping[str, Any] = field(default_factory=dict)
    """A description of the data set, where it is known from the start."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from; without one the run starts from the beginning."""

    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()
    """Lines for the log."""

    @property
    def step(self) -> int:
        """How many updates were made before."""
        return int(self.checkpoint.meta["step"]) if self.checkpoint else 0


def open_run(
    plan: Plan, topology: Topology, identity: Identity, output: Path | None, resume: Literal["auto", "never"]
) -> tuple[RunFolder, ResumePoint]:
    """Creates or reopens the run folder, and reads the checkpoint to resume from.

    Without `output`, reopens this user's newest unfinished, unlocked run of the same recipe, or creates a new folder.
    Raises OutputError (unwritable, full, in use) and CheckpointError (of another model or framework).
    """
    parent = RUNS / folder_name(plan.recipe.name)
    found, passed_over = None, list[str]()
    if output is None and resume == "auto":
        found, passed_over = _unfinished(parent, plan, identity.framework, topology.job_id)
    folder = found or hold(output or _fresh(parent, topology))
    try:
        if resume == "never" and checkpoint.committed(folder.checkpoints):
            raise OutputError(
                f"{folder.path} holds checkpoints and --resume is never",
                remedy="give another {folder}, or drop --resume never",
            )
        return folder, resume_point(folder, identity, passed_over)
    except HvdtrainError:
        folder.lock.close()
        raise


def identity_of(plan: Plan, framework: Framework, contents: Mapping[str, Any]) -> Identity:
    """The identity of a recipe's run; `contents` describes its data set."""
    numbers = json.dumps({"framework": framework, **plan.to_json()}, indent=1)
    return Identity(
        plan.recipe.name,
        framework,
        model_identity(plan),
        tuple(plan.lines()),
        {RECIPE: recipe.dump(plan.recipe), "plan.json": numbers},
        plan.checkpoint_bytes,
        plan.recipe.keep_checkpoints,
        contents,
    )


def resume_point(folder: RunFolder, identity: Identity, passed_over: Sequence[str] = ()) -> ResumePoint:
    """Reads the checkpoint to resume from, and writes the folder's small files. Raises OutputError, CheckpointError."""
    state, damaged = _recover(folder, identity)
    notes = [*passed_over, *damaged]
    if state:
        state, changes = on_other_data(state, identity.contents)
        notes.append(f"resuming from step {state.meta['step']} of {folder.path}; another folder starts anew")
        before: set[str] = set()
        with contextlib.suppress(OSError, ValueError):
            before.update(files.read(folder.path / RECIPE, follow=False).splitlines())
        text = identity.files.get(RECIPE, "")
        now = [line.strip() for line in text.splitlines()[1:] if line not in before]
        if before and now:
            notes.append(f"the recipe has changed since; now {', '.join(now)}")
        notes += changes
    elif damaged:
        notes.append(f"no checkpoint of {folder.path} is whole: the run starts anew.")
    point = ResumePoint(state, tuple(notes))
    _describe(folder, identity, point.step)
    return point


def _recover(folder: RunFolder, identity: Identity) -> tuple[Checkpoint | None, list[str]]:
    def check_state(state: Checkpoint) -> None:
        # The names first: other classes make another model too.
        check_names(state.meta.get("data"), identity.contents, state.meta["step"])
        _check_identity(state.meta, identity, folder.path)
        check_resumable(state.meta)

    try:
        files.sweep(folder.path)
        return checkpoint.recover(folder.checkpoints, check_state)
    except OSError as error:
        raise _unwritable(folder.path, error) from None


def folder_name(recipe_name: str) -> str:
    """The folder of a recipe's runs."""
    file, _, entry = recipe_name.partition(":")
    stem = Path(file).stem if file.endswith((".yaml", ".yml")) else file
    return re.sub(r"^\.+|[^\w.-]", "-", f"{stem}-{entry}" if entry else stem)


def _fresh(parent: Path, topology: Topology) -> Path:
    """A new folder, named by the job or the time, with a number where a job trains one recipe several times."""
    name = topology.job_id or datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path, count = parent / name, 1
    while True:
        try:
            files.make_folder(path, must_be_new=True)
            return path
        except OSError as error:
            if not os.path.isdir(path):  # noqa: PTH112 - Path's own raises where it may not look
                raise _unwritable(path, error) from None
        count += 1
        path = parent / f"{name}-{count}"


def _unfinished(parent: Path, plan: Plan, framework: str, job_id: str | None) -> tuple[RunFolder | None, list[str]]:
    """The run of this user with the same recipe and framework that has not ended and that nobody writes to. It is this
    job's own where the job was queued again, else the newest. Also lines about the folders that are passed over."""
    lines, own, theirs = list[str](), list[tuple[bool, float, Path]](), list[Path]()
    for path in parent.glob("*"):
        with contextlib.suppress(OSError):  # no run's folder
            if _is_own(path):
                own.append((path.name == job_id, path.stat().st_mtime, path))
            else:
                theirs.append(path)
    for *_, path in sorted(own, reverse=True):
        try:
            if _is_this_run(path, plan, framework):
                with contextlib.suppress(OutputError):
                    return hold(path), lines
        except (HvdtrainError, OSError) as error:
            lines.append(f"{path} is passed over: {error}")
    if theirs:
        first = printable(str(theirs[0]), 200)
        lines.append(f"runs of other users in {parent} are passed over; to resume from one, give --output {first}")
    return None, lines


def _is_own(path: Path) -> bool:
    """Whether a run's folder, a link to it, and its folder of checkpoints belong to this user. Raises OSError."""
    return all(map(files.is_own, ((path / "checkpoints").lstat(), path.stat(), path.lstat())))


def _is_this_run(path: Path, plan: Plan, framework: str) -> bool:
    """Whether the folder holds an unfinished run of this recipe and framework. Raises OutputError and CheckpointError
    where its files do not show that, or no run could resume there; OSError."""
    _refuse_links(path)
    if not checkpoint.committed(path / "checkpoints"):
        return False
    meta, text = _metadata(path), ""
    with contextlib.suppress(OSError, ValueError):
        text = files.read(path / RECIPE, follow=False)
    if _is_finished(path, meta, plan) or (meta and meta.get("framework") != framework):
        return False
    # What a power cut leaves of a file: nothing, zeros, or its beginning.
    is_whole = text.startswith("# ") and text.endswith("\n") and "\0" not in text and "\ndefault:\n" in text
    if not meta or not is_whole:
        why = "its recipe.yaml is damaged" if meta else "none of them can be read"
        raise CheckpointError(
            f"it holds checkpoints, but {why}, so they may be of another recipe; if they are of this one, resume from "
            f"them with --output {path}"
        )
    if text != recipe.dump(plan.recipe):
        return False
    check_resumable(meta)
    return True


def _metadata(path: Path) -> dict[str, Any] | None:
    """The metadata of the run's newest readable checkpoint."""
    for one in reversed(checkpoint.committed(path / "checkpoints")):
        with contextlib.suppress(CheckpointError):
            return checkpoint.metadata(one)
    return None


def _is_finished(path: Path, meta: dict[str, Any] | None, plan: Plan) -> bool:
    """Whether the run has ended, by its status, or by its newest checkpoint where the status is lost."""
    state = reader.recorded_state(path)
    if state in get_args(State):
        return state == "finished"
    if meta is None:
        return False
    with contextlib.suppress(CheckpointError):
        check_resumable(meta)
        return Progress.from_metadata(meta).is_done(plan)
    return False


def hold(path: Path) -> RunFolder:
    """Opens the run folder, or makes it, and locks it for this process. Raises OutputError."""
    try:
        _refuse_links(path)
        files.make_folder(path / "checkpoints")
        # Do not truncate, follow or wait: it may be somebody else's link or pipe.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.fdopen(os.open(path / LOCK, flags, 0o666), "w", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the latter is CIFS's
        raise OutputError(f"{path} is being written by another run", remedy=BUSY) from None
    except OSError:  # some parallel file systems have no flock
        try:
            holder = Holder(path)
        except OSError as error:
            raise _unwritable(path, error) from None
        weakref.finalize(lock, holder.close)
        return RunFolder(path, lock, holder)
    return RunFolder(path, lock)


def _refuse_links(path: Path) -> None:
    """Raises OutputError where a link lies in the run folder, through which the run would write or remove; OSError."""
    for folder in filter(Path.is_dir, (path, path / "checkpoints")):
        for each in folder.iterdir():
            is_file, status = each.is_file(), each.lstat()
            if files.is_own(status) and not WRITTEN.fullmatch(each.name):
                continue
            if each.is_symlink() or (is_file and status.st_nlink > 1 and status.st_uid != path.stat().st_uid):
                what = f"{printable(each.name)} is a link, which may lead elsewhere"
                remedy = "put a copy in its place, or give another {folder}"
                raise OutputError(f"cannot write to the run folder {path}: {what}", remedy=remedy)


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write to the run folder {path}: {error.strerror}", remedy="give a writable {folder}")


def _check_identity(meta: Mapping[str, Any], identity: Identity, path: Path) -> None:
    model, framework = meta.get("model"), meta.get("framework")
    if model != identity.model:
        words, own = str(model).split(", "), identity.model.split(", ")
        is_part = (words[0], words[2:]) == (own[0], own[2:])  # which differs in the number of parameters alone
        earlier = "build all its layers before the start, or " * is_part
        raise CheckpointError(
            f"{path} holds checkpoints of another model ({model}), this run trains {identity.model}",
            remedy=f"{earlier}give another {{folder}}",
        )
    if framework != identity.framework:
        raise CheckpointError(
            f"{path} holds checkpoints of {framework}, this run trains with {identity.framework}; convert them: "
            f"python -m hvdtrain convert {path} --to {identity.framework}"
        )


def model_identity(plan: Plan) -> str:
    """A text that is equal for runs of recipes that can use each other's checkpoints."""
    r = plan.recipe
    stem = f", {r.stem} stem" if r.model == "resnet50" else ""
    heads = f", {GPT(**r.model_args).heads} heads" if r.model == "gpt" else ""
    optimizer = printable(optimizers.identity(r), LONGEST_IDENTITY)
    averaged = ", averaged weights" if r.ema_decay else ""
    return f"{r.model}{stem}{heads}, {plan.parameters:,} parameters, {optimizer}{averaged}"


def _reserve(folder: RunFolder, identity: Identity) -> None:
    """Refuses a folder without room for the checkpoints: those that are kept, the best, and one being written. The room
    is not taken, as posix_fallocate would write all of it on some file systems. Raises OutputError, OSError."""
    there, disk = len(checkpoint.committed(folder.checkpoints)), os.statvfs(folder.path)
    wanted = max(1, identity.keep_checkpoints + 2 - there) * identity.checkpoint_bytes
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < wanted:  # some report nothing
        raise OutputError(
            f"the run folder {folder.path} has no room for {wanted / 2**20:,.1f} MiB of checkpoints: "
            f"{os.strerror(errno.ENOSPC)}",
            remedy="free space or give another {folder}",
        )


def _describe(folder: RunFolder, identity: Identity, step: int) -> None:
    """Writes the folder's small files, with a status of `step` updates. Raises OutputError."""
    try:
        _reserve(folder, identity)
        for name, text in identity.files.items():
            files.write(folder.path / name, text)
        folder.write_status("running", step=step)
    except OSError as error:
        raise _unwritable(folder.path, error) from None
