"""Which line a rank's training thread is in: in this process, or in one of this host that no longer answers; and the
lines of the processes that read its data."""

import contextlib
import faulthandler
import os
import re
import resource
import signal
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import BaseContext
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

import hvdtrain
from hvdtrain import datasets

State = Literal["stopped", "disk", "python", "unknown"]
"""What a process does that does not answer: it is stopped by a signal; it is in the kernel, which waits for a disk; it
is in C code that holds Python's lock; or that cannot be seen."""

# A process that does not handle this signal ignores it: it does no harm to one that is no rank.
ASKS = signal.SIGURG
MEMORY = "hvdtrain-stacks"
STDERR = 2
DEEPEST = 200  # frames
MOST_READ = 2**18  # bytes
LONGEST_LINE = 500  # bytes
LOADER = "torch.utils.data.dataloader"
NOTICED = 2.0  # seconds in which the end of a reader is known that broke a connection
READER_CODES = {
    -signal.SIGKILL: "out of memory, or killed",
    -signal.SIGBUS: "the host's shared memory is full (docker: --shm-size)",
    255: "the forkserver that starts it was killed",
}
"""What a reader ended of, by its exit code."""
WRITES = 1.0  # seconds
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = f"{Path(hvdtrain.__file__).parent}/"
_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+) .*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


Place = Literal["collective", "framework", "outside"]
"""Where a thread is: in a collective; in a framework's C code, which may be in one; or elsewhere, where it waits for no
other rank."""


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    module: str
    function: str
    file: str = ""
    line: int = 0


ANY = ""
Table = set[tuple[str, str]]
"""Packages or modules, each with the name of a function in it, or with ANY for all functions."""
COLLECTIVES: Table = {("horovod", ANY), ("torch.distributed", ANY)}
FRAMEWORKS: Table = {
    ("torch.autograd.graph", "_engine_run_backward"),  # DistributedDataParallel's backward waits in it for the others
    ("tensorflow.python.eager", ANY),  # a graph holds its collectives
    ("tensorflow.python.framework", ANY),  # a value is waited for
}
READING: Table = {("tensorflow.python.data", ANY)}
CALLED: Table = {("tensorflow.python.ops.script_ops", ANY)}  # a graph, or its input pipeline, runs a function of Python
READERS: Table = {(datasets.__name__, ANY), ("keras.src.trainers.data_adapters", ANY)}
"""Modules that read batches, some in a thread that reads ahead."""
OPERATIONS: Table = set()
AVERAGING: Table = set(FRAMEWORKS)
"""Modules that average gradients."""
LONG: Table = {("lightning.pytorch.loops.evaluation_loop", ANY), ("pytorch_lightning.loops.evaluation_loop", ANY)}
"""Functions in which a thread may stay for long while the others wait, without being stuck."""

Function = TypeVar("Function", bound=Callable[..., Any])


def _decorator(table: Table) -> Callable[[Function], Function]:
    def mark(function: Function) -> Function:
        table.add((function.__module__, function.__name__))
        return function

    return mark


waits_for_ranks = _decorator(COLLECTIVES)
"""Decorator of a function in which a thread waits for other ranks."""
is_operation = _decorator(OPERATIONS)
"""Decorator of a collective, in which all ranks must be at the same time; for those of engines `mark_operations`."""
takes_long = _decorator(LONG)
"""Decorator of a function that may take long on one rank while the others wait, without being stuck."""


def waits_on_gpu(is_pending: Callable[[], bool]) -> None:
    """Takes the function by which an engine says whether this process's GPU has yet to end a collective. The host may
    then wait for the GPU in any line, as in one that reads a loss."""
    _pending[:] = [is_pending]


def mark_module(table: Table, module: str) -> None:
    """Enters all functions of a module, which calls this with its own name."""
    table.add((module, ANY))


def mark_operations(package: str, *functions: str) -> None:
    """Marks the functions of these names in all modules of a package, which calls this with its own name, as
    collectives."""
    OPERATIONS.update((package, function) for function in functions)


class Process(BaseModel):
    """What another process of the same host needs to see which line this one is in."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pid: Annotated[int, Field(ge=1, lt=2**31)]
    started: Annotated[int, Field(ge=0, lt=2**63)]
    """When the process began, in ticks since the host's start: a later process of the same number has another time."""
    thread: Annotated[int, Field(ge=0, lt=2**64)]
    memory: Annotated[int, Field(ge=0, lt=2**31)] | None
    """The file descriptor to which it writes its threads' stacks when it gets the signal `ASKS`, in C and without
    Python's lock; None for its stderr."""


