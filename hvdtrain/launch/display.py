"""Where rank 0's output ends: at a person's terminal, straight or through a launcher, or in a file.

horovodrun and srun read a rank's output from a pipe, and mpirun from a terminal that it makes for the rank, wherever
its own output goes. So the launcher's own output decides.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain import __version__
from hvdtrain.errors import TopologyError
from hvdtrain.launch.ancestors import PROC, above, arguments_of
from hvdtrain.launch.topology import discover
from hvdtrain.terminal import SCREEN, Display
from hvdtrain.untrusted import printable

PASSES_ON = {"torchrun"}
"""Launchers whose ranks inherit their output."""
REWRITES = {"horovodrun", "mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun"}
DAEMONS = {"prted", "orted", "hydra_pmi_proxy"}
"""On another host than the launcher's; a rank's output goes through one."""
MOST_ABOVE = 100


def display(launcher: str) -> Display:
    """That of this process, whose ranks were started by this launcher."""
    if not sys.stdout:  # it was closed
        return "file"
    is_terminal = sys.stdout.isatty() and (launcher != "srun" or sys.stdin.isatty())  # `srun -u` gives stdout one alone
    found = display_of(launcher, is_terminal, os.environ, os.getpid())
    return "lines" if found == "bar" and os.environ.get("TERM", "dumb") == "dumb" else found


def display_of(launcher: str, is_terminal: bool, environ: Mapping[str, str], pid: int, proc: Path = PROC) -> Display:
    """That of process `pid`; `is_terminal`: its own stdout is one."""
    parents = above(pid, MOST_ABOVE, proc)[1:]
    names = [name_of(arguments_of(parent, proc)) for parent in parents]
    launchers = [parent for parent, name in zip(parents, names, strict=True) if name in PASSES_ON | REWRITES]
    is_rewritten = launcher in REWRITES or not REWRITES.union(DAEMONS).isdisjoint(names)
    if is_terminal and not is_rewritten:
        return "bar"
    end = _stdout(launchers[-1] if launchers else pid, proc)
    if launchers and _is_terminal(end):
        return "lines"
    if launcher == "alone":
        return "file"
    if "slurmstepd" in names:
        return _through_srun(environ, proc) if end.startswith(("pipe:", "/dev/pts/")) else "file"
    return "file" if launchers else _of_job(environ)  # without any it runs on another host


def name_of(arguments: list[str]) -> str:
    """The program's name; of a Python program's, which is its script's or module's."""
    name = Path(arguments[0]).name.rstrip(":") if arguments else ""
    if name.startswith("python") and len(arguments) > 1:
        is_module = arguments[1] == "-m" and len(arguments) > 2
        name = arguments[2] if is_module else Path(arguments[1]).name
    if name.startswith("slurmstepd"):  # its title names the step too
        return "slurmstepd"
    return "torchrun" if name == "torch.distributed.run" else name


def _through_srun(environ: Mapping[str, str], proc: Path) -> Display:
    """By the output of this job's srun, where it runs on this host."""
    ends = [_stdout(pid, proc) for pid in _sruns(environ.get("SLURM_JOB_ID", ""), proc)]
    if not ends:
        return _of_job(environ)
    return "lines" if all(map(_is_terminal, ends)) else "file"


def _of_job(environ: Mapping[str, str]) -> Display:
    """Where the launcher's output cannot be seen: a job's script writes into a file, a person's srun or salloc not."""
    return "lines" if environ.get("SLURM_JOB_ID") and environ.get("ENVIRONMENT") != "BATCH" else "file"


def _sruns(job: str, proc: Path) -> list[int]:
    """This user's sruns of the job; those that were given no job made it themselves, and count where no other does."""
    sruns = [pid for pid in _own_processes(proc) if name_of(arguments_of(pid, proc)) == "srun"]
    jobs = {pid: _job_of(pid, proc) for pid in sruns}
    return [pid for pid in sruns if jobs[pid] == job] or [pid for pid in sruns if jobs[pid] is None]


def _own_processes(proc: Path) -> Iterator[int]:
    for entry in proc.iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                yield int(entry.name)
        except OSError:  # it has ended
            continue


def _job_of(pid: int, proc: Path) -> str | None:
    try:
        variables = (proc / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return next((text.partition("=")[2] for text in variables if text.startswith("SLURM_JOB_ID=")), None)


def _stdout(pid: int, proc: Path) -> str:
    try:
        return str((proc / str(pid) / "fd" / "1").readlink())
    except OSError:
        return ""


def _is_terminal(end: str) -> bool:
    return end.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))


def greet(adapter: str, argv: Sequence[str]) -> None:
    """On rank 0: prints what begins, and shows from now on what is waited for."""
    try:
        topology = discover(os.environ)
    except TopologyError:  # reported where the run begins
        return
    if not topology.is_rank_0 or not argv or not {"-h", "--help"}.isdisjoint(argv):
        return
    what = adapter if argv[0].startswith("-") else f"{printable(argv[0])} with {adapter}"
    ranks = "1 rank" if topology.size == 1 else f"{topology.size} ranks"
    SCREEN.print(f"INFO - hvdtrain {__version__}: {what}, {ranks}, {topology.launcher}")
    SCREEN.open(display(topology.launcher))
    SCREEN.waiting("importing hvdtrain")
