"""Where a rank's training thread stands: its own, and that of another process of this host that answers no more; and
the processes that read for it."""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing.context import BaseContext
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

import hvdtrain
from hvdtrain.engines.waiting import Frame, Place, is_called, is_long, operation_of, place_of, reads

State = Literal["stopped", "disk", "python", "unknown"]
"""Of a process that does not answer: stopped by a signal; in the kernel, which waits for a disk; in C code that holds
Python's lock; or nobody can see."""

# Its default is to be ignored: it can do no harm to a process that has ended, or never listened.
ASKS = signal.SIGURG
MEMORY = "hvdtrain-stacks"
STDERR = 2
DEEPEST = 200  # frames
MOST_READ = 2**18  # bytes
LONGEST_LINE = 500  # bytes
WRITES = 1.0  # seconds
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = f"{Path(hvdtrain.__file__).parent}/"
_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+) .*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class Process(BaseModel):
    """What another process of the same host needs, to see where this one stands."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pid: Annotated[int, Field(ge=1, lt=2**31)]
    started: Annotated[int, Field(ge=0, lt=2**63)]
    """In ticks since the host's start: no other process with this number has the same."""
    thread: Annotated[int, Field(ge=0, lt=2**64)]
    memory: Annotated[int, Field(ge=0, lt=2**31)] | None
    """The file descriptor to which it writes its threads' stacks when it is sent `ASKS`, in C and without Python's
    lock; None for its stderr."""


class Stacks:
    """This process's stacks."""

    def __init__(self) -> None:
        self._thread, self._native = threading.main_thread().ident or 0, threading.main_thread().native_id
        self._memory = -1

    def open(self, *, alone: bool) -> Process | None:
        """Lets other processes ask for them, until `close`. They read them in this process's memory; where no other
        rank is on this host (`alone`), they go to stderr. None where nobody can ask."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            if self._memory < 0 and signal.getsignal(ASKS) == signal.SIG_DFL:  # else it is the user's
                self._memory = os.memfd_create(MEMORY)
                faulthandler.register(ASKS, file=STDERR if alone else self._memory, all_threads=True)
                # C code that waits in poll() would come back from it, and not every library tries again.
                signal.pthread_sigmask(signal.SIG_BLOCK, {ASKS})
            if self._memory >= 0:
                memory = None if alone else self._memory
                return Process(pid=os.getpid(), started=_stat("self")[1], thread=self._thread, memory=memory)
        return None

    def close(self) -> None:
        """No longer; where `open` was called."""
        if self._memory >= 0:
            faulthandler.unregister(ASKS)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {ASKS})
            os.close(self._memory)
            self._memory = -1

    def answer_here(self) -> None:
        """The calling thread takes the signal that the training thread does not."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ASKS})

    def train_here(self) -> None:
        """The calling thread is the one that trains."""
        self._thread, self._native = threading.get_ident(), threading.get_native_id()

    def now(self) -> tuple[Place, bool, str, str, str]:
        """Where the training thread is, whether it does what may take long, its line, for a person, in which collective
        it waits, and the user's line."""
        innermost = sys._current_frames()
        stack = _frames(innermost.pop(self._thread, None))
        place, where = _place(stack), described(stack)
        others = [*map(_frames, innermost.values())]
        readers = [other for other in others if reads(other)]
        called = [other for other in others if is_called(other) and _place(other) != "collective"]
        if reads(stack) and (found := [_users_line(readers)] if readers else _lines_of_workers()):
            where += f"; a reader stands in {found[0]}"
        elif place == "framework" and called:
            # What is called may itself wait for a reader, as Keras's generator for its pool of threads.
            place, where = "outside", f"{_users_line([*called, *readers])}, for which TensorFlow waits"
        with contextlib.suppress(OSError, ValueError):
            if _stat(f"self/task/{self._native}")[0] == "D":
                where += ", where the kernel waits for a disk or a file system"
        operation = "" if place == "outside" else operation_of(stack)
        users = next((_line(frame) for frame in stack if is_users(frame.file)), "")
        return place, is_long(stack), where, operation, users


