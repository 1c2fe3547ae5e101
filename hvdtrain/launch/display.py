"""What a rank prints beside its log, and whether rank 0's output is shown at a terminal or written into a file.

horovodrun and srun read a rank's output from a pipe, and mpirun from a terminal that it makes for the rank, wherever
its own output goes. So the output of the launcher decides.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain import __version__
from hvdtrain.errors import TopologyError
from hvdtrain.launch.ancestors import PROC, above, arguments_of
from hvdtrain.launch.topology import Topology, discover, programs
from hvdtrain.launch.topology import launcher as row_of
from hvdtrain.terminal import SCREEN, Display, Show, Status, counted, hidden
from hvdtrain.untrusted import printable

MOST_ABOVE = 100
COLUMNS, PREFIX = 80, len("[1,0]<stdout>: ")
"""The columns of a terminal that is on another host, and those that a launcher may take of them."""


def display(launcher: str) -> Display:
    """How this process, started by this launcher, shows its progress."""
    if not sys.stdout:  # it was closed
        return "file"
    # `srun -u` makes a terminal for stdout alone.
    is_terminal = sys.stdout.isatty() and (launcher != "srun" or sys.stdin.isatty())
    found = display_of(launcher, is_terminal, os.environ, os.getpid())
    return "lines" if found == "bar" and os.environ.get("TERM", "dumb") == "dumb" else found


def display_of(launcher: str, is_terminal: bool, environ: Mapping[str, str], pid: int, proc: Path = PROC) -> Display:
    """How process `pid` shows its progress; `is_terminal`: whether its own stdout is a terminal."""
    parents = above(pid, MOST_ABOVE, proc)[1:]
    names = [name_of(arguments_of(parent, proc)) for parent in parents]
    launchers = _launchers(pid, proc)
    is_rewritten = row_of(launcher).rewrites_output or not programs(rewriting=True).isdisjoint(names)
    if is_terminal and not is_rewritten:
        return "bar"
    end = _stdout(launchers[-1] if launchers else pid, proc)
    if launchers and _is_terminal(end):
        return "lines"
    if launcher == "alone":
        return "file"
    if "slurmstepd" in names and end.startswith(("pipe:", "/dev/pts/")):
        if ends := [_stdout(srun, proc) for srun in _sruns(environ.get("SLURM_JOB_ID", ""), proc)]:
            return "lines" if all(map(_is_terminal, ends)) else "file"
    elif launchers or "slurmstepd" in names:
        return "file"
    # The launcher runs on another host: a job script writes into a file, a person's srun or salloc to a terminal.
    return "lines" if environ.get("SLURM_JOB_ID") and environ.get("ENVIRONMENT") != "BATCH" else "file"


def columns(launcher: str) -> int | None:
    """How many columns a line of this process may take where a person reads it; None where it goes into a file."""
    kind = display(launcher)
    if kind == "file":
        return None
    outermost, found = [os.getpid(), *_launchers(os.getpid(), PROC)][-1], 0
    with contextlib.suppress(OSError):
        end = os.open(PROC / f"{outermost}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.get_terminal_size(end).columns
        finally:
            os.close(end)
    return (found or COLUMNS) - (PREFIX if kind == "lines" else 0)


def _launchers(pid: int, proc: Path) -> list[int]:
    """The launchers among the ancestors of a process on this host, the nearest first."""
    known = programs()
    return [each for each in above(pid, MOST_ABOVE, proc)[1:] if name_of(arguments_of(each, proc)) in known]


def name_of(arguments: list[str]) -> str:
    """The program's name; for a Python program, that of its script or module."""
    name = Path(arguments[0]).name.rstrip(":") if arguments else ""
    if name.startswith("python") and len(arguments) > 1:
        is_module = arguments[1] == "-m" and len(arguments) > 2
        name = arguments[2] if is_module else Path(arguments[1]).name
    if name.startswith("slurmstepd"):  # its title names the step too
        return "slurmstepd"
    return "torchrun" if name == "torch.distributed.run" else name


def _sruns(job: str, proc: Path) -> list[int]:
    """This user's srun processes of the job. An srun without a job in its environment has made the job
    itself; it counts where there is no other."""
    jobs: dict[int, str | None] = {}
    for entry in proc.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                pid = int(entry.name)
                if name_of(arguments_of(pid, proc)) == "srun":
                    jobs[pid] = _job_of(pid, proc)
    return [pid for pid in jobs if jobs[pid] == job] or [pid for pid in jobs if jobs[pid] is None]


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
    """On rank 0: prints what is started, and from now on shows what the process waits for."""
    try:
        topology = discover(os.environ)
    except TopologyError:  # reported where the run begins
        return
    if not topology.is_rank_0 or not argv or not {"-h", "--help", "--json"}.isdisjoint(argv):
        return
    what = adapter if argv[0].startswith("-") else f"{printable(argv[0])} with {adapter}"
    SCREEN.print(f"INFO - hvdtrain {__version__}: {what}, {counted(topology.size, 'rank')}, {topology.launcher}")
    SCREEN.open(display(topology.launcher), columns(topology.launcher))
    SCREEN.waiting("importing hvdtrain")


def follow(topology: Topology) -> None:
    """On rank 0: shows from now on what a program waits for, in lines. The screen of a recipe is open already."""
    if topology.is_rank_0 and SCREEN.display == "file":
        kind = display(topology.launcher)
        SCREEN.open("shared" if kind == "bar" else kind, columns(topology.launcher))


def print_line(topology: Topology, kind: str, text: str) -> None:
    """Prints an error or a warning, by its kind, as one line of this rank on stderr."""
    rank = f" (rank {topology.rank} on {topology.host})" if topology.size > 1 else ""
    with contextlib.suppress(OSError, ValueError):  # the reader may be gone
        print(f"{kind}{rank}: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def shown(topology: Topology, text: str) -> Iterator[Show]:
    """Shows `text` at rank 0's terminal or its launcher's while the block runs, and gives a function that replaces it.
    Nothing is shown on other ranks and in files."""
    kind = display(topology.launcher) if topology.is_rank_0 else "file"
    if kind == "file" and topology.launcher != "alone":
        yield hidden
        return
    with Status(text, as_lines=kind == "lines") as status:
        yield status.update
