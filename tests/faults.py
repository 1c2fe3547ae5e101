"""Faults that are provoked in trainings of two ranks, and what must come of each: `python tests/faults.py [WORD ...]`.

Prints a line for the fault of that name, or for each whose name holds all words: how many seconds after it the launcher
has ended, and nothing is left of the job; exit code, status, and what is not as expected. The exit code is the number
of faults of which something is not. Some want root, to have a disk of their own.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).with_name("support")))

from paths import REPOSITORY, SUPPORT
from ranks import LAUNCHERS, Ranks, fields, parent, shared_memory, started, tagged

FAULT_STEP = 18
LIMIT = 600.0
"""The most seconds until nothing is left."""
FRONTS = {
    "loop": (["faulty.py", "loop"], {}),
    "recipe": (["-m", "hvdtrain.torch", "faulty.yaml"], {}),
    "readers": (["-m", "hvdtrain.torch", "faulty.yaml", "--workers", "1"], {}),
    "keras": (["faulty.py", "keras"], {"TF_CPP_MIN_LOG_LEVEL": "3"}),
    "lightning": (["faulty.py", "lightning"], {}),
}
DDP = {"HVDTRAIN_ENGINE": "ddp", "FAULT_STRATEGY": "ddp"}


@dataclass
class Job:
    """A training that has begun."""

    ranks: Ranks
    folder: Path
    shared: set[str] = field(default_factory=set)
    """The files in /dev/shm that its processes have in their memory, shortly before the fault."""

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def steps(self, rank: int = 0) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / f"step.{rank}").read_text())
        return 0

    def look(self) -> None:
        """Notes what is in `shared`."""
        if self.steps() >= FAULT_STEP - 4 and not self.shared:
            self.shared = {"", *shared_memory(tagged(self.ranks.tag))}

    def rank(self, number: int) -> int:
        """The process of a rank."""
        names = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
        for pid in tagged(self.ranks.tag):
            given = dict(pair.partition("=")[::2] for pair in fields(pid, "environ"))
            command = fields(pid, "cmdline")
            if str(number) in (given.get(name) for name in names) and set(command) & {"faulty.py", "faulty.yaml"}:
                return pid
        raise LookupError(f"no rank {number}")

    def reader(self, of: int) -> int:
        """The process of that rank that reads data."""
        return next(pid for pid in tagged(self.ranks.tag) if parent(pid) == self.server(of))

    def server(self, of: int) -> int:
        """The process from which that rank's readers are forked."""
        rank = self.rank(of)
        return next(
            pid for pid in tagged(self.ranks.tag) if parent(pid) == rank and "forkserver" in str(fields(pid, "cmdline"))
        )


Act = Callable[[Job], None]


def sent(name: str, to: Callable[[Job], int]) -> Act:
    return lambda job: os.kill(to(job), signal.Signals[name])


def to_group(name: str) -> Act:
    return lambda job: os.killpg(job.ranks.process.pid, signal.Signals[name])


def to_launcher(name: str) -> Act:
    return sent(name, lambda job: job.ranks.process.pid)


def kill_both(job: Job) -> None:
    for pid in [job.rank(0), job.rank(1)]:
        os.kill(pid, signal.SIGKILL)


def spoil_newest(job: Job) -> None:
    """Cuts the newest checkpoint, and ends the job."""
    newest = max((job.run / "checkpoints").glob("step-*"))
    os.truncate(newest / "state.safetensors", 100)
    os.kill(job.rank(1), signal.SIGKILL)


