"""Run folders that another user may have filled, for fuzz.py: links, pipes, owners, sizes, folders, damage.

Each lies beside a private folder, to which its links lead. Whatever a tool does with the run folder, nothing of the
private one may be printed, written elsewhere, changed or removed.
"""

import contextlib
import json
import os
import random
import shutil
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import odd_json
import report_folders

from hvdtrain import files
from hvdtrain.core import recipe as recipes
from hvdtrain.errors import HvdtrainError, LabError
from hvdtrain.launch.topology import Topology
from hvdtrain.record import checkpoint, handover, reporter
from hvdtrain.record.folder import hold, identity_of, model_identity, open_run, resume_point
from hvdtrain.record.journal import Journal
from hvdtrain.record.trackers import process as tracker
from hvdtrain.tools import convert, predict, report, supervise, watch
from hvdtrain.tools import plan as dry_run
from hvdtrain.tools.bench import engines as bench

LABS = Path(__file__).resolve().parents[2] / "labs"
CANARY = "KNRYKNRYKNRY"
STRANGER = 65534
HOSTILE = Path("runs/linear/9999")
RECIPE = recipes.load("linear")
PLAN = report_folders.plan_of(RECIPE, 1, (1024, 256))
IDENTITY = identity_of(PLAN, "torch", {})
STEP = "checkpoints/step-00000040"
JSON_FILES = ("status.json", "plan.json", f"{STEP}/{checkpoint.META}", "lost.json", "scaling.json", "run.json")
NAMES = (
    *("recipe.yaml", "metrics.jsonl", "launches.jsonl", "report.html", ".lock", ".holder", "checkpoints", STEP),
    *(f"{STEP}/{checkpoint.ARRAYS}", "trackers", "trackers/wandb.json", "trackers/wandb.log", "timeline.json"),
    *("profile.json", "start-1", "history.json", "job.sh", *JSON_FILES),
)
EVIL = {"note": CANARY, CANARY: 1}


def run_folder(folder: Path, token: str) -> None:
    """An unfinished run with a checkpoint, and what the other tools read; `token` stands in every file."""
    run = report_folders.Run(folder, recipe="linear", ranks=1, examples=(1024, 256))
    run.launch(report_folders.BEGAN)
    run.train(40)
    run.event("note", token)
    run.status("running", error=token)
    (folder / "recipe.yaml").write_text(f"{recipes.dump(RECIPE)}" + (f"  {token}: 1\n" if token else ""))
    numbers = np.frombuffer((token or "0123").encode()[:4], np.float32)
    arrays = {f"{slot}.{name}": numbers for slot in ("model", "momentum_buffer") for name in ("weight", "bias")}
    arrays = {name: array.reshape((1, 1) if name.endswith("weight") else (1,)) for name, array in arrays.items()}
    meta = {"step": 40, "epoch": 0, "sample": 640, "plateau": {"best": None, "waited": 0, "drops": 0}, "scaler": {}}
    meta |= {"train": {"loss": 1.5, "count": 64.0, "metrics": {}}, "framework": "torch", "recipe": "linear"}
    meta |= {"model": model_identity(PLAN), "optimizer": {}, "data": {token: 1} if token else {}}
    meta |= {"samples": {}, "code": {}, "ended": token}
    checkpoint.commit(folder / "checkpoints", checkpoint.Checkpoint(arrays, meta), keep=2)
    for name in ("trackers", "start-1"):
        (folder / name).mkdir()
    others = {"trackers/wandb.json": {"id": token, "last": {}}, "trackers/wandb-start.json": {}, "timeline.json": []}
    others |= {
        "lost.json": {"rank": 1, "host": "a", "why": token, "step_id": "1.0"},
        "history.json": [],
        "run.json": {},
    }
    others |= {
        "scaling.json": {"batch": 16, "cores": 2, "ranks_per_node": 2, "weak": {"1": [1.0], token or "2": [1.05]}}
    }
    for name, value in others.items():
        (folder / name).write_text(json.dumps(value))
    for name in ("report.html", ".lock", "trackers/wandb.log", "profile.json", "job.sh"):
        (folder / name).write_text(f"#!/bin/bash\n{token}\n")


