"""The processes that are a notebook's ranks: on this machine, in one mpirun, or beside ipyparallel's engines."""

import contextlib
import json
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from hvdtrain.errors import LabError
from hvdtrain.launch import rendezvous
from hvdtrain.launch.topology import prefixes
from labtools.admission import Listener

START = 90.0  # seconds for the ranks to connect: each loads a framework, and a laptop's cores are few
END = 10.0  # seconds for a process to end, once its connection is closed
LOOPBACK = "127.0.0.1"
LABS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Rank:
    """A rank that has connected."""

    connection: Connection
    host: str
    interface: str | None


@dataclass(frozen=True)
class Engines:
    """The first engines of an ipyparallel cluster, and this host's address, as they reach it."""

    views: list[Any]
    host: str


@dataclass(frozen=True)
class _Child:
    """A child process and its output, in a file without a name."""

    process: "subprocess.Popen[bytes]"
    output: IO[bytes]

    def end(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def printed(self) -> list[str]:
        self.output.seek(0)
        return self.output.read().decode(errors="replace").strip().splitlines()


class Processes:
    """The processes that were started as ranks, and the ranks that have connected.

    `connections` grows as long as a listener admits ranks. They end with this object, and with this process.
    """

    def __init__(
        self,
        size: int,
        connections: list[Connection],
        children: Sequence[_Child] = (),
        listener: Listener | None = None,
        host: str = LOOPBACK,
    ) -> None:
        self.host = host
        self._size, self._connections, self._children = size, connections, children
        self._connected: dict[int, Rank] = {}
        self.end = weakref.finalize(self, _end, connections, children, listener)

    def ranks(self) -> list[Rank]:
        """All ranks, once they have connected. Raises LabError where they do not."""
        deadline = time.monotonic() + START
        while len(self._connected) < self._size:
            try:
                self._receive_new()
            except (EOFError, OSError):
                raise self._missing() from None
            ended = any(child.process.poll() is not None for child in self._children)
            if len(self._connected) < self._size and (ended or time.monotonic() > deadline):
                raise self._missing()
        return [self._connected[rank] for rank in range(self._size)]

    def _receive_new(self) -> None:
        known = {rank.connection for rank in self._connected.values()}
        for connection in wait([each for each in self._connections if each not in known], timeout=0.1):
            assert isinstance(connection, Connection)
            rank, host, interface = connection.recv()
            self._connected[rank] = Rank(connection, host, interface)

    def _missing(self) -> LabError:
        ended_first = sorted(self._children, key=lambda child: child.process.poll() is None)
        printed = next(filter(None, (child.printed() for child in ended_first)), [])
        why = "\n".join(["Output:", *printed[-5:]]) if printed else "There is no output."
        return LabError(
            f"{len(self._connected)} of {self._size} ranks came up. {why}\n"
            "python -m hvdtrain doctor finds what is wrong here."
        )


def local(size: int, preload: Sequence[str]) -> Processes:
    """Ranks on this machine, each of which inherits one end of a socket pair: no port, no file, no key."""
    pairs = [Pipe() for _ in range(size)]
    children = []
    for rank, (_, its) in enumerate(pairs):
        with its:
            children.append(_start("local", its.fileno(), rank, *preload, pass_fds=[its.fileno()]))
    return Processes(size, [ours for ours, _ in pairs], children)


def in_mpirun(size: int) -> Processes:
    """Ranks of one mpirun on this machine. They connect to a UNIX socket in a folder that is this user's alone."""
    path = Path(tempfile.mkdtemp(prefix="hvdtrain-"), "ranks")
    try:
        listener = Listener(str(path), size)
    except OSError as error:
        path.parent.rmdir()
        raise LabError(f"no socket at {path}: {error}; set TMPDIR to a local folder with a short name.") from None
    return Processes(size, listener.admitted, [_start("mpirun", size, path, stdin=subprocess.PIPE)], listener)


def beside(engines: Engines, preload: Sequence[str]) -> Processes:
    """One rank beside each engine. The key is sent in ipyparallel's own messages, and authenticates both ends."""
    size, key = len(engines.views), secrets.token_bytes(32)
    listener = Listener((engines.host, 0), size, key)
    for rank, view in enumerate(engines.views):
        view.execute(f"import sys; sys.path.append({str(LABS)!r})")
        view.apply_async(_beside_engine, (listener.address, key, rank, tuple(preload)))
    return Processes(size, listener.admitted, listener=listener, host=engines.host)


def engines_of(size: int) -> Engines | None:
    """The first engines of an ipyparallel cluster of this user's, where one with enough of them is up."""
    home = Path(os.environ.get("IPYTHONDIR", Path.home() / ".ipython"))
    for file in home.glob("profile_*/security/ipcontroller*-client.json"):
        import ipyparallel

        try:
            client = ipyparallel.Client(str(file), timeout=5)
        except (OSError, TimeoutError):  # a cluster that is gone
            continue
        if len(client.ids) >= size:
            return Engines([client[number] for number in client.ids[:size]], _host_for(file))
        client.close()
    return None


def _host_for(client: Path) -> str:
    """This host's address for the engines: the loopback's where the controller lets them connect over that alone."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        engine = client.with_name(client.name.replace("-client", "-engine"))
        if json.loads(engine.read_text())["interface"].endswith("://127.0.0.1"):
            return LOOPBACK
    return rendezvous.addresses()[0]


def _beside_engine(given: tuple[Any, ...]) -> None:
    """On an engine: runs a process beside it, without the engine's MPI variables, until that ends."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes())}
    subprocess.run(_command("engine"), input=pickle.dumps(given), env=_environment(kept), check=True)


def _start(*arguments: object, stdin: int = subprocess.DEVNULL, pass_fds: Sequence[int] = ()) -> _Child:
    # pip's mpirun lies beside this Python, which an environment need not be activated to start.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    output = tempfile.TemporaryFile()  # noqa: SIM115  it is written as long as the process lives
    process = subprocess.Popen(
        _command(*arguments),
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=pass_fds,
        env={**_environment(os.environ), "PATH": path},
        start_new_session=True,  # the interrupt of a cell is not for it
    )
    return _Child(process, output)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """With the folder of `labtools`, which is not installed, among those that a rank imports from."""
    path = f"{LABS}{os.pathsep}{environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    return {"OMP_NUM_THREADS": "1", **environ, "PYTHONPATH": path}


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "labtools.start", *map(str, arguments)]


def _end(connections: list[Connection], children: Sequence[_Child], listener: Listener | None) -> None:
    if listener:
        listener.close()
    for connection in connections:
        connection.close()
    for child in children:
        child.end()