def fill_disk(job: Job) -> None:
    with contextlib.suppress(OSError), (job.run / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def unmount(job: Job) -> None:
    subprocess.run(["umount", "-l", job.run], check=True)


def suspend_all(job: Job) -> None:
    """As `scontrol suspend`, for longer than a rank may be silent while the others run."""
    pids = [job.rank(0), job.rank(1)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(70 if number == signal.SIGSTOP else 0)


@dataclass(frozen=True)
class Fault:
    """A fault, and what must come of it."""

    front: str
    launcher: str
    what: str = ""
    """As in FAULT of support/faulty.py, without the step; a step may be given."""
    act: Act | None = None
    """What happens from outside, once the ranks are at FAULT_STEP."""
    codes: tuple[int, ...] = (1,)
    state: str = "failed"
    says: str = ""
    """A regular expression that the output must match."""
    tracebacks: int = 0
    """The most that may be printed."""
    resumes: bool = False
    """Whether the same program then ends with the weights of an undisturbed training."""
    ranks: int = 2
    disk: str = ""
    """The size of a file system of its own for the run folder."""
    until: str = ""
    """A signal that the launcher gets once the output says that."""
    pipe: str = ""
    """A command of the shell that reads the output."""
    environ: dict[str, str] = field(default_factory=dict)


PROGRAMS = 1  # the traceback of the program itself
LOST = r"rank 1 on \S+ ended without a message"
LOST_0 = LOST.replace("1", "0")
KILLED = {"codes": (1, 137), "says": LOST}
SLOWER = {"FAULT_PAUSE": "0.2"}
LEFT = r"rank 1 on \S+ exited with code"
FINISHED = {"codes": (0,), "state": "finished"}
TERMINATED = {"codes": (143,), "state": "stopped", "says": "SIGTERM"}
ERROR = {"says": "planted", "tracebacks": PROGRAMS}
FAULTS = {
    # ranks
    "rank 0 killed": Fault("loop", "mpi", "0 SIGKILL", codes=(1, 137), state="running", says=LOST_0),
    "rank 1 killed": Fault("loop", "mpi", "1 SIGKILL", **KILLED, resumes=True),
    "rank 1 killed, recipe": Fault("recipe", "mpi", "1 SIGKILL", **KILLED),
    "rank 0 killed, recipe": Fault("recipe", "gloo", "0 SIGKILL", codes=(1, 137), state="running", says=LOST_0),
    "rank 1 killed, Keras": Fault("keras", "gloo", "1 SIGKILL", **KILLED, resumes=True),
    "rank 1 killed, Lightning": Fault("lightning", "torchrun", "1 SIGKILL", **KILLED, resumes=True),
    "rank 2 of 3 killed": Fault(
        "loop",
        "mpi",
        "2 SIGKILL",
        codes=(1, 137),
        says=LOST.replace("1", "2", 1),
        ranks=3,
        environ={"FAULT_BATCH": "30"},
    ),
    "both ranks killed": Fault("loop", "gloo", act=kill_both, codes=(137,), state="running"),
    "segmentation fault": Fault("loop", "mpi", "1 segmentation fault", codes=(1, 139), says=LOST),
    "abort": Fault("loop", "gloo", "1 abort", codes=(1, 134), says=LOST),
    "out of memory": Fault("loop", "mpi", "1 memory", says="MemoryError", tracebacks=PROGRAMS),
    "replaced by another program": Fault("loop", "gloo", "1 exec", says=LOST),
    "deadlock": Fault(
        "loop", "mpi", "1 deadlock", says=r"rank 1 on \S+.*faulty.py", until="SIGTERM", codes=(143,), state=""
    ),
    "SIGSTOP of rank 1": Fault("loop", "mpi", "1 SIGSTOP", codes=(1, 137), says="no heartbeat from rank 1"),
    "SIGSTOP of rank 0": Fault(
        "recipe", "gloo", "0 SIGSTOP", codes=(1, 137), state="running", says="no heartbeat from rank 0"
    ),
    "SIGSTOP of rank 0 over MPI": Fault(
        "loop", "mpi", "0 SIGSTOP", codes=(1, 137), state="running", says="no heartbeat from rank 0"
    ),
    "all ranks suspended": Fault("loop", "gloo", act=suspend_all, **FINISHED),
    # a program that leaves
    "exit 0 of rank 1": Fault("loop", "mpi", "1 exit 0", says=LEFT),
    "exit 3 of rank 1": Fault("loop", "gloo", "1 exit 3", codes=(1, 3), says=LEFT),
    "exit 0 of rank 0": Fault("loop", "mpi", "0 exit 0", says=LEFT.replace("1", "0", 1)),
    "exit 0 of rank 1, ddp": Fault("loop", "torchrun", "1 exit 0", says=LEFT),
    "exit 0 of rank 1, recipe": Fault("recipe", "mpi", "1 exit 0", says=LEFT),
    "exit 0 of rank 1, Keras": Fault("keras", "mpi", "1 exit 0", says=LEFT),
    "exit 0 of rank 1, Lightning": Fault("lightning", "gloo", "1 exit 0", says=LEFT),
    "exit 0 of all": Fault("loop", "mpi", "all exit 0", codes=(0,), state="left", says="18 of 60"),
    "exit 3 of all": Fault("loop", "gloo", "all exit 3", codes=(3,), state="left", says="18 of 60"),
    "exit 0 of all before the first step": Fault("loop", "mpi", "all 0 exit 0", codes=(0,), state="left"),
    "_exit 0": Fault("loop", "gloo", "1 _exit 0", says=LOST),
    "_exit 7": Fault("loop", "mpi", "1 _exit 7", codes=(1, 7), says=rf"{LOST}|Exit code: +7", resumes=True),
    # errors
    "error": Fault("loop", "mpi", "1 error", **ERROR),
    "error in validation": Fault("loop", "mpi", "1 validation: error", **ERROR),
    "error in the data set": Fault(
        "loop", "gloo", "1 data: error", codes=(2,), says="planted", tracebacks=PROGRAMS, resumes=True
    ),
    "error in a recipe's loss": Fault("recipe", "torchrun", "1 error", codes=(1, 2), says=r"ProgramError.*faulty.py"),
    "error in a reader": Fault("readers", "gloo", "1 reader: error", codes=(2,), says=r"faulty.py"),
    "error in a callback, Keras": Fault("keras", "mpi", "1 error", **ERROR),
    "error in validation, Keras": Fault("keras", "gloo", "0 validation: error", **ERROR),
    "error in a callback, Lightning": Fault("lightning", "mpi", "1 error", **ERROR),
    "BaseException": Fault("loop", "mpi", "1 BaseException", says="planted", tracebacks=PROGRAMS),
    "message of 5 MB": Fault("loop", "mpi", "1 long message", says="x" * 100, tracebacks=PROGRAMS),
    "a message that raises": Fault("loop", "mpi", "1 message raises", says="Unprintable", tracebacks=PROGRAMS + 1),
    "endless recursion": Fault("loop", "gloo", "1 recursion", says="RecursionError", tracebacks=PROGRAMS),
    "error in a forked child": Fault("loop", "mpi", "0 fork raises", tracebacks=PROGRAMS, **FINISHED),
    "error in a thread": Fault("loop", "mpi", "1 thread raises", tracebacks=PROGRAMS, **FINISHED),
    # descriptors, clocks, folders
    "descriptors closed": Fault("loop", "mpi", "1 descriptors closed", codes=(1, 2, 134, 139)),
    "no descriptor left": Fault("loop", "mpi", "0 no descriptor left", codes=(1, 2), tracebacks=PROGRAMS),
    "stdout closed": Fault("loop", "gloo", "0 stdout closed", **FINISHED),
    "files of 1 kB at most": Fault("loop", "gloo", "0 small files", codes=(2,), says="OutputError"),
    "clock put on": Fault("loop", "mpi", "all clock on", **FINISHED),
    "clock put back": Fault("loop", "gloo", "all clock back", **FINISHED),
    "folder of work removed": Fault("loop", "gloo", "all no folder of work", **FINISHED),
    "run folder removed": Fault("loop", "gloo", "0 run removed", codes=(2,), state="", says="OutputError"),
    "run folder replaced": Fault("loop", "mpi", "0 run replaced", codes=(2,), state="", says="OutputError"),
    "run folder unmounted": Fault(
        "loop", "mpi", act=unmount, disk="8m", codes=(2,), state="", says="OutputError", environ=SLOWER
    ),
    "disk full": Fault(
        "loop",
        "mpi",
        act=fill_disk,
        disk="600k",
        codes=(2,),
        says="OutputError.*[Ss]pace",
        environ=SLOWER,
    ),
    "newest checkpoint cut": Fault("loop", "mpi", act=spoil_newest, **KILLED, resumes=True),
    # readers
    "rank with readers killed": Fault("readers", "mpi", "1 SIGKILL", **KILLED),
    "rank with readers killed over Gloo": Fault("readers", "gloo", "1 SIGKILL", **KILLED),
    "rank with readers killed, torchrun": Fault("readers", "torchrun", "1 SIGKILL", **KILLED),
    "reader kills itself": Fault("readers", "mpi", "1 reader: SIGKILL", codes=(2,), says="reader.*SIGKILL"),
    "reader killed": Fault(
        "readers", "gloo", act=sent("SIGKILL", lambda job: job.reader(1)), codes=(2,), says="reader.*SIGKILL"
    ),
    "the readers' server killed": Fault(
        "readers", "gloo", act=sent("SIGKILL", lambda job: job.server(1)), codes=(2,), says="reader.*forkserver"
    ),
    "launcher of readers killed": Fault("readers", "gloo", act=to_launcher("SIGKILL"), codes=(-9,), state="stopped"),
    "launcher of readers terminated": Fault("readers", "gloo", act=to_launcher("SIGTERM"), **TERMINATED),
    # signals
    "SIGTERM to rank 1": Fault("loop", "mpi", "1 SIGTERM", **TERMINATED, resumes=True),
    "SIGTERM to rank 1, Keras": Fault("keras", "mpi", "1 SIGTERM", **TERMINATED, resumes=True),
    "SIGTERM to rank 1, Lightning": Fault("lightning", "mpi", "1 SIGTERM", **TERMINATED, resumes=True),
    "SIGUSR2 to rank 1": Fault(
        "loop", "gloo", "1 SIGUSR2", codes=(140,), state="stopped", says="SIGUSR2", resumes=True
    ),
    "SIGTERM to the launcher": Fault("loop", "mpi", act=to_launcher("SIGTERM"), **TERMINATED),
    "SIGTERM to torchrun": Fault(
        "loop", "torchrun", act=to_launcher("SIGTERM"), **{**TERMINATED, "codes": (1,)}, resumes=True
    ),
    "SIGHUP to the group": Fault(
        "loop",
        "gloo",
        act=to_group("SIGHUP"),
        codes=(143, 137),
        state="stopped",  # 137 where the end takes 10 s
    ),
    "Ctrl-C to the group": Fault("loop", "mpi", act=to_group("SIGINT"), codes=(130,), state="stopped"),
    "Ctrl-C twice to rank 1": Fault("loop", "mpi", "1 interrupted twice", codes=(1, 130), state="", resumes=True),
    "launcher killed": Fault("loop", "mpi", act=to_launcher("SIGKILL"), codes=(-9,), state="stopped", says="launcher"),
    "launcher killed over Gloo": Fault(
        "loop", "gloo", act=to_launcher("SIGKILL"), codes=(-9,), state="stopped", says="launcher"
    ),
    "torchrun killed": Fault(
        "loop", "torchrun", act=to_launcher("SIGKILL"), codes=(-9,), state="stopped", says="launcher", resumes=True
    ),
    "a reader of the output that ends": Fault("loop", "mpi", pipe="head -3", **FINISHED),
    # refused
    "plain ddp with FaultTolerance": Fault(
        "lightning", "torchrun", codes=(1, 2), state="", says="RankDDPStrategy", environ={"FAULT_STRATEGY": "plain ddp"}
    ),
}


def provoke(fault: Fault, folder: Path, wanted: Path | None = None) -> str:
    """Trains with the fault in that folder. Returns a line of the table, which ends with what is not as expected.
    `wanted`: the weights of an undisturbed training."""
    run = folder / "run"
    if fault.disk:
        run.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={fault.disk}", "none", run], check=True)
    try:
        _, moments, output, code, left = _trained(fault, folder)
        state = _state(run)
    finally:
        if fault.disk:
            subprocess.run(["umount", "-l", run], check=False, stderr=subprocess.DEVNULL)
    wrong = [] if moments[0] or not (fault.what or fault.act) else ["there was no fault"]
    wrong += [] if code in fault.codes else [f"exit code of {fault.codes}"]
    wrong += [] if state == fault.state or not fault.state else [f"status {fault.state}"]
    wrong += [] if re.search(fault.says, output) else [f"/{fault.says[:60]}/"]
    printed = output.count("Traceback (most recent call last)")
    printed -= (fault.launcher == "torchrun") + len(re.findall(r"Traceback.*\n.*resource_tracker", output))  # not ours
    wrong += [f"{printed} tracebacks"] if printed > fault.tracebacks else []
    wrong += [f"left: {', '.join(left)}"] if left else []
    if fault.resumes and wanted:
        _trained(replace(fault, act=None, environ={**fault.environ, "FAULT_PAUSE": "0"}), folder)
        weights, begun = folder / "weights.npy", [line["step"] for line in _launches(run)]
        wrong += [] if begun and begun[-1] else ["resumed"]
        is_equal = weights.exists() and np.array_equal(np.load(weights), np.load(wanted))
        wrong += [] if is_equal else ["the weights of an undisturbed training"]
    since = moments[0] or moments[1]
    until = " ".join(f"{max(0.0, moment - since):6.1f}" for moment in moments[1:])
    last = next((line for line in reversed(output.splitlines()) if "Error" in line), "")[:150]
    verdict = f"NOT {'; '.join(wrong)}  {last}" if wrong else "as expected"
    return f"{until} s  code {code:4}  {state or 'no status':9}  {verdict}"


def _trained(fault: Fault, folder: Path) -> tuple[Job, list[float], str, int, list[str]]:
    """The job; when the fault, the launcher's end and the end of everything came; output, exit code, what is left."""
    program, environ = FRONTS[fault.front]
    argv = [*LAUNCHERS[fault.launcher](fault.ranks), sys.executable, *program]
    argv += ["--output", str(folder / "run")] if "-m" in program else []
    if fault.launcher == "torchrun":
        environ = {**environ, **DDP}
    where, _, what = fault.what.partition(" ")
    step = re.match(r"\d+ ", what)
    planted = f"{where} {what if step else f'{FAULT_STEP} {what}'}" if what else ""
    pipe = ["bash", "-c", f'"$@" | {fault.pipe}; exit ${{PIPESTATUS[0]}}', "bash"] if fault.pipe else []
    given = {
        **environ,
        "FAULT": planted,
        "FAULT_FOLDER": str(folder),
        "PYTHONPATH": f"{SUPPORT}:{REPOSITORY}",
        **fault.environ,
    }
    with started("alone", 1, ["setsid", *pipe, *argv], SUPPORT, **given) as ranks:
        job, fired, limit = Job(ranks, folder), 0.0, time.time() + LIMIT
        while ranks.process.poll() is None and time.time() < limit:
            job.look()
            if fault.act and not fired and job.steps() >= FAULT_STEP:
                fault.act(job)
                fired = time.time()
            if fault.until and re.search(fault.says, ranks.out.read_text() + ranks.err.read_text()):
                to_launcher(fault.until)(job)
                fault = replace(fault, until="")
            ranks.nap()
        ended = time.time()
        while tagged(ranks.tag) and time.time() < max(limit, ended + 30):
            time.sleep(0.1)
        fired = max([fired, *(path.stat().st_mtime for path in folder.glob("fired.*"))])
        gone = time.time()
        left = [" ".join(fields(pid, "cmdline"))[:80] for pid in tagged(ranks.tag)]
        left += [path for path in job.shared if path and Path(path).exists()]
        output = ranks.out.read_text(errors="replace") + ranks.err.read_text(errors="replace")
        (folder / "output").write_text(output)
        code = ranks.process.poll()
    return job, [fired, ended, gone], output, -1000 if code is None else code, left


def _launches(run: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        lines = (run / "launches.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == "launch"]
    return []


def _state(run: Path) -> str:
    try:
        return json.loads((run / "status.json").read_text())["state"]
    except (OSError, ValueError, KeyError):
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--keep", type=Path, help="the folder in which the trainings stay")
    options = parser.parse_args()
    name = " ".join(options.words)
    names = [name] if name in FAULTS else [each for each in FAULTS if all(word in each for word in options.words)]
    folder, unexpected = options.keep or Path(tempfile.mkdtemp(prefix="faults-")), 0
    wanted: dict[tuple[str, str, int], Path] = {}
    for number, name in enumerate(names, 1):
        fault = FAULTS[name]
        like = fault.front, fault.launcher, fault.ranks
        if fault.resumes and like not in wanted:
            path = folder / f"undisturbed {' '.join(map(str, like))}"
            path.mkdir(parents=True)
            _trained(Fault(*like[:2], ranks=fault.ranks, environ={"FAULT_PAUSE": "0"}), path)
            wanted[like] = path / "weights.npy"
        (path := folder / name).mkdir(parents=True)
        line = provoke(fault, path, wanted.get(like))
        unexpected += "as expected" not in line
        print(f"{number:3} {name:38} {fault.front:9} {fault.launcher:8} {line}", flush=True)
    print(f"{len(names) - unexpected} of {len(names)} as expected")
    if not options.keep:
        shutil.rmtree(folder)
    return unexpected


if __name__ == "__main__":
    sys.exit(main())