class Workers:
    """Processes that read for this rank. Each writes the line in which it does so into memory that it shares with this
    one, from a thread: a signal would disturb what a user's code waits for."""

    def __init__(self, context: BaseContext, number: int) -> None:
        self._lines = context.RawArray("c", number * LONGEST_LINE)
        _workers.append(weakref.ref(self, _workers.remove))

    def write_here(self, worker: int) -> None:
        """The calling process is that worker, and its main thread reads."""
        threading.Thread(target=self._write, args=(worker * LONGEST_LINE,), daemon=True).start()

    def _write(self, begin: int) -> None:
        reading = threading.main_thread().ident
        while True:
            stack = _frames(sys._current_frames().get(reading or 0))
            line = described(stack).encode(errors="replace") if reads(stack) else b""
            self._lines[begin : begin + LONGEST_LINE] = line[:LONGEST_LINE].ljust(LONGEST_LINE, b"\0")
            time.sleep(WRITES)

    def lines(self) -> list[str]:
        """Those of the processes that are reading."""
        lines = (self._lines[at : at + LONGEST_LINE] for at in range(0, len(self._lines), LONGEST_LINE))
        return [line.rstrip(b"\0").decode(errors="replace") for line in lines if line.strip(b"\0")]


_workers: list["weakref.ref[Workers]"] = []


def _lines_of_workers() -> list[str]:
    """Where the processes stand that are reading for this one."""
    return [line for reference in _workers if (workers := reference()) for line in workers.lines()]


def _frames(frame: FrameType | None) -> list[Frame]:
    stack: list[Frame] = []
    while frame and len(stack) < DEEPEST:
        code = frame.f_code
        stack.append(Frame(str(frame.f_globals.get("__name__")), code.co_name, code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return stack


def _place(stack: Sequence[Frame]) -> Place:
    return place_of(stack, [is_users(frame.file) for frame in stack])


def _users_line(stacks: Sequence[Sequence[Frame]]) -> str:
    """That of the first thread in the user's code; else of the first."""
    return described(next(filter(_is_in_users_code, stacks), stacks[0]))


def _is_in_users_code(stack: Sequence[Frame]) -> bool:
    found = next((frame for frame in stack if is_users(frame.file) or is_ours(frame.file)), None)
    return found is not None and is_users(found.file)


def is_ours(file: str) -> bool:
    """Whether the file is one of this package."""
    return file.startswith(_OURS)


def is_users(file: str) -> bool:
    """Whether the file is the user's own: neither ours nor a library's."""
    return not (is_ours(file) or file.startswith(("<", *_LIBRARIES)))


def described(stack: Sequence[Frame]) -> str:
    """The innermost line that is the user's or ours, and behind it the library's in which the thread is."""
    if not stack:
        return "no line of Python"
    found = next((frame for frame in stack if is_users(frame.file) or is_ours(frame.file)), stack[0])
    return _line(found) + (f" (inside {_line(stack[0])})" if stack[0] is not found else "")


def _line(frame: Frame) -> str:
    return f"{frame.file}:{frame.line}, in {frame.function}"


def observed(process: Process) -> tuple[State, str]:
    """What another process of this host does, and in which line of Python it is. Asks it for its stacks, which the next
    call finds: nothing here waits."""
    try:
        state, started = _stat(str(process.pid))
        if started != process.started:  # of another host, or of a container with numbers of its own
            return "unknown", ""
        if state in "Tt":
            return "stopped", ""
        where = _dumped(process)
        os.kill(process.pid, ASKS)
    except (OSError, ValueError, OverflowError):
        return "unknown", ""
    return ("disk", where) if state == "D" else ("python", where) if where else ("unknown", "")


def _dumped(process: Process) -> str:
    """The training thread's line when it was asked last; empty before."""
    path = f"/proc/{process.pid}/fd/{process.memory}"
    if process.memory is None or not os.readlink(path).startswith(f"/memfd:{MEMORY}"):  # noqa: PTH115
        return ""
    with open(path, "rb") as file:  # noqa: PTH123
        file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_READ))
        text = file.read(MOST_READ).decode(errors="replace")
    return last_of(text, process.thread)


def last_of(dump: str, thread: int) -> str:
    """That thread's line in the last of faulthandler's dumps; empty where there is none."""
    stack: list[Frame] = []
    inside = False
    for line in dump.splitlines():
        if found := _THREAD.match(line):
            inside = int(found[1], 16) == thread
            stack = [] if inside else stack
        elif inside and (found := _FRAME.match(line)):
            stack.append(Frame("", found[3], found[1], int(found[2])))
    return described(stack) if stack else ""


def _stat(process: str) -> tuple[str, int]:
    """The state of a process or thread, and when it started."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
