"""Runs Python programs in processes forked from one in which a framework is loaded, so that a rank starts in
milliseconds.

`command(kind, *argv)` replaces `python ARGV`: it starts a small process, which a launcher takes for Python. That sends
its arguments, environment, folder, stdin, stdout and stderr to the server of that kind, which forks a process that runs
the program. The small process passes its signals on, and ends as the forked process does. Where it is killed, the
server kills the forked process. `python warm.py KIND SOCKET` is the server, `python -IS warm.py SOCKET ARGV` the small
process, which imports nothing.
"""

import _socket
import marshal
import posix
import sys

Any = object  # typing takes longer to load than the small process runs

# The modules that each kind of server loads: those that a training imports, or most commands.
KINDS = {
    "hvdtrain": ["hvdtrain.run.main", "hvdtrain.tools.doctor.gather", "hvdtrain.tools.plan", "hvdtrain.tools.slurm"],
    "torch": ["horovod.torch", "torch._dynamo", "sklearn.datasets", "tensorboardX", "hvdtrain.torch.trainer"],
    "tensorflow": ["hvdtrain.tensorflow", "horovod.tensorflow", "sklearn.datasets", "hvdtrain.tensorflow.trainer"],
    "lightning": ["hvdtrain.lightning.recipe"],
    "keras2": ["horovod.tensorflow.keras", "tf_keras"],
}
KINDS["lightning"] = [*KINDS["torch"], *KINDS["lightning"]]
SIZE = 4  # bytes of a number on the socket
SERVER_GONE = 70
FEW_COLLECTIONS = (
    50_000  # objects made between two collections of garbage, for which a test's short programs need not stop
)
TAG = "HVDTRAIN_TEST_TAG"
NAME_LENGTH = 15  # of what a process may be called
PR_SET_NAME = 15  # by its name, the tag, ranks.tagged finds a forked process: /proc shows the server's environment


def command(kind: str, *argv: object) -> list[str]:
    """`python ARGV`, forked from the session's server of that kind, which is started the first time."""
    import fcntl
    from pathlib import Path

    from ranks import session

    kind = kind.partition("_")[0]  # tensorflow_keras has what TensorFlow has
    path = Path(session(), kind)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _start_server(kind, path)
    return [sys.executable, "-IS", __file__, str(path), *map(str, argv)]


def _start_server(kind: str, path: Any) -> None:
    import subprocess

    from ranks import clean_environ

    with path.with_suffix(".log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, kind, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=clean_environ(),
        )
        assert process.stdout
        if process.stdout.readline() != b"ready\n":
            log.seek(0)
            raise RuntimeError(f"the warm {kind} did not start: {log.read()[-3000:]}")
    _servers.append(process)


_servers: list[Any] = []
"""The servers that this process has started. They end with the session."""