class Scene:
    """The current folder with a hostile run in it, drawn by `r`, beside a private one; they are compared at the end."""

    def __init__(self, r: random.Random) -> None:
        self.r = r
        for path in (Path("private"), Path("runs")):
            if path.exists():
                shutil.rmtree(path)
        shutil.copytree("templates/private", "private", symlinks=True)
        self.private = Path("private").absolute()
        self.before = tree(self.private)
        shutil.copytree("templates/run", HOSTILE, symlinks=True)
        self.owner = r.choice([0, STRANGER, STRANGER]) if os.geteuid() == 0 else 0
        for _ in range(r.choice([1, 1, 2, 4])):
            self.spoil(HOSTILE / r.choice(NAMES))
        self.give_away()

    def give_away(self) -> None:
        """Makes the hostile run its owner's, but for what is linked there of the private one."""
        for path in [HOSTILE, *HOSTILE.rglob("*")] if self.owner else []:
            if stat.S_ISDIR(path.lstat().st_mode) or path.lstat().st_nlink == 1:
                os.chown(path, self.owner, self.owner, follow_symlinks=False)

    def spoil(self, path: Path) -> None:
        """Puts something else in the path's place."""
        r, of_private = self.r, self.private / path.relative_to(HOSTILE)
        if not path.parent.is_dir() or path.parent.resolve() != path.parent.absolute():
            return
        kinds: list[Callable[[], object]] = [
            lambda: path.symlink_to(of_private),
            lambda: path.symlink_to(of_private),
            lambda: path.symlink_to(self.private / r.choice(NAMES)),
            lambda: path.symlink_to(r.choice(["/dev/zero", "/dev/full", "/proc/self/mem", "nothing", path.name, "."])),
            lambda: os.link(of_private, path) if self.owner and of_private.is_file() else None,
            lambda: os.mkfifo(path),
            lambda: named_socket(path),
            path.mkdir,
            lambda: None,
            lambda: path.write_bytes(r.randbytes(r.choice([0, 1, 100, 5000]))),
        ]
        if os.path.lexists(path) and stat.S_ISREG(path.lstat().st_mode) and path.lstat().st_nlink == 1:
            content = path.read_bytes() if path.stat().st_size < 1 << 24 else b""
        else:
            content = b""
        if r.random() < 0.4 and content:
            damage(r, path, content)
            return
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        r.choice(kinds)()

    def check(self, printed: str) -> None:
        """Raises AssertionError where something private was printed, written or changed."""
        after = tree(self.private)
        changed = {name for name, _ in after.items() ^ self.before.items()}
        assert not changed, f"changed: {sorted(changed)}"
        assert CANARY not in printed, f"printed: {printed[-300:]}"
        private = {path.stat().st_ino for path in self.private.rglob("*")}
        for path in Path("runs").rglob("*"):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_ino not in private and status.st_size < 1 << 24:
                assert CANARY.encode() not in path.read_bytes(), f"written: {path}"
        assert not Path("report.html").exists() or CANARY not in Path("report.html").read_text()


def named_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(path.parent):
        listening.bind(path.name)


def damage(r: random.Random, path: Path, content: bytes) -> None:
    """Another text, size or mode for a file."""
    kind = r.randrange(6)
    if kind == 0:
        with path.open("r+b") as file:
            file.truncate(1 << r.choice([24, 40, 43]))
    elif kind == 1:
        path.chmod(r.choice([0, 0o444, 0o777, 0o7777]))
    elif kind == 2:
        at = r.randrange(len(content))
        path.write_bytes(content[:at] + r.randbytes(r.choice([1, 8])) + content[at + r.choice([0, 1, 8]) :])
    elif kind == 3:
        path.write_bytes(content * r.choice([2, 50]))
    elif path.suffix == ".json" and (value := mapping(content)):
        text = next(odd_json.texts(value, 1, r.randrange(2**30)))
        if path.name == checkpoint.META:
            text = sealed(path.parent, text)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        path.write_bytes(content[: r.randrange(len(content))])


def mapping(content: bytes) -> dict:
    """Empty where the text is none, after another damage."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(content)
        return value if isinstance(value, dict) else {}
    return {}


def checksum(folder: Path, meta: dict) -> str:
    """That of a checkpoint's arrays and of its `meta` without one."""
    found = checkpoint._begun(meta)
    found.update((folder / checkpoint.ARRAYS).read_bytes())
    return found.hexdigest()


