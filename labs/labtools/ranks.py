"""Ranks that a notebook starts, runs functions on, and watches: on this machine, or on ipyparallel's engines."""

import contextlib
import io
import linecache
import marshal
import pickle
import re
import secrets
import signal
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from types import CodeType
from typing import Any, ClassVar

from hvdtrain.errors import EngineUnavailable, LabError
from hvdtrain.launch import gloo, keys
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.launch.topology import Topology
from labtools import processes
from labtools.processes import Rank

AFTER_FIRST = 10.0  # seconds the other ranks have, once one has its result and longer than it took
AFTER_FAILURE = 0.5  # seconds in which others may fail alike

Watch = Callable[[int, Any], None]

_MEANT = {  # the usual slips: what Horovod, PyTorch or MPI says (a pattern), and what it means
    r"torch\.distributed|process group": (
        "torch.distributed is PyTorch's own library, which does not know these ranks. Horovod does: hvd.init()."
    ),
    "not been initialized": "Horovod is not running in this process: call hvd.init() first, on every rank.",
    "Mismatched .*shapes": (
        "The ranks give tensors of different shapes to one allreduce. A mean needs one shape on all ranks: the last "
        "batch may be shorter on one of them, or a layer has another size."
    ),
    "Mismatched data types": (
        "The ranks give numbers of different types (float32 and float64, say) to one allreduce: convert them first."
    ),
    "Mismatched.*root": (
        "The ranks name different roots. The root is the rank whose values all take over: the same number on each."
    ),
    "same name": (
        "One name stands for two tensors at the same time. Give each hvd.allreduce a name of its own, or leave it out; "
        "and wrap an optimizer once."
    ),
    "has been shut down": (
        "Another rank has failed or left, and Horovod ended on this one as well. Look for the first failure."
    ),
    "named_parameters": (
        "named_parameters has to name every parameter that the optimizer has: model.named_parameters(), of this model."
    ),
    "already a DistributedOptimizer": "The optimizer is wrapped already: wrap it once, where it is made.",
    "more than backward_passes_per_step": (
        "backward() ran twice before a step(), and the first gradients are on their way to the other ranks: one "
        "backward() a step, or hvd.DistributedOptimizer(..., backward_passes_per_step=2)."
    ),
    r"zero_grad\(\) was called after": (
        "zero_grad() comes between backward() and step(), and takes the gradients away that are just being averaged: "
        "clear them before backward()."
    ),
    "'numpy.ndarray' object has no attribute 'new'": (
        "hvd of horovod.torch takes PyTorch's tensors, and this is a NumPy array: torch.from_numpy(array)."
    ),
    "MPI_ERR_TRUNCATE": (
        "A message is longer than the array it is received into. Both sides have to agree on the chunk's length."
    ),
    "MPI_ERR_RANK": "There is no such rank: they are 0 to comm.size - 1, and behind the last comes 0.",
}


class Ranks:
    """Warm rank processes, with Horovod and PyTorch loaded: a run on them costs a tenth of a second, not seconds.

    They are processes of this machine, or, where an ipyparallel cluster with enough engines is up
    (`ipcluster start -n 4 --engines=mpi`), one beside each of its engines. They end with this process.
    `preload` names modules that they load once, rather than in each run: `torch._dynamo`, which every optimizer of
    PyTorch imports, takes two seconds. Raises LabError where they do not start.
    """

    def __init__(self, size: int = 4, preload: Sequence[str] = ()) -> None:
        self.size = size
        engines = processes.engines_of(size)
        self._processes = processes.beside(engines, preload) if engines else processes.local(size, preload)
        self._key = secrets.token_bytes(keys.BYTES)
        self._rendezvous: gloo.RendezvousServer | None = None

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int | None = None,
        environ: Mapping[str, str] | None = None,
        watch: Watch | None = None,
        seconds: float = 60,
    ) -> list[Any]:
        """What `function(*arguments)` returns on each of the first `ranks` ranks (by default all).

        Each runs in a fresh process, where `hvd.init()` joins these ranks over Gloo; `environ` is added to its
        environment. What it prints appears here behind its rank. A value that it passes to `tell` goes to
        `watch(rank, value)`. Raises LabError for a rank that fails, or waits for another longer than `seconds`.
        """
        size = self.size if ranks is None else ranks
        if not 1 <= size <= self.size:
            raise LabError(f"ranks must lie in [1, {self.size}], the number that was started, got {size}.")
        there = self._processes.ranks()[:size]
        task = _dumps((function, arguments))
        for rank, variables in zip(there, self._variables(there), strict=True):
            rank.connection.send_bytes(pickle.dumps(("run", {**variables, **(environ or {})}, task)))
        return _collect(there, function, watch, seconds)

    def close(self) -> None:
        """Ends the ranks."""
        self._processes.end()

    def _variables(self, there: list[Rank]) -> list[dict[str, str]]:
        """Each rank's environment variables, by which hvd.init() joins these ranks."""
        self._rendezvous = self._rendezvous or gloo.RendezvousServer(self._key, self._processes.host)
        endpoints = _endpoints([rank.host for rank in there])
        self._rendezvous.expect(endpoints)
        topologies = [replace(Topology.alone(), rank=number, size=len(there)) for number in range(len(there))]
        host, port = self._processes.host, self._rendezvous.port
        return [
            gloo.variables(topology, endpoints, host, port, rank.interface, self._key)
            for topology, rank in zip(topologies, there, strict=True)
        ]


