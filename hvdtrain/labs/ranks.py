"""Ranks that a notebook starts, runs functions on, and watches: on this machine, or on ipyparallel's engines."""

import contextlib
import linecache
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from hvdtrain import gloo, meeting
from hvdtrain.errors import EngineUnavailable, LabError
from hvdtrain.labs import worker
from hvdtrain.meeting import Seat
from hvdtrain.topology import Topology

START = 90.0  # seconds for the ranks to come: each loads a framework, on a laptop in turns
AFTER_FIRST = 10.0  # seconds the other ranks have, once one has its result and longer than it took
AFTER_FAILURE = 0.5  # seconds in which others may fail alike

Watch = Callable[[int, Any], None]


@dataclass(frozen=True)
class _Rank:
    """A rank that has come."""

    connection: Connection
    host: str
    interface: str | None


class Ranks:
    """Warm rank processes, with Horovod and PyTorch loaded: a run on them costs a tenth of a second, not seconds.

    They are started by `horovod.run` on this machine, or, where an ipyparallel cluster with enough engines is up
    (`ipcluster start -n 4 --engines=mpi`), one beside each of its engines. They end with this process.
    `preload` names modules that they load at the start, rather than each run anew: `torch._dynamo`, which every
    optimizer of PyTorch wants, takes two seconds. Raises LabError where they do not come.
    """

    def __init__(self, size: int = 4, preload: Sequence[str] = ()) -> None:
        self.size = size
        engines = _engines(size)
        self._call = _Call(worker.serve, (tuple(preload),), size, over_mpi=False, engines=engines)
        self._rendezvous: gloo.Rendezvous | None = None

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int | None = None,
        environ: Mapping[str, str] | None = None,
        watch: Watch | None = None,
        seconds: float = 60,
    ) -> list[Any]:
        """What `function(*arguments)` returns on each of the first `ranks` ranks (all, where not said).

        Each runs in a fresh process, where `hvd.init()` joins these ranks over Gloo; `environ` is added to its
        environment. What it prints appears here behind its rank, what it tells goes to `watch(rank, value)`.
        Raises LabError for a rank that fails, or waits for another longer than `seconds`.
        """
        size = self.size if ranks is None else ranks
        if not 1 <= size <= self.size:
            raise LabError(f"ranks must lie in [1, {self.size}], the number that was started, got {size}.")
        there = self._call.ranks()[:size]
        self._rendezvous = self._rendezvous or gloo.Rendezvous()
        seats = _seats([rank.host for rank in there])
        self._rendezvous.expect(seats)
        task = _dumps((function, arguments))
        for number, rank in enumerate(there):
            topology = replace(Topology.alone(), rank=number, size=size)
            given = gloo.variables(topology, seats, self._call.host, self._rendezvous.port, rank.interface)
            rank.connection.send_bytes(pickle.dumps(("run", {**given, **(environ or {})}, task)))
        return _collect(there, function, watch, seconds)

    def close(self) -> None:
        """Ends the ranks."""
        self._call.end()


def run_mpi(function: Callable[..., Any], *arguments: Any, ranks: int = 4, seconds: float = 120) -> list[Any]:
    """What `function(*arguments)` returns on each rank of one mpirun, in which mpi4py finds the others.

    Raises LabError as `Ranks.run` does.
    """
    call = _Call(worker.serve_once, (_dumps((function, arguments)),), ranks, over_mpi=True, engines=None)
    try:
        return _collect(call.ranks(), function, None, seconds)
    finally:
        call.end()


