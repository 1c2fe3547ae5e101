"""Acts as another user of the machine, who tries to reach a notebook's ranks."""

import base64
import contextlib
import encodings.idna  # noqa: F401  another user may not be able to read this Python's files
import errno
import multiprocessing
import os
import pickle
import random
import re
import secrets
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection, HTTPException
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, deliver_challenge
from pathlib import Path

import pytest
from marks import marked
from ranks import wait_until

from labtools import LabError, Ranks
from labtools.admission import Listener, connect

pytest.importorskip("horovod.torch", reason="needs Horovod: python -m hvdtrain build")
pytestmark = [pytest.mark.launched, pytest.mark.xdist_group("labs")]
NOBODY = 65534
LABS = Path(__file__).parents[2] / "labs"
LOOPBACK = ("127.0.0.1", 0)
IN_ENVIRONMENT = "what-only-the-environment-holds"

NOTEBOOKS = {
    "local": """
from labtools import Ranks
def function():
    import time, horovod.torch as hvd
    hvd.init()
    print("runs what-only-the-function-holds")
    time.sleep(600)
if __name__ == "__main__":
    Ranks(2).run(function, seconds=600)
""",
    "mpi": """
from labtools import run_mpi
def function():
    import time
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()
    print("runs what-only-the-function-holds")
    time.sleep(600)
if __name__ == "__main__":
    run_mpi(function, ranks=2, seconds=600)
""",
}