def sealed(folder: Path, text: str) -> str:
    """The metadata with the checksum that belongs to them, which a forger knows how to make."""
    with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError, OSError):
        meta = json.loads(text)
        meta.pop(checkpoint.CHECKSUM, None)
        meta[checkpoint.CHECKSUM] = checksum(folder, meta)
        return checkpoint._text(meta)
    return text


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Names, modes, times and bytes; reading changes none of them."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path.relative_to(folder))] = status.st_mode, status.st_mtime_ns, content
    return found


def read_convert(scene: Scene) -> None:
    convert.main([str(HOSTILE), "--to", scene.r.choice(["tensorflow", "tensorflow", "torch"])])


def read_report(scene: Scene) -> None:
    runs = scene.r.choice(
        [[str(HOSTILE)], [str(HOSTILE), str(HOSTILE)], ["--sweep", str(HOSTILE)], ["--sweep", "runs/linear"]]
    )
    report.main([*runs, "--format", scene.r.choice(["html", "md", "json", "json"])])


def read_watch(scene: Scene) -> None:
    watch.main([*scene.r.choice([[], [str(HOSTILE)], ["9999"]]), "--once"])


def read_run(scene: Scene) -> None:
    """As rank 0 of a new run of the recipe does, in the job's own folder or where it finds one."""
    folder, _ = open_run(PLAN, Topology.alone("here"), IDENTITY, None, "auto")
    train(folder)


def read_output(scene: Scene) -> None:
    """The same in a folder that the user names."""
    folder = hold(HOSTILE)
    try:
        resume_point(folder, IDENTITY)
        train(folder)
    finally:
        folder.lock.close()


def train(folder) -> None:
    """The files that a run writes."""
    launch = Journal(0.0)
    launch.open(folder.path, lambda age: {"kind": "launch", "age": age})
    launch.end("finished")
    launch.close()
    try:
        with contextlib.closing(reporter._reopen(folder.path / "metrics.jsonl", 41)) as lines:
            lines.write("{}\n")
        meta = {"step": 50, "model": model_identity(PLAN), "framework": "torch"}
        checkpoint.commit(folder.checkpoints, checkpoint.Checkpoint({}, meta), keep=1)
        folder.write_status("finished", step=50)
    finally:
        folder.lock.close()


def read_tracker(scene: Scene) -> None:
    tracker._Follower(HOSTILE / "trackers" / "wandb.json", print).known_id(True)


def read_supervised(scene: Scene) -> None:
    with contextlib.suppress(OSError), files.own_folder(HOSTILE) as folder:
        supervise._read_history(folder / "history.json")
        for name in ("run", "lost", "error"):
            handover.read(folder, name)
    run = handover.Report(run=str(HOSTILE.absolute()))
    supervise._newest_checkpoint(run)
    supervise._wait_for_release(run)


def read_state(scene: Scene) -> None:

    checkpoint.newest(HOSTILE / "checkpoints")


def read_named(scene: Scene) -> None:
    """Files that a user names, of which a link is followed: the message goes to the user alone."""
    r = scene.r
    tool = r.choice([dry_run.main, predict.main])
    given = [str(HOSTILE / "recipe.yaml")] if tool is dry_run.main else ["--from", str(HOSTILE / "scaling.json")]
    tool([*given, "--ranks", "2"])


def read_bench(scene: Scene) -> None:
    bench.read(HOSTILE)


def read_timeline(scene: Scene) -> None:
    sys.path.append(str(LABS)) if str(LABS) not in sys.path else None
    from labtools.profiling import read_timeline

    with contextlib.suppress(LabError):  # which may have two lines
        read_timeline(HOSTILE / "timeline.json")


def reader(act: Callable[[Scene], None]) -> Callable[[random.Random], None]:
    def read(r: random.Random) -> None:
        if not Path("templates").exists():
            run_folder(Path("templates/run"), "")
            run_folder(Path("templates/private"), CANARY)
        scene, message = Scene(r), ""
        try:
            act(scene)
        except HvdtrainError as error:
            message = str(error)
            raise
        finally:
            scene.check("" if act is read_named else f"{sys.stdout.getvalue()} {message}")

    return read


READERS = {
    f"folder_{name.removeprefix('read_')}": reader(act)
    for name, act in list(globals().items())
    if name.startswith("read_")
}
ALL = [READERS[name] for name in sorted(READERS)]
READERS["folders"] = lambda r: r.choice(ALL)(r)
