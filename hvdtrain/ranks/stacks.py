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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

import hvdtrain
from hvdtrain import datasets

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


Place = Literal["collective", "framework", "outside"]
"""Where a thread is: in a collective; in C code of a framework, which may hold one; or elsewhere, where no rank waits
for another."""


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    module: str
    function: str
    file: str = ""
    line: int = 0


ANY = ""
Table = set[tuple[str, str]]
"""Packages or modules, each with a function in it, or ANY."""
COLLECTIVES: Table = {("horovod", ANY), ("torch.distributed", ANY)}
FRAMEWORKS: Table = {
    ("torch.autograd.graph", "_engine_run_backward"),  # DistributedDataParallel's backward waits in it for the others
    ("tensorflow.python.eager", ANY),  # a graph holds its collectives
    ("tensorflow.python.framework", ANY),  # a value is waited for
}
READING: Table = {("tensorflow.python.data", ANY)}
CALLED: Table = {("tensorflow.python.ops.script_ops", ANY)}  # a graph, or its input pipeline, runs a function of Python
READERS: Table = {(datasets.__name__, ANY), ("keras.src.trainers.data_adapters", ANY)}
"""Modules that read batches: a thread of theirs reads ahead."""
OPERATIONS: Table = set()
AVERAGING: Table = set(FRAMEWORKS)
"""Modules that average gradients."""
LONG: Table = {("lightning.pytorch.loops.evaluation_loop", ANY), ("pytorch_lightning.loops.evaluation_loop", ANY)}

Function = TypeVar("Function", bound=Callable[..., Any])


def _decorator(table: Table) -> Callable[[Function], Function]:
    def mark(function: Function) -> Function:
        table.add((function.__module__, function.__name__))
        return function

    return mark


waits_for_ranks = _decorator(COLLECTIVES)
"""Decorator of a function in which a thread waits for other ranks."""
is_operation = _decorator(OPERATIONS)
"""Decorator of a collective of an engine or a callback, which matches the same one of other ranks alone. On a method of
a protocol it stands for those of that name in all modules of the package."""
takes_long = _decorator(LONG)
"""Decorator of what may take long on one rank while the others wait, and is well."""


def mark_module(table: Table, module: str) -> None:
    """Enters all functions of a module: one calls it with its own name."""
    table.add((module, ANY))


class Process(BaseModel):
    """What another process of the same host needs, to see where this one stands."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pid: Annotated[int, Field(ge=1, lt=2**31)]
    started: Annotated[int, Field(ge=0, lt=2**63)]
    """When the process began, in ticks since the host's start: tells it from a later one of the same number."""
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
        """Lets other processes of this host request them, until `close`. They read them in this process's
        memory; where no other rank is on this host (`alone`), they go to stderr. None where nobody can ask."""
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
        """Ends what `open` began, if it was called."""
        if self._memory >= 0:
            faulthandler.unregister(ASKS)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {ASKS})
            os.close(self._memory)
            self._memory = -1

    def answer_here(self) -> None:
        """Makes the calling thread answer requests, which the training thread may be too busy for."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ASKS})

    def train_here(self) -> None:
        """Makes the calling thread the one whose stack is shown."""
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
        """Begins to write the lines of this process's main thread: it is a worker that reads data."""
        threading.Thread(target=self._write, args=(worker * LONGEST_LINE,), daemon=True).start()

    def _write(self, begin: int) -> None:
        reading = threading.main_thread().ident
        while True:
            stack = _frames(sys._current_frames().get(reading or 0))
            line = described(stack).encode(errors="replace") if reads(stack) else b""
            self._lines[begin : begin + LONGEST_LINE] = line[:LONGEST_LINE].ljust(LONGEST_LINE, b"\0")
            time.sleep(WRITES)

    def lines(self) -> list[str]:
        """The lines of the workers that are reading now."""
        lines = (self._lines[at : at + LONGEST_LINE] for at in range(0, len(self._lines), LONGEST_LINE))
        return [line.rstrip(b"\0").decode(errors="replace") for line in lines if line.strip(b"\0")]


_workers: list["weakref.ref[Workers]"] = []


def _lines_of_workers() -> list[str]:
    """The lines of the worker processes that read for this one."""
    return [line for reference in _workers if (workers := reference()) for line in workers.lines()]


def _frames(frame: FrameType | None) -> list[Frame]:
    stack: list[Frame] = []
    while frame and len(stack) < DEEPEST:
        code = frame.f_code
        stack.append(Frame(str(frame.f_globals.get("__name__")), code.co_name, code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return stack


def place_of(stack: Iterable[Frame], own: Iterable[bool]) -> Place:
    """Where a thread of this stack is, its innermost frame first. `own`: of each frame, whether it is the user's."""
    place: Place = "outside"
    for frame, is_own in zip(stack, own, strict=True):
        if _is_in(frame, COLLECTIVES):
            return "collective"
        if is_own or _is_in(frame, READING):
            return place if is_own else "outside"
        if _is_in(frame, FRAMEWORKS):
            place = "framework"
    return place


def operation_of(stack: Sequence[Frame]) -> str:
    """Of a thread in a collective: which one it waits in; "gradients", or empty where that cannot be seen."""
    found = next((frame.function for frame in stack if _is_in(frame, OPERATIONS)), "")
    return found or ("gradients" if any(_is_in(frame, AVERAGING) for frame in stack) else "")


def is_long(stack: Iterable[Frame]) -> bool:
    """Whether the thread does what may take long on one rank."""
    return any(_is_in(frame, LONG) for frame in stack)


def reads(stack: Iterable[Frame]) -> bool:
    """Whether the thread reads batches, or waits for those that another one reads."""
    return any(_is_in(frame, READERS) for frame in stack)


def is_called(stack: Iterable[Frame]) -> bool:
    """Whether C code of a framework runs this thread's Python, and waits for it. A pipeline that has read ahead as far
    as it may runs none."""
    return any(_is_in(frame, CALLED) for frame in stack)


def _is_in(frame: Frame, table: Table) -> bool:
    return any(
        (frame.module == module or frame.module.startswith(f"{module}.")) and function in {ANY, frame.function}
        for module, function in table
    )


def _place(stack: Sequence[Frame]) -> Place:
    return place_of(stack, [is_users(frame.file) for frame in stack])


def _users_line(stacks: Sequence[Sequence[Frame]]) -> str:
    """The line of the first thread that is in the user's code; else of the first thread."""
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
    """The innermost line of the user's code or of this package, followed by the library line that the thread is in."""
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
    """The line in which the training thread was at the last request; empty before the first."""
    path = f"/proc/{process.pid}/fd/{process.memory}"
    if process.memory is None or not os.readlink(path).startswith(f"/memfd:{MEMORY}"):  # noqa: PTH115
        return ""
    with open(path, "rb") as file:  # noqa: PTH123
        file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_READ))
        text = file.read(MOST_READ).decode(errors="replace")
    return last_of(text, process.thread)


def last_of(dump: str, thread: int) -> str:
    """The thread's line in the last dump of faulthandler; empty where there is none."""
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
    """The state of a process or thread, and when it started, from /proc."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