class Evil:
    """Unpickled, it leaves a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def as_nobody(function, *arguments):
    """What the function returns, or the name of its error, in a process of another user; without root, of this user."""
    ours, its = multiprocessing.Pipe()

    def attack():
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        try:
            its.send(function(*arguments))
        except Exception as error:
            its.send(type(error).__name__)

    attacker = multiprocessing.get_context("fork").Process(target=attack)
    attacker.start()
    with ours, its:
        try:
            return ours.recv()
        finally:
            attacker.join()


class Notebook:
    """A notebook's process and all those that it starts, which inherit a variable of its environment."""

    def __init__(self, kind, folder):
        self.mark = secrets.token_hex(16)
        self.temporary = folder
        folder.mkdir()
        environ = {**os.environ, "MARK": self.mark, "LAB_TOKEN": IN_ENVIRONMENT, "TMPDIR": str(folder)}
        command = [sys.executable, "-c", NOTEBOOKS[kind]]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, cwd=LABS)

    def processes(self):
        """Process ids and command lines, as ps shows them."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def kill(self):
        self.process.kill()
        self.process.communicate()

    def wait_until_gone(self):
        wait_until(lambda: not self.processes())


def ports_of(pid):
    """The TCP ports, and their addresses, that a process listens on."""
    links = []
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(str(descriptor.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in links:
                address, _, port = local.partition(":")
                found.add((address, int(port, 16)))
    return found


def over_http(ports, marker):
    """The functions that these ports hand out. Sends each a function, and a result, which would leave a file."""
    handed_out, evil = [], base64.b64encode(pickle.dumps(Evil(marker)))
    for port in ports:
        for method, path, body in (
            ("GET", "/runfunc/func", None),
            ("PUT", "/runfunc/func", evil),
            ("PUT", "/runfunc_result/0", evil),
        ):
            with contextlib.suppress(OSError, HTTPException):
                http = HTTPConnection("127.0.0.1", port, timeout=0.3)
                http.request(method, path, body)
                answer = http.getresponse()
                handed_out += [answer.read()] if (method, answer.status) == ("GET", 200) else []
    return [function for function in handed_out if function != evil]


def role(command):
    started = re.search(r"labtools\.start *(\w*)", command)
    if started:
        return "rank" if started[1] in {"local", "mpi", "engine"} else "launcher"
    return Path(command.split(" ")[0]).name


class Evidence:
    """What another user can see of a notebook, from its start until a rank runs its function. Then it is killed."""

    def __init__(self, kind, folder):
        self.commands, self.ports, self.handed_out = set(), set(), []
        self.marker = folder / "marker"
        folder.chmod(0o777)
        notebook = Notebook(kind, folder / "tmp")
        running = threading.Event()
        thread = threading.Thread(target=self._listen, args=(notebook, running))
        thread.start()
        try:
            while not running.wait(0.1):
                self._look(notebook)
            self._look(notebook)
            self.modes = [stat.S_IMODE(path.stat().st_mode) for path in notebook.temporary.glob("hvdtrain*")]
        finally:
            notebook.kill()
            thread.join()
        notebook.wait_until_gone()
        self.left = list(notebook.temporary.iterdir())

    def _listen(self, notebook, running):
        next((line for line in notebook.process.stdout if "runs" in line), None)
        running.set()

    def _look(self, notebook):
        processes = notebook.processes()
        self.commands |= set(processes.values())
        for pid, command in processes.items():
            who = "notebook" if pid == notebook.process.pid else role(command)
            self.ports |= {(who, *port) for port in ports_of(pid)}
        self.handed_out += as_nobody(over_http, {port for _, _, port in self.ports}, self.marker)


@pytest.fixture(scope="module", params=marked(NOTEBOOKS, slow={"mpi"}))
def evidence(request, tmp_path_factory):
    return request.param, Evidence(request.param, tmp_path_factory.mktemp(request.param))


def test_no_port_hands_the_function_out(evidence):
    """Horovod's rendezvous is the notebook's only port; MPI's own, and Gloo's on the loopback, serve no HTTP."""
    kind, seen = evidence
    assert seen.handed_out == []
    assert not seen.marker.exists()
    assert len([who for who, *_ in seen.ports if who == "notebook"]) == (1 if kind == "local" else 0)
    others = {who for who, *_ in seen.ports} - {"notebook"}
    if kind == "local":
        assert others <= {"rank"}
        assert {address for who, address, _ in seen.ports if who == "rank"} <= {"0100007F"}
    else:
        assert others <= {"rank", "mpirun", "prterun", "orterun", "mpiexec.hydra", "hydra_pmi_proxy"}


def test_ps_shows_nothing_of_the_function_or_the_environment(evidence):
    _, seen = evidence
    assert [role(command) for command in seen.commands if IN_ENVIRONMENT in command] == []
    started = [command for command in seen.commands if role(command) in {"rank", "launcher"}]
    assert started
    assert [command for command in started if "what-only" in command] == []


def test_the_folder_of_a_socket_is_the_users_own(evidence):
    kind, seen = evidence
    assert seen.modes == ([0o700] if kind == "mpi" else [])


def test_nothing_is_left_of_a_notebook_that_is_killed(evidence):
    _, seen = evidence  # collected after all its processes had ended
    assert seen.left == []


@pytest.mark.slow
def test_nothing_is_left_of_notebooks_that_are_killed_at_their_start(tmp_path):
    notebooks = [Notebook(kind, tmp_path / kind) for kind in NOTEBOOKS]
    wait_until(lambda: all(len(notebook.processes()) > 1 for notebook in notebooks))
    for notebook in notebooks:
        notebook.kill()
    for notebook in notebooks:
        notebook.wait_until_gone()
    assert [list(notebook.temporary.iterdir()) for notebook in notebooks] == [[], []]


def test_a_rank_that_cannot_start_is_explained():
    ranks = Ranks(1, preload=["no_such_module"])
    with pytest.raises(LabError, match=r"0 of 1 ranks came up. Output:\n(.*\n)*.*No module named 'no_such_module'"):
        ranks.run(os.getpid)
    ranks.close()


def sends_nothing(address, marker):
    return socket.create_connection(address)


def sends(*messages):
    def to(address, marker):
        stranger = socket.create_connection(address)
        with contextlib.suppress(OSError):
            for message in messages:
                stranger.sendall(message)
        return stranger

    return to


def sends_a_pickle(address, marker):
    stranger = socket.create_connection(address)
    with contextlib.suppress(OSError), Connection(os.dup(stranger.fileno())) as twin:
        twin.send(Evil(marker))
    return stranger


def has_another_key(address, marker):
    with contextlib.suppress(AuthenticationError, EOFError, OSError):
        return Client(address, authkey=secrets.token_bytes(32))
    return None


def reflects_the_challenge(address, marker):
    """Sends the challenge back, to get its answer."""
    stranger = socket.create_connection(address)
    with contextlib.suppress(OSError, EOFError), Connection(os.dup(stranger.fileno())) as twin:
        twin.send_bytes(twin.recv_bytes())
    return stranger


STRANGERS = {
    "silent": sends_nothing,
    "garbage": sends(b"\xff" * 10_000),
    "a message of 2 GiB": sends(struct.pack("!i", 2**31 - 1), b"x" * 10_000),
    "half a message": sends(struct.pack("!i", 16), b"x"),
    "a pickle": sends_a_pickle,
    "another key": has_another_key,
    "a reflected challenge": reflects_the_challenge,
}


def strike(stranger, address, marker, held, over):
    """Forty connections, which stay open until it is over."""
    strangers = [stranger(address, marker) for _ in range(40)]
    held.set()
    over.wait()
    return len(strangers)


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_strangers_keep_no_rank_out(stranger, tmp_path, monkeypatch):
    monkeypatch.setattr("labtools.admission.HANDSHAKE", 600.0)
    tmp_path.chmod(0o777)
    marker, key = tmp_path / "marker", secrets.token_bytes(32)
    held, over = multiprocessing.Event(), multiprocessing.Event()
    listener = Listener(LOOPBACK, 2, key)
    attacker = threading.Thread(target=as_nobody, args=(strike, stranger, listener.address, marker, held, over))
    attacker.start()
    held.wait()
    try:
        ranks = [connect(listener.address, key) for _ in range(2)]
    finally:
        over.set()
        attacker.join()
    for number, rank in enumerate(ranks):
        rank.send(number)
    wait_until(lambda: len(listener.admitted) == 2)
    assert sorted(admitted.recv() for admitted in listener.admitted) == [0, 1]
    wait_until(lambda: refuses(listener.address))
    assert not marker.exists()


def refuses(address):
    with socket.socket() as late:
        return late.connect_ex(address) == errno.ECONNREFUSED


def opens_with(address, openings):
    for opening in openings:
        with contextlib.suppress(OSError), socket.create_connection(address) as stranger:
            stranger.sendall(opening)


def openings(seed, number):
    """Bytes as they come, behind a length that is right or wrong, or behind the first bytes of a challenge."""
    dice = random.Random(seed)
    for _ in range(number):
        body = dice.choice([b"", b"#CHALLENGE#", b"#WELCOME#"]) + dice.randbytes(dice.randrange(300))
        length = dice.choice([len(body), dice.randrange(-(2**31), 2**31), None])
        yield body if length is None else struct.pack("!i", length) + body


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_random_openings(seed=16, number=1000):
    key = secrets.token_bytes(32)
    listener = Listener(LOOPBACK, 1, key)
    as_nobody(opens_with, listener.address, list(openings(seed, number)))
    assert listener.admitted == []
    connect(listener.address, key).close()
    wait_until(lambda: len(listener.admitted) == 1)


def test_a_stranger_who_sends_slowly_is_disconnected(monkeypatch):
    monkeypatch.setattr("labtools.admission.HANDSHAKE", 0.5)
    listener = Listener(LOOPBACK, 2, secrets.token_bytes(32))
    with (
        socket.create_connection(listener.address) as stranger,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        stranger.send(struct.pack("!i", 200))
        for _ in range(100):
            stranger.send(b"\0")
            time.sleep(0.05)
        while stranger.recv(100):  # for ever, if it were not
            pass
    listener.close()


IMPOSTORS = {
    "silent": (lambda rank: None, EOFError),
    "another key": (lambda rank: deliver_challenge(rank, bytes(32)), AuthenticationError),
    "a pickle": (lambda rank: rank.send(Evil("marker")), (AssertionError, AuthenticationError)),
}


@pytest.mark.parametrize(("greet", "error"), IMPOSTORS.values(), ids=IMPOSTORS)
def test_a_rank_rejects_an_impostor(greet, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("labtools.admission.HANDSHAKE", 0.3)
    monkeypatch.setattr("labtools.admission.ATTEMPTS", 2)

    def pose():
        with contextlib.suppress(OSError):
            while True:
                rank, _ = server.accept()
                with contextlib.suppress(AuthenticationError, EOFError, OSError):
                    greet(Connection(rank.detach()))

    with socket.create_server(LOOPBACK) as server:
        threading.Thread(target=pose, daemon=True).start()
        with pytest.raises(error):
            connect(server.getsockname(), secrets.token_bytes(32))
    assert list(tmp_path.iterdir()) == []


needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs another user: sudo .venv/bin/python -m pytest tests/labs/test_security.py"
)


@needs_root
def test_another_user_at_a_unix_socket(tmp_path):
    folder = Path(tempfile.mkdtemp())
    path = folder / "ranks"
    listener = Listener(str(path), 1)
    try:
        assert as_nobody(connect, str(path)) == "PermissionError"
        folder.chmod(0o777)
        path.chmod(0o777)
        assert as_nobody(socket_path_greeting, str(path)) == b""
        assert listener.admitted == []
        connect(str(path))
        wait_until(lambda: len(listener.admitted) == 1)
    finally:
        shutil.rmtree(folder)


def socket_path_greeting(path):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(path)
        return stranger.recv(100)


@needs_root
def test_a_rank_rejects_another_users_socket(tmp_path):
    path = str(tmp_path / "ranks")
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(path)
        as_nobody(impostor.listen)  # the system reports the user who listens as the peer
        with pytest.raises(AuthenticationError, match=f"uid {NOBODY}, not to 0"):
            connect(path)


@pytest.mark.slow
def test_silent_connections_and_ranks_beside_engines(start_engines):
    def rank():  # engines do not find this module
        import horovod.torch as hvd

        hvd.init()
        return hvd.rank()

    start_engines()
    before = ports_of(os.getpid())
    ranks = Ranks(2)
    ((address, port),) = ports_of(os.getpid()) - before
    host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
    silent = [socket.socket() for _ in range(20)]
    for stranger in silent:
        stranger.setblocking(False)
        stranger.connect_ex((host, port))
    assert ranks.run(rank) == [0, 1]
    assert (address, port) not in ports_of(os.getpid())
    assert host == "127.0.0.1"  # where the engines' controller listens
    ranks.close()
    for stranger in silent:
        stranger.close()