class Stacks:
    """This process's stacks."""

    def __init__(self) -> None:
        self._thread, self._native = threading.main_thread().ident or 0, threading.main_thread().native_id
        self._memory = -1

    def open(self, *, alone: bool) -> Process | None:
        """Lets other processes of this host request the stacks, until `close`. They read them in this process's memory;
        where no other rank is on this host (`alone`), the stacks go to stderr. None where that is not possible."""
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
        """Where the training thread is, whether it may stay there for long, its line as text, the collective in which
        it waits, and the user's line."""
        innermost = sys._current_frames()
        stack = _frames(innermost.pop(self._thread, None))
        place, where = place_of(stack), described(stack)
        others = [*map(_frames, innermost.values())]
        readers = [other for other in others if has_any(other, READERS)]
        # C code of a framework runs these threads' Python, and waits for it. (A pipeline that has read ahead as far as
        # it may runs none.)
        called = [other for other in others if has_any(other, CALLED) and place_of(other) != "collective"]
        lines = [line for reference in _workers if (workers := reference()) for line in workers.lines()]
        if has_any(stack, READERS) and (found := [_users_line(readers)] if readers else lines):
            where += f"; a reader stands in {found[0]}"
        elif place == "framework" and called:
            # What is called may itself wait for a reader, as Keras's generator for its pool of threads.
            place, where = "outside", f"{_users_line([*called, *readers])}, for which TensorFlow waits"
        with contextlib.suppress(OSError, ValueError):
            if _stat(f"self/task/{self._native}")[0] == "D":
                where += ", where the kernel waits for a disk or a file system"
        operation = "" if place == "outside" else operation_of(stack)
        # A rank that keeps the others waiting is not in this state: all others have begun the collectives that it has.
        if place == "outside" and any(is_pending() for is_pending in _pending):
            place = "collective"
        users = next((_line(frame) for frame in stack if is_users(frame.file)), "")
        return place, has_any(stack, LONG), where, operation, users


class Workers:
    """Processes that read data for this rank. A thread of each writes the line that it is in into memory that they
    share. A signal would disturb what a user's code waits for."""

    def __init__(self, context: BaseContext, number: int) -> None:
        self._lines = context.RawArray("c", number * LONGEST_LINE)
        self._memory = context.RawArray("q", number * 2)  # the number of each process, and its most memory in KiB
        _workers.append(weakref.ref(self, _workers.remove))

    def write_here(self, worker: int) -> None:
        """Begins to write the lines of this process's main thread, which reads data."""
        threading.Thread(target=self._write, args=(worker,), daemon=True).start()

    def _write(self, worker: int) -> None:
        reading, begin = threading.main_thread().ident, worker * LONGEST_LINE
        while True:
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._memory[2 * worker : 2 * worker + 2] = [os.getpid(), most]
            stack = _frames(sys._current_frames().get(reading or 0))
            line = described(stack).encode(errors="replace") if has_any(stack, READERS) else b""
            self._lines[begin : begin + LONGEST_LINE] = line[:LONGEST_LINE].ljust(LONGEST_LINE, b"\0")
            time.sleep(WRITES)

    def memory_of(self, pid: int) -> int:
        """The most memory that this worker had in its last second, in MiB; 0 where it is none of these."""
        return next((kib >> 10 for of, kib in zip(self._memory[::2], self._memory[1::2], strict=True) if of == pid), 0)

    def lines(self) -> list[str]:
        """The lines of the workers that are reading now."""
        lines = (self._lines[at : at + LONGEST_LINE] for at in range(0, len(self._lines), LONGEST_LINE))
        return [line.rstrip(b"\0").decode(errors="replace") for line in lines if line.strip(b"\0")]


