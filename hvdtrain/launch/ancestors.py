"""The processes above a rank, among which is the shell in which horovodrun waits for mpirun; and those below it.

A signal to horovodrun reaches this shell alone. The shell dies, and mpirun continues with all ranks, so that the ranks
themselves have to notice its end.
"""

import contextlib
import functools
import multiprocessing
import os
import re
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path

from hvdtrain.launch import topology

PROC = Path("/proc")
MOST_ABOVE = 4
"""The most processes between a rank and that shell: mpirun's own, and Hydra's proxy."""
FAR_ABOVE = 8
"""The most processes between a rank and the launcher that a person typed."""
SERVERS = {
    # Launchers kill a rank's process group, and its children: this one then has semaphores to remove.
    "resource_tracker": "import os; os.fork() and os._exit(0); os.setsid(); ",
    "forkserver": "import atexit, os; atexit.register(os._exit, 0); ",  # to free PyTorch would take it a second
}
"""By the name of a server of multiprocessing, what it does before and after its own program."""


class LauncherShell:
    """Notices the end of that shell, or of torchrun or horovodrun, where one of them is above this process."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        for pid in above(os.getppid()):
            if is_launcher_shell(arguments := arguments_of(pid)) or is_runner(arguments):
                with contextlib.suppress(OSError):  # a kernel without it; or the shell has ended since
                    self._descriptor = os.pidfd_open(pid)
                break

    def take_end(self) -> bool:
        """Whether the shell has ended. Returns True only once."""
        ended = select.poll()
        if self._descriptor is not None:
            ended.register(self._descriptor, select.POLLIN)
        if is_ended := bool(ended.poll(0)):
            self.close()
        return is_ended

    def close(self) -> None:
        """Ends the watch over the shell."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class EndsWithParent:
    """A mark on a process, which multiprocessing hands on to those that it starts, by fork, spawn or forkserver: each
    ends as soon as its parent has ended in any way.

    By itself it would wait for work for ever, with the rank's output open, which the launcher reads to its end. The
    parent of PyTorch's readers of a forkserver is that server, which lives as long as they do.
    """

    def __init__(self) -> None:
        self._of = os.getpid()
        util.register_after_fork(self, EndsWithParent._begin)  # "fork": where multiprocessing begins a process

    def __reduce__(self) -> tuple[Callable[[], "EndsWithParent"], tuple[()]]:
        return _received, ()

    def _begin(self) -> None:
        if self._of != os.getpid():
            self._of = os.getpid()
            threading.Thread(target=self._wait, name="parent", daemon=True).start()

    def _wait(self) -> None:
        while not (parent := multiprocessing.parent_process()):  # it is being set
            time.sleep(0.05)
        with contextlib.suppress(ValueError):  # joblib's processes see to it themselves
            parent.join()
            os._exit(1)


def _received() -> EndsWithParent:
    """The mark in a process that has a new Python: spawn calls nothing at its begin."""
    mark = EndsWithParent()
    mark._of = 0
    mark._begin()
    return mark


def end_children_with_this() -> None:
    """Ends with this process all that it starts with multiprocessing from now on, and removes their semaphores from
    /dev/shm. Processes of subprocess stay."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "hvdtrain" not in config:
        config["hvdtrain"] = EndsWithParent()
        util.spawnv_passfds = functools.partial(_start, util.spawnv_passfds)


def _start(start: Callable[..., int], path: str, arguments: Sequence[str], files: Sequence[int]) -> int:
    """Starts a server of multiprocessing: with `start`, as util.spawnv_passfds."""
    *options, program = arguments
    first = next((code for name, code in SERVERS.items() if f"multiprocessing.{name} " in str(program)), "")
    return start(path, [*options, f"{first}{program}"], files)


def is_launcher_shell(arguments: list[str]) -> bool:
    """Whether these are the arguments of `sh -c "mpirun ..."`, which lives as long as mpirun unless it is killed."""
    shell, *rest = arguments or [""]
    return Path(shell).name == "sh" and len(rest) >= 2 and rest[0] == "-c" and rest[1].startswith("mpirun ")


def is_runner(arguments: list[str]) -> bool:
    """Whether these are the arguments of a launcher, maybe in Python, which may end while its ranks continue."""
    runners = {program for row in topology.LAUNCHERS if row.ranks_outlive_it for program in row.programs}
    return any(Path(word).name in runners for word in arguments[:3])


def typed_launcher() -> str:
    """The name of the outermost launcher above this process on this host, as horovodrun above mpirun; "" for none."""
    names = (Path(word).name for pid in above(os.getppid(), FAR_ABOVE) for word in arguments_of(pid)[:3])
    rows = [row.name for name in names for row in topology.LAUNCHERS if name in row.programs]
    return rows[-1] if rows else ""


def discard_unread() -> None:
    """Discards from now on what this process prints and nobody reads any more, as where its launcher has ended."""
    for number in (1, 2):
        ended = select.poll()
        ended.register(number, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in ended.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), number)


def is_below_terminal_task(environ: Mapping[str, str], proc: Path = PROC) -> bool:
    """Whether this process is, or is below, an interactive program that `srun --pty` has started, as bash or
    python. The step's other tasks then have no terminal, and have ended."""
    task = environ.get("SLURM_TASK_PID", "")
    if "SLURM_PTY_PORT" not in environ or not task.isdecimal():
        return False
    words = arguments_of(int(task), proc)
    return bool(words) and all(re.fullmatch("|-[^cm]*|--.*", word) for word in words[1:])


def above(pid: int, most: int = MOST_ABOVE) -> list[int]:
    """The process and its ancestors on this host, the nearest first."""
    found: list[int] = []
    while pid > 1 and len(found) < most:
        found.append(pid)
        try:  # the name, in parentheses, may hold anything
            pid = int((PROC / f"{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def arguments_of(pid: int, proc: Path = PROC) -> list[str]:
    """The command line of a process; empty where it may not be read."""
    try:
        return (proc / f"{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
