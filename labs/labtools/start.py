"""The programs that a notebook starts: `python -m labtools.start KIND ...`, with nothing secret in it."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from hvdtrain.launch.ancestors import end_children_with_this
from labtools import admission, worker

FINISH = 2.0  # seconds in which mpirun ends by itself, once its ranks have
STOP = 5.0  # seconds in which it ends after SIGTERM


def _local(descriptor: str, rank: str, *preload: str) -> None:
    """A rank on the notebook's own machine, which has inherited its connection."""
    os.set_inheritable(int(descriptor), False)
    worker.serve(Connection(int(descriptor)), int(rank), preload)


def _engine() -> None:
    """A rank beside an engine of ipyparallel's, whose standard input holds the notebook's address and key."""
    address, key, rank, preload = pickle.load(sys.stdin.buffer)
    worker.serve(admission.connect(address, key), rank, preload)


def _mpi(path: str) -> None:
    """A rank of mpirun."""
    from mpi4py import MPI

    worker.serve_once(admission.connect(path), MPI.COMM_WORLD.Get_rank())


def _mpirun(size: str, path: str) -> None:
    """One mpirun; it is ended once the notebook closes this process's standard input, or dies.

    horovodrun knows what Open MPI and MPICH want on a single machine, and for root.
    """
    rank = [sys.executable, "-m", "labtools.start", "mpi", path]
    horovodrun = [sys.executable, "-m", "horovod.runner.launch", "--mpi", "-np", size]
    mpirun = subprocess.Popen([*horovodrun, *rank], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_notebook, args=(mpirun.pid,), daemon=True).start()
    code = mpirun.wait()
    shutil.rmtree(Path(path).parent, ignore_errors=True)
    sys.exit(code)


def _end_with_notebook(mpirun: int) -> None:
    sys.stdin.buffer.read()
    time.sleep(FINISH)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # horovodrun keeps the first for itself
        os.killpg(mpirun, number)
        time.sleep(STOP)


if __name__ == "__main__":
    end_children_with_this()
    kinds: dict[str, Callable[..., None]] = {"local": _local, "engine": _engine, "mpi": _mpi, "mpirun": _mpirun}
    kinds[sys.argv[1]](*sys.argv[2:])
