"""What a rank prints beside its log, and whether rank 0's output is shown at a terminal or written into a file.

horovodrun and srun read a rank's output from a pipe, and mpirun from a terminal that it makes for the rank, wherever
its own output goes. So the output of the launcher decides.
"""

import contextlib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain import __version__
from hvdtrain.errors import TopologyError
from hvdtrain.launch import topology as topologies
from hvdtrain.launch.ancestors import above, arguments_of
from hvdtrain.launch.topology import Launcher, Topology, discover
from hvdtrain.terminal import SCREEN, Display, Show, Status, counted, hidden
from hvdtrain.untrusted import printable

MOST_ABOVE = 100
COLUMNS, PREFIX = 80, len("[1,0]<stdout>: ")
"""The columns of a terminal that is on another host, and those that a launcher may take of them."""


def screen(launcher: str) -> tuple[Display, int | None]:
    """How this process, started by this launcher, shows its progress, and how many columns a line may take where a
    person reads it; None where it goes into a file."""
    if not sys.stdout:  # it was closed
        return "file", None
    launchers = _launchers()
    columns = _columns([os.getpid(), *launchers][-1])
    # `srun -u` makes a terminal for stdout alone.
    row = topologies.launcher(launcher)
    is_terminal = sys.stdout.isatty() and (not row.by_slurm or sys.stdin.isatty())
    if is_terminal and not any(each.rewrites_output for each in (row, *launchers.values())):
        return "lines" if os.environ.get("TERM", "dumb") == "dumb" else "bar", columns
    if launchers and columns:
        return "lines", columns - PREFIX
    # Else srun reads the output, mostly on another host: a job script's writes into a file, a person's to a terminal.
    is_persons = os.environ.get("SLURM_JOB_ID") and os.environ.get("ENVIRONMENT") != "BATCH"
    if row is topologies.ALONE or columns == 0 or not is_persons:
        return "file", None
    return "lines", COLUMNS - PREFIX


def _launchers() -> dict[int, Launcher]:
    """The launchers among the ancestors of this process on this host, the nearest first."""
    rows = {program: row for row in topologies.LAUNCHERS for program in (*row.programs, *row.runs_as)}
    found = {}
    for pid in above(os.getppid(), MOST_ABOVE):
        program, *words = arguments_of(pid)[:3] or [""]
        if Path(program).name.startswith("python"):  # its script, or the module behind -m
            program = next((word for word in words if not word.startswith("-")), "")
        if row := rows.get(Path(program).name):
            found[pid] = row
    return found


def _columns(pid: int) -> int | None:
    """The columns of the terminal to which a process writes, 0 of a file, None where it is neither."""
    with contextlib.suppress(OSError):
        end = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return 0 if stat.S_ISREG(os.fstat(end).st_mode) else os.get_terminal_size(end).columns or COLUMNS
        finally:
            os.close(end)
    return None


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
    SCREEN.open(*screen(topology.launcher))
    SCREEN.waiting("importing hvdtrain")


def follow(topology: Topology, *, is_program: bool) -> None:
    """On rank 0: shows from now on what a program waits for, in lines, and the first one at once where there are other
    ranks. The screen of a recipe is open already."""
    if not topology.is_rank_0:
        return
    if is_program and topology.size > 1:
        program = printable(Path(sys.argv[0]).name, 200)
        SCREEN.print(f"INFO - hvdtrain {__version__}: {program}, {counted(topology.size, 'rank')}, {topology.launcher}")
    if SCREEN.display == "file":
        kind, columns = screen(topology.launcher)
        SCREEN.open("shared" if kind == "bar" else kind, columns)


def print_line(topology: Topology, kind: str, text: str) -> None:
    """Prints an error or a warning, by its kind, as one line of this rank on stderr."""
    rank = f" (rank {topology.rank} on {topology.host})" if topology.size > 1 else ""
    with contextlib.suppress(OSError, ValueError):  # the reader may be gone
        print(f"{kind}{rank}: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def shown(topology: Topology, text: str) -> Iterator[Show]:
    """Shows `text` at rank 0's terminal or its launcher's while the block runs, and gives a function that replaces it.
    Nothing is shown on other ranks and in files."""
    kind = screen(topology.launcher)[0] if topology.is_rank_0 else "file"
    if kind == "file" and not topology.is_alone:
        yield hidden
        return
    with Status(text, as_lines=kind == "lines") as status:
        yield status.update