class _Call:
    """The processes that were asked to come, and those that have."""

    def __init__(
        self, function: Callable[..., None], arguments: tuple[Any, ...], size: int, *, over_mpi: bool, engines: Any
    ) -> None:
        key = secrets.token_bytes(16)
        self.host = meeting.addresses()[0] if engines else "127.0.0.1"
        self._listener = Listener((self.host, 0), backlog=size, authkey=key)
        self._come: dict[int, _Rank] = {}
        self._size = size
        self._thread = threading.Thread(target=self._welcome, daemon=True)
        self._thread.start()
        given = (self._listener.address, key, *arguments)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it is written as long as the ranks live
        if engines:
            self._process = None
            for rank, engine in enumerate(engines):
                engine.apply_async(_beside_engine, given, rank)
        else:
            self._process = self._start(pickle.dumps((function, given, size, over_mpi)))
            self._ending = weakref.finalize(self, _end, self._process)

    def ranks(self) -> list[_Rank]:
        """All ranks, once they have come."""
        deadline = time.monotonic() + START
        while len(self._come) < self._size:
            self._thread.join(0.1)
            dead = self._process and self._process.poll() is not None
            if (dead and len(self._come) < self._size) or time.monotonic() > deadline:
                raise self._absent()
        return [self._come[rank] for rank in range(self._size)]

    def end(self) -> None:
        for rank in self._come.values():
            rank.connection.close()
        self._listener.close()
        if self._process:
            self._ending()

    def _start(self, task: bytes) -> "subprocess.Popen[bytes]":
        # pip's mpirun lies beside this Python, which an environment need not be activated to start.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        # A session of its own: the interrupt of a cell is not for the launcher.
        process = subprocess.Popen(
            [sys.executable, "-m", "hvdtrain.labs.start"],
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PATH": path},
            start_new_session=True,
        )
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(task)
            process.stdin.close()
        return process

    def _welcome(self) -> None:
        while len(self._come) < self._size:
            try:
                connection = self._listener.accept()
                _, rank, host, interface = connection.recv()
            except OSError:  # closed: nobody is waited for any more
                return
            except Exception:  # a stranger on this port, who does not know the key
                continue
            self._come[rank] = _Rank(connection, host, interface)

    def _absent(self) -> LabError:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()[-5:]
        why = "\n".join(["It said:", *said]) if said else "It said nothing."
        return LabError(
            f"{len(self._come)} of {self._size} ranks came up. {why}\n"
            "python -m hvdtrain doctor finds what is wrong here."
        )


def _collect(there: list[_Rank], function: Callable[..., Any], watch: Watch | None, seconds: float) -> list[Any]:
    """Hears the ranks out and lets them go; on return none of them runs any more."""
    run = _Run(function, len(there), seconds)
    numbers = {rank.connection: number for number, rank in enumerate(there)}
    try:
        while not run.is_over():
            for connection in wait(list(numbers), timeout=0.1):
                assert isinstance(connection, Connection)
                run.hear(numbers[connection], connection, watch)
    finally:
        word = ("done",) if len(run.results) == len(there) else ("stop",)
        _let_go([rank for rank in there if numbers[rank.connection] not in run.ended], word)
    run.explain()
    return [run.results[number] for number in range(len(there))]