def lost_reader(error: BaseException, kills: int) -> str:
    """Which process of a DataLoader has ended, how and why, where the error comes from that; else empty. `kills`: how
    many processes of this job were lately ended for lack of memory."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    loaders = [frame.f_locals["self"] for frame in frames if frame.f_globals.get("__name__") == LOADER]
    processes: list[Any] = next((each._workers for each in loaders if hasattr(each, "_workers")), [])
    if any(frame.f_code.co_name == "reraise" for frame in frames):  # an error of the user's data set
        return ""
    connection.wait([process.sentinel for process in processes], NOTICED)
    # PyTorch ends the others by SIGTERM.
    ended = sorted(filter(lambda each: each.exitcode, processes), key=lambda each: each.exitcode == -signal.SIGTERM)
    remedy = "take fewer workers or smaller batches; with workers 0 the rank reads by itself"
    if not ended:
        is_starting = loaders and frames[-1].f_globals.get("__name__") == "multiprocessing.forkserver"
        return f"a reader could not be started: {READER_CODES[255]}; {remedy}." if is_starting else ""
    pid, code = ended[0].pid, ended[0].exitcode
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if memory := sum(workers.memory_of(pid) for reference in _workers if (workers := reference())):
        how += f" at {memory:,} MiB of memory"
    why = "out of memory" if kills and code == -signal.SIGKILL else READER_CODES.get(code, "it crashed")
    return f"reader {processes.index(ended[0])} of {len(processes)} (process {pid}) {how}: {why}; {remedy}."


_workers: list["weakref.ref[Workers]"] = []
_pending: list[Callable[[], bool]] = []


def _frames(frame: FrameType | None) -> list[Frame]:
    stack: list[Frame] = []
    while frame and len(stack) < DEEPEST:
        code = frame.f_code
        stack.append(Frame(str(frame.f_globals.get("__name__")), code.co_name, code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return stack


def place_of(stack: Iterable[Frame]) -> Place:
    """Where a thread of this stack is, given its innermost frame first."""
    place: Place = "outside"
    for frame in stack:
        if _is_in(frame, COLLECTIVES):
            return "collective"
        if is_users(frame.file):
            return place
        if _is_in(frame, READING):
            return "outside"
        if _is_in(frame, FRAMEWORKS):
            place = "framework"
    return place


def operation_of(stack: Sequence[Frame]) -> str:
    """The collective in which a thread waits: a function's name, or "gradients"; empty where that cannot be seen."""
    found = next((frame.function for frame in stack if _is_in(frame, OPERATIONS)), "")
    return found or ("gradients" if has_any(stack, AVERAGING) else "")


def has_any(stack: Iterable[Frame], table: Table) -> bool:
    """Whether the thread is in one of the table's functions, or in what they call."""
    return any(_is_in(frame, table) for frame in stack)


def _is_in(frame: Frame, table: Table) -> bool:
    return any(
        (frame.module == module or frame.module.startswith(f"{module}.")) and function in {ANY, frame.function}
        for module, function in table
    )


def _users_line(stacks: Sequence[Sequence[Frame]]) -> str:
    """The line of the first thread that is in the user's code; else of the first thread."""
    return described(next((stack for stack in stacks if (found := _shown(stack)) and is_users(found.file)), stacks[0]))


def _shown(stack: Sequence[Frame]) -> Frame | None:
    """The innermost line of the user's code or of this package."""
    return next((frame for frame in stack if is_users(frame.file) or is_ours(frame.file)), None)


def is_ours(file: str) -> bool:
    """Whether the file belongs to this package."""
    return file.startswith(_OURS)


def is_users(file: str) -> bool:
    """Whether the file is the user's: it belongs neither to this package nor to a library."""
    return not (is_ours(file) or file.startswith(("<", *_LIBRARIES)))


def described(stack: Sequence[Frame]) -> str:
    """The innermost line of the user's code or of this package, followed by the library line that the thread is in."""
    if not stack:
        return "no line of Python"
    found = _shown(stack) or stack[0]
    return _line(found) + (f" (inside {_line(stack[0])})" if stack[0] is not found else "")


def _line(frame: Frame) -> str:
    return f"{frame.file}:{frame.line}, in {frame.function}"


def observed(process: Process) -> tuple[State, str]:
    """What another process of this host does, and in which line of Python it is. It requests the process's stacks,
    which the next call finds, so that nothing here waits."""
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


def kill(process: Process) -> None:
    """Kills another process of this host, also where it is stopped, which launchers wait for."""
    with contextlib.suppress(OSError, ValueError, OverflowError):
        if _stat(str(process.pid))[1] == process.started:
            os.kill(process.pid, signal.SIGKILL)


def _dumped(process: Process) -> str:
    """The line that the training thread was in at the last request; empty before the first."""
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
