"""A rank of a notebook: a warm process that forks a fresh one for every run, or a process of one mpirun."""

import contextlib
import importlib
import io
import os
import pickle
import socket
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from hvdtrain.errors import LabError
from hvdtrain.launch import rendezvous

OURS = {Path(__file__).parent, Path(rendezvous.__file__).parents[1]}
"""The folders whose code is not the learner's."""
_pipe: list[Connection] = []
"""The connection to the notebook, in a process that runs a rank's function."""


def tell(value: Any) -> None:
    """Sends a value from a rank's function to the notebook, which hands it to `watch(rank, value)`.

    Raises LabError outside of one.
    """
    if not _pipe:
        raise LabError("tell() sends a value from a rank to the notebook: call it in a function that Ranks.run starts.")
    _send(("value", value))


def serve(notebook: Connection, rank: int, preload: Sequence[str]) -> None:
    """Runs one function after another for the notebook, until it is gone.

    Each runs in a process forked from this one. The framework and the modules to preload are loaded there, and
    Horovod has not started.
    """
    # PyTorch's optimizers and TensorFlow abort in one process.
    framework = () if any("keras" in name for name in preload) else ("horovod.torch",)
    for name in (*framework, *preload):
        importlib.import_module(name)
    with notebook, contextlib.suppress(EOFError, ConnectionError):
        notebook.send((rank, socket.gethostname(), _interface(notebook)))
        while True:
            kind, *task = pickle.loads(notebook.recv_bytes())
            if kind == "run":
                _run(notebook, *task)
    os._exit(0)  # the frameworks' own exit takes a second, and has nothing to save


def serve_once(notebook: Connection, rank: int) -> None:
    """Runs one function as a rank of mpirun, in this very process, and waits until the notebook has all results."""
    with notebook:
        notebook.send((rank, socket.gethostname(), None))
        _, environ, task = notebook.recv()
        os.environ.update(environ)
        _perform(notebook, task)


def _run(notebook: Connection, environ: dict[str, str], task: bytes) -> None:
    context = get_context("fork")
    ours, its = context.Pipe()
    process = context.Process(target=_perform_in, args=(notebook, its, environ, task))
    process.start()
    its.close()
    try:
        _relay(notebook, ours, process)
    finally:
        process.kill()
        process.join()
    notebook.send_bytes(pickle.dumps(("ended", process.exitcode)))


def _relay(notebook: Connection, ours: Connection, process: BaseProcess) -> None:
    while True:
        for source in wait([notebook, ours]):
            if source is notebook:
                request = notebook.recv_bytes()
                if pickle.loads(request)[0] == "stop":
                    return
                with contextlib.suppress(OSError):  # it has ended by itself
                    ours.send_bytes(request)
            else:
                try:
                    message = ours.recv_bytes()
                except (EOFError, OSError):
                    process.join()
                    return
                notebook.send_bytes(message)


def _perform_in(notebook: Connection, pipe: Connection, environ: dict[str, str], task: bytes) -> None:
    notebook.close()  # or it would stay open when the warm process has gone
    os.environ.update(environ)
    _perform(pipe, task)


def _perform(pipe: Connection, task: bytes) -> None:
    _pipe[:] = [pipe]
    output = _Output()
    try:
        with contextlib.redirect_stdout(output):
            function, arguments = pickle.loads(task)
            result = function(*arguments)
            output.end()
            _send(("result", result))
    except BaseException as error:
        output.end()
        _send(("failed", type(error).__name__, str(error), location(error.__traceback__)))
    if pickle.loads(pipe.recv_bytes())[0] == "stop":
        os._exit(1)  # others may be in a collective for ever: mpirun ends them
    # Every rank has its result: none leaves while another is in a collective.
    for name in ("horovod.torch", "horovod.tensorflow"):
        horovod = sys.modules.get(name)
        if horovod and horovod.is_initialized():
            horovod.shutdown()


class _Output(io.TextIOBase):
    """A standard output that sends what a function prints to the notebook, line by line."""

    def __init__(self) -> None:
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            _send(("printed", line))
        return len(text)

    def end(self) -> None:
        if self._line:
            self.write("\n")


def _send(message: tuple[Any, ...]) -> None:
    import cloudpickle

    _pipe[0].send_bytes(cloudpickle.dumps(message))


def location(trace: TracebackType | None) -> tuple[str, int, str] | None:
    """File, line and function of the innermost line that is neither a library's nor ours: the learner's."""
    found = None
    while trace:
        code = trace.tb_frame.f_code
        file = Path(code.co_filename)
        library = "site-packages" in file.parts or file.suffix == ".pyx" or not OURS.isdisjoint(file.parents)
        if not library:
            found = (code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return found


def _interface(notebook: Connection) -> str | None:
    """The network interface over which this rank reached the notebook: the loopback's where both are on one machine."""
    with socket.socket(fileno=os.dup(notebook.fileno())) as twin:
        return rendezvous.interface_of(twin.getsockname()[0] if twin.family == socket.AF_INET else "127.0.0.1")