class _Run:
    """What one run has come to so far."""

    def __init__(self, function: Callable[..., Any], size: int, seconds: float) -> None:
        self.name, self.size = getattr(function, "__name__", "the function"), size
        self.results: dict[int, Any] = {}
        self.failures: dict[int, tuple[str, str, tuple[str, int, str] | None]] = {}
        self.ended: dict[int, int] = {}
        self._started = time.monotonic()
        self._deadline = self._started + seconds
        self._late = False

    def hear(self, number: int, connection: Connection, watch: Watch | None) -> None:
        try:
            word, *rest = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            word, rest = "ended", [-9]
        now = time.monotonic()
        if word == "result":
            self.results[number] = rest[0]
            self._deadline = min(self._deadline, now + max(AFTER_FIRST, now - self._started))
        elif word == "failed":
            self.failures[number] = tuple(rest)
            self._deadline = min(self._deadline, now + AFTER_FAILURE)
        elif word == "ended":
            self.ended[number] = rest[0]
        elif word == "said":
            print(f"[rank {number}] {rest[0]}", flush=True)
        elif watch:
            watch(number, rest[0])

    def is_over(self) -> bool:
        """Whether all ranks have answered, or no more can be expected."""
        self._late = time.monotonic() > self._deadline
        return bool(self.ended) or self._late or len(self.results) + len(self.failures) == self.size

    def explain(self) -> None:
        """Raises LabError unless every rank has its result."""
        if self.failures:
            number = min(self.failures)
            raise LabError(self._failure(number, *self.failures[number]))
        if self.ended:
            number, code = next(iter(self.ended.items()))
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise LabError(f"Rank {number} of {self.size} ended {how} in {self.name}(): out of memory, or killed.")
        if self._late:
            raise LabError(self._waiting())

    def _failure(self, number: int, kind: str, message: str, place: tuple[str, int, str] | None) -> str:
        alike = len(self.failures) == self.size > 1
        who = f"All {self.size} ranks" if alike else f"Rank {number} of {self.size}"
        where, line = "", ""
        if place:
            where = f" in {place[2]}(), line {place[1]}"
            line = linecache.getline(place[0], place[1]).strip()
        return "\n".join([f"{who} failed{where}:", *([f"    {line}"] if line else []), f"{kind}: {message}"])

    def _waiting(self) -> str:
        if not self.results:
            return (
                f"No rank has come to the end of {self.name}() in {self._deadline - self._started:.0f} seconds. "
                "Ranks that call collectives (allreduce, broadcast) in a different order wait for one another for ever."
            )
        waiting = [number for number in range(self.size) if number not in self.results]
        who = (
            f"Rank {waiting[0]} still waits"
            if len(waiting) == 1
            else f"Ranks {', '.join(map(str, waiting))} still wait"
        )
        return (
            f"{who} in {self.name}(), while rank {min(self.results)} has come to its end.\n"
            "Every rank has to call every collective (allreduce, broadcast), in the same order: look for one that only "
            "some ranks reach, behind an `if hvd.rank() == 0:` for example."
        )


def _let_go(there: list[_Rank], word: tuple[str]) -> None:
    for rank in there:
        with contextlib.suppress(OSError):
            rank.connection.send_bytes(pickle.dumps(word))
    for rank in there:
        with contextlib.suppress(EOFError, OSError):
            while pickle.loads(rank.connection.recv_bytes())[0] != "ended":
                pass


def _seats(hosts: list[str]) -> list[Seat]:
    """Every rank's seat, from its host's name."""
    names = list(dict.fromkeys(hosts))
    return [Seat(host, names.index(host), hosts[:rank].count(host)) for rank, host in enumerate(hosts)]


def _dumps(task: tuple[Callable[..., Any], tuple[Any, ...]]) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise EngineUnavailable("Ranks need Horovod with its cloudpickle; build it: python -m hvdtrain build") from None
    return bytes(cloudpickle.dumps(task))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the launcher, which ends its ranks; those of ours end by themselves once the notebook is gone."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _engines(size: int) -> list[Any] | None:
    """The first engines of an ipyparallel cluster of this user's, where one with enough of them is up."""
    home = Path(os.environ.get("IPYTHONDIR", Path.home() / ".ipython"))
    for connection in home.glob("profile_*/security/ipcontroller*-client.json"):
        import ipyparallel

        try:
            client = ipyparallel.Client(str(connection), timeout=5)
        except (OSError, TimeoutError):  # a cluster that is gone
            continue
        if len(client.ids) >= size:
            return [client[number] for number in client.ids[:size]]
        client.close()
    return None


def _beside_engine(given: tuple[Any, ...], rank: int) -> None:
    """On an engine: a process beside it, which no MPI of the engine's disturbs, and waits for its end."""
    command = (
        f"import pickle, sys; from hvdtrain.labs.worker import serve; serve(*pickle.load(sys.stdin.buffer), {rank})"
    )
    launchers = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "HYDI_", "MPI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    subprocess.run(
        [sys.executable, "-c", command], input=pickle.dumps(given), env={"OMP_NUM_THREADS": "1", **kept}, check=True
    )
