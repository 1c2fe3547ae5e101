"""The processes above a rank; among them the shell in which horovodrun waits for mpirun.

A signal to horovodrun reaches this shell alone: it dies, and mpirun trains on with all ranks, so the ranks look out for
its end.
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


class LauncherShell:
    """That shell, or torchrun, where there is one above this process."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        for pid in above(os.getppid()):
            if is_launcher_shell(arguments := arguments_of(pid)) or is_torchrun(arguments):
                with contextlib.suppress(OSError):  # a kernel without it; or the shell has ended since
                    self._descriptor = os.pidfd_open(pid)
                break

    def take_end(self) -> bool:
        """Whether the shell has ended. True once."""
        if self._descriptor is None:
            return False
        ended = select.poll()
        ended.register(self._descriptor, select.POLLIN)
        is_ended = bool(ended.poll(0))
        if is_ended:
            self.close()
        return is_ended

    def close(self) -> None:
        """Ends the watch over the shell."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_launcher_shell(arguments: list[str]) -> bool:
    """Whether it is `sh -c "mpirun ..."`, which lives as long as its mpirun unless it is killed."""
    shell, *rest = arguments or [""]
    return Path(shell).name == "sh" and len(rest) >= 2 and rest[0] == "-c" and rest[1].startswith("mpirun ")


def is_torchrun(arguments: list[str]) -> bool:
    """Whether it is torchrun, which some signals kill; its ranks would train on."""
    return any(Path(word).name in {"torchrun", "torch.distributed.run"} for word in arguments[:3])


def is_below_terminal_task(environ: Mapping[str, str], proc: Path = PROC) -> bool:
    """Whether this is below, or is, a program that `srun --pty` has given nothing but its terminal, as bash or python:
    its other tasks have none and have ended."""
    task = environ.get("SLURM_TASK_PID", "")
    if "SLURM_PTY_PORT" not in environ or not task.isdecimal():
        return False
    words = arguments_of(int(task), proc)
    return bool(words) and all(re.fullmatch("|-[^cm]*|--.*", word) for word in words[1:])


def above(pid: int, most: int = MOST_ABOVE, proc: Path = PROC) -> list[int]:
    """The process and those above it on this host, the nearest first."""
    found: list[int] = []
    while pid > 1 and len(found) < most:
        found.append(pid)
        try:  # the name, in parentheses, may hold anything
            pid = int((proc / f"{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def arguments_of(pid: int, proc: Path = PROC) -> list[str]:
    """What a process was started with; nothing where it may not be read."""
    try:
        return (proc / f"{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
