"""The processes above a rank, among which is the shell in which horovodrun waits for mpirun.

A signal to horovodrun reaches this shell alone. The shell dies, and mpirun continues with all ranks, so that the ranks
themselves have to notice its end.
"""

import contextlib
import os
import re
import select
from collections.abc import Mapping
from pathlib import Path

PROC = Path("/proc")
MOST_ABOVE = 4
"""The most processes between a rank and that shell: mpirun's own, and Hydra's proxy."""


RUNNERS = {"torchrun", "torch.distributed.run", "horovodrun"}


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


def is_launcher_shell(arguments: list[str]) -> bool:
    """Whether these are the arguments of `sh -c "mpirun ..."`, which lives as long as mpirun unless it is killed."""
    shell, *rest = arguments or [""]
    return Path(shell).name == "sh" and len(rest) >= 2 and rest[0] == "-c" and rest[1].startswith("mpirun ")


def is_runner(arguments: list[str]) -> bool:
    """Whether these are the arguments of a launcher in Python, which some signals kill while its ranks continue."""
    return any(Path(word).name in RUNNERS for word in arguments[:3])


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