def start(path: str, argv: list[str]) -> None:
    """The small process."""
    import _signal

    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    server.connect(path)
    request = marshal.dumps((argv, {bytes(k): bytes(v) for k, v in posix.environ.items()}, posix.getcwdb()))
    files = b"".join(number.to_bytes(SIZE, sys.byteorder) for number in (0, 1, 2))
    server.sendmsg([len(request).to_bytes(SIZE, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
    server.sendall(request)
    process = number(server)
    for passed in (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2, _signal.SIGCONT):
        if _signal.getsignal(passed) != _signal.SIG_IGN:
            _signal.signal(passed, lambda passed, _: posix.kill(process, passed))
    status = number(server)
    if posix.WIFSIGNALED(status):
        _signal.signal(posix.WTERMSIG(status), _signal.SIG_DFL) if posix.WTERMSIG(status) != _signal.SIGKILL else None
        posix.kill(posix.getpid(), posix.WTERMSIG(status))
        posix._exit(128 + posix.WTERMSIG(status))  # it is blocked
    posix._exit(posix.WEXITSTATUS(status))


def number(server: Any) -> int:
    """The next one on the socket; ends the small process where the server is gone."""
    answer = server.recv(SIZE)
    if len(answer) < SIZE:
        posix.write(2, b"the warm server is gone\n")
        posix._exit(SERVER_GONE)
    return int.from_bytes(answer, "big")


class Server:
    """Forks a process a request."""

    def __init__(self, path: str) -> None:
        import selectors
        import socket

        self.selectors, self.socket = selectors, socket
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        self.listener.listen(128)
        self.waiting = selectors.DefaultSelector()
        self.waiting.register(self.listener, selectors.EVENT_READ, self.accept)
        self.peers: dict[int, Any] = {}
        """By a forked process's number, the small process's socket."""
        self.ends: dict[int, int] = {}
        """By a forked process's number, the file descriptor that is readable at its end."""

    def serve(self) -> list[str]:
        """Serves until it is killed; returns the arguments in each forked process."""
        while True:
            for key, _ in self.waiting.select():
                if argv := key.data():
                    return argv

    def accept(self) -> list[str] | None:
        import contextlib
        import functools

        peer, _ = self.listener.accept()
        head, extra, *_ = peer.recvmsg(SIZE, self.socket.CMSG_SPACE(3 * SIZE))
        sent = b"".join(data for _, _, data in extra)
        files = [int.from_bytes(sent[at : at + SIZE], sys.byteorder) for at in range(0, len(sent), SIZE)]
        request = peer.recv(int.from_bytes(head, "big"), self.socket.MSG_WAITALL)
        if len(request) < int.from_bytes(head, "big") or not request:  # killed before it had sent all
            for file in files:
                posix.close(file)
            peer.close()
            return None
        argv, environ, folder = marshal.loads(request)
        process = posix.fork()
        if not process:
            self.become(environ, folder, files, peer)
            return argv
        for file in files:
            posix.close(file)
        with contextlib.suppress(OSError):  # killed since, which `left` handles
            peer.sendall(process.to_bytes(SIZE, "big"))
        self.peers[process], self.ends[process] = peer, posix.pidfd_open(process)
        self.waiting.register(self.ends[process], self.selectors.EVENT_READ, functools.partial(self.ended, process))
        self.waiting.register(peer, self.selectors.EVENT_READ, functools.partial(self.left, process))
        return None

    def become(self, environ: dict[bytes, bytes], folder: bytes, files: list[int], peer: Any) -> None:
        """Turns the forked process into the small one: its environment, folder and files, and nothing of the server."""
        import ctypes
        import os

        for other in (self.waiting, self.listener, peer, *self.peers.values()):
            other.close()
        for end in self.ends.values():
            os.close(end)
        for target, file in enumerate(files):
            os.dup2(file, target)
            os.close(file)
        os.environb.clear()
        os.environb.update(environ)
        os.chdir(folder)
        ctypes.CDLL(None).prctl(PR_SET_NAME, environ.get(TAG.encode(), b"warm"), 0, 0, 0)

    def left(self, process: int) -> None:
        """Kills the forked process, because the small one is gone."""
        if process not in self.peers:  # the forked one has ended too
            return
        self.waiting.unregister(self.peers[process])
        posix.kill(process, 9)

    def ended(self, process: int) -> None:
        import contextlib

        end, peer = self.ends.pop(process), self.peers.pop(process)
        self.waiting.unregister(end)
        posix.close(end)
        _, status = posix.waitpid(process, 0)
        with contextlib.suppress(KeyError):  # it is gone already
            self.waiting.unregister(peer)
        with contextlib.suppress(OSError):
            peer.sendall(status.to_bytes(SIZE, "big"))
        peer.close()


def serve(kind: str, path: str) -> list[str]:
    """Loads the kind's modules and serves; returns the arguments in each forked process."""
    import gc
    import importlib
    import os

    if kind == "keras2":
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
    for name in KINDS[kind]:
        importlib.import_module(name)
    if (threads := len(posix.listdir("/proc/self/task"))) > 1:
        sys.exit(f"the warm {kind} has {threads} threads and cannot fork: one of {KINDS[kind]} starts some")
    gc.collect()
    gc.freeze()
    gc.set_threshold(FEW_COLLECTIONS)
    server = Server(path)
    print("ready", flush=True)
    return server.serve()


def perform(argv: list[str]) -> None:
    """What `python ARGV` does."""
    import runpy
    from pathlib import Path

    if argv[0] == "-m":
        sys.argv[:] = argv[1:]
        sys.path[0] = ""
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv[:] = ["-c", *argv[2:]]
        sys.path[0] = ""
        exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = argv
        sys.path[0] = str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] in KINDS:
        perform(serve(*sys.argv[1:]))
    else:
        start(sys.argv[1], sys.argv[2:])