def run_mpi(
    function: Callable[..., Any], *arguments: Any, ranks: int = 4, watch: Watch | None = None, seconds: float = 120
) -> list[Any]:
    """What `function(*arguments)` returns on each rank of one mpirun, in which mpi4py finds the others.

    `watch`, and the LabErrors that are raised, are as with `Ranks.run`.
    """
    task = _dumps((function, arguments))
    started = processes.in_mpirun(ranks)
    try:
        there = started.ranks()
        for rank in there:
            rank.connection.send_bytes(pickle.dumps(("run", {}, task)))
        return _collect(there, function, watch, seconds, warm=False)
    finally:
        started.end()


def _collect(
    there: list[Rank], function: Callable[..., Any], watch: Watch | None, seconds: float, warm: bool = True
) -> list[Any]:
    """Receives the ranks' messages until the run is over, and ends it: on return no warm rank runs any more.

    Others are left to their mpirun: a rank that waits inside MPI for ever would not answer.
    """
    run = _Run(function, len(there), seconds)
    numbers = {rank.connection: number for number, rank in enumerate(there)}
    try:
        while not run.is_over():
            for connection in wait(list(numbers), timeout=0.1):
                assert isinstance(connection, Connection)
                run.receive(numbers[connection], connection, watch)
    finally:
        request = "done" if len(run.results) == len(there) else "stop"
        _end_run([rank for rank in there if numbers[rank.connection] not in run.ended], request, warm)
    run.explain()
    return [run.results[number] for number in range(len(there))]


class _Run:
    """The results, failures and exits of one run so far."""

    def __init__(self, function: Callable[..., Any], size: int, seconds: float) -> None:
        self.name, self.size = getattr(function, "__name__", "the function"), size
        self.results: dict[int, Any] = {}
        self.failures: dict[int, tuple[str, str, tuple[str, int, str] | None]] = {}
        self.ended: dict[int, int] = {}
        self._started = time.monotonic()
        self._deadline = self._started + seconds
        self._late = False

    def receive(self, number: int, connection: Connection, watch: Watch | None) -> None:
        try:
            kind, *rest = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            kind, rest = "ended", [-9]
        now = time.monotonic()
        if kind == "result":
            self.results[number] = rest[0]
            self._deadline = min(self._deadline, now + max(AFTER_FIRST, now - self._started))
        elif kind == "failed":
            self.failures[number] = tuple(rest)
            self._deadline = min(self._deadline, now + AFTER_FAILURE)
        elif kind == "ended":
            self.ended[number] = rest[0]
        elif kind == "printed":
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
            why = "a library aborted" if code == -signal.SIGABRT else "out of memory, or killed"
            raise LabError(f"Rank {number} of {self.size} ended {how} in {self.name}(): {why}.")
        if self._late:
            raise LabError(self._waiting())

    def _failure(self, number: int, kind: str, message: str, location: tuple[str, int, str] | None) -> str:
        alike = len(self.failures) == self.size > 1
        who = f"All {self.size} ranks" if alike else f"Rank {number} of {self.size}"
        where, line = "", ""
        if location:
            where = f" in {location[2]}(), line {location[1]}"
            line = linecache.getline(location[0], location[1]).strip()
        words = next((text for pattern, text in _MEANT.items() if re.search(pattern, message)), "")
        return "\n".join(
            [
                f"{who} failed{where}:",
                *([f"    {line}"] if line else []),
                *([words] if words else []),
                f"{kind}: {message}",
            ]
        )

    def _waiting(self) -> str:
        if not self.results:
            return (
                f"No rank has come to the end of {self.name}() in {self._deadline - self._started:.0f} seconds. "
                "Ranks that call collectives (allreduce, broadcast) in a different order, or all send before any "
                "receives, wait for one another for ever."
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


def _end_run(there: list[Rank], request: str, warm: bool) -> None:
    """Sends the request to each rank, and waits until all have ended the run, where they can be expected to."""
    for rank in there:
        with contextlib.suppress(OSError):
            rank.connection.send_bytes(pickle.dumps((request,)))
    for rank in there if warm or request == "done" else ():
        with contextlib.suppress(EOFError, OSError):
            while pickle.loads(rank.connection.recv_bytes())[0] != "ended":
                pass


def _endpoints(hosts: list[str]) -> list[Endpoint]:
    """Every rank's endpoint, from its host's name."""
    names = list(dict.fromkeys(hosts))
    return [Endpoint(host, names.index(host), hosts[:rank].count(host)) for rank, host in enumerate(hosts)]


def _dumps(task: tuple[Callable[..., Any], tuple[Any, ...]]) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise EngineUnavailable("Ranks need Horovod with its cloudpickle; build it: python -m hvdtrain build") from None

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar = ChainMap({CodeType: _code}, cloudpickle.Pickler.dispatch_table)

    content = io.BytesIO()
    Pickler(content).dump(task)
    return content.getvalue()


def _code(code: CodeType) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    """cloudpickle 3.1.3 drops the name of the file, which the explanation of a failure shows a line of."""
    return marshal.loads, (marshal.dumps(code),)
