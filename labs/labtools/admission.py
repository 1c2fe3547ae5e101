"""Connections between a notebook and its ranks, which nobody else gets into."""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing import AuthenticationError, connection
from multiprocessing.connection import Connection

Address = str | tuple[str, int]
"""A UNIX socket's path, or an IPv4 address and a port."""

HANDSHAKE = 5.0  # seconds in which a connection has to authenticate
ATTEMPTS = 50  # a rank that others crowd out tries again every .1 s
_ADMITTED = b"admitted"


class Listener:
    """Listens at `address`, in a thread of its own, until `size` ranks are `admitted`: their connections.

    At a path it admits this user's processes; at a host and port those that know the key. Of those that have not
    authenticated yet it keeps twice as many as ranks, the newest, so that silent connections keep no rank out.
    """

    def __init__(self, address: Address, size: int, key: bytes | None = None) -> None:
        self.admitted: list[Connection] = []
        self._size, self._key = size, key
        self._strangers: list[socket.socket] = []
        self._closing = threading.Event()
        self._server = _socket(address)
        self._server.bind(address)
        self._server.listen(1024)  # a rank that finds the queue full tries again after a second
        self._server.settimeout(0.1)
        self.address: Address = self._server.getsockname()
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """Admits no more ranks."""
        self._closing.set()

    def _listen(self) -> None:
        with self._server:
            while len(self.admitted) < self._size and not self._closing.is_set():
                try:
                    stranger, _ = self._server.accept()
                except TimeoutError:
                    continue
                except OSError:  # this process has no file descriptor left
                    time.sleep(0.1)
                    continue
                self._keep(2 * self._size - 1)
                self._strangers.append(stranger)
                threading.Thread(target=self._admit, args=(stranger,), daemon=True).start()
        self._keep(0)

    def _keep(self, newest: int) -> None:
        while len(self._strangers) > newest:
            with contextlib.suppress(IndexError):  # it has just gone by itself
                _shut(self._strangers.pop(0))

    def _admit(self, stranger: socket.socket) -> None:
        # A stranger may fail in any way; nothing that one sends is unpickled.
        with contextlib.suppress(Exception), _handshake(stranger) as candidate:
            _authenticate(candidate, stranger, self._key, listening=True)
            self._strangers.remove(stranger)  # a ValueError where it had to make room
            candidate.send_bytes(_ADMITTED)
            self.admitted.append(candidate)
        with contextlib.suppress(ValueError):
            self._strangers.remove(stranger)


def connect(address: Address, key: bytes | None = None) -> Connection:
    """A rank's connection to the notebook that listens there, once it is admitted.

    Raises OSError, EOFError or AuthenticationError where nobody listens, or another than that notebook.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(EOFError, TimeoutError, ConnectionResetError, BrokenPipeError):
            return _connect(address, key)
        time.sleep(0.1)
    return _connect(address, key)


def _connect(address: Address, key: bytes | None) -> Connection:
    with _socket(address) as notebook:
        notebook.settimeout(HANDSHAKE)
        notebook.connect(address)
        notebook.settimeout(None)
        with _handshake(notebook) as candidate:
            _authenticate(candidate, notebook, key, listening=False)
            candidate.recv_bytes(len(_ADMITTED))
        return candidate


@contextlib.contextmanager
def _handshake(peer: socket.socket) -> Iterator[Connection]:
    """A connection over that socket, closed if the block fails. After 5 s the socket is shut down."""
    timer = threading.Timer(HANDSHAKE, _shut, [peer])
    timer.daemon = True
    timer.start()
    candidate = Connection(os.dup(peer.fileno()))
    try:
        yield candidate
    except BaseException:
        candidate.close()
        raise
    finally:
        timer.cancel()
        peer.close()


def _authenticate(candidate: Connection, peer: socket.socket, key: bytes | None, *, listening: bool) -> None:
    """Raises AuthenticationError unless the peer knows the key, or, without one, is this user's.

    Each end challenges the other.
    """
    if key is None:
        _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.geteuid():
            raise AuthenticationError(f"the process at the other end belongs to uid {user}, not to {os.geteuid()}")
        return
    steps = (connection.deliver_challenge, connection.answer_challenge)  # type: ignore[attr-defined]
    for step in steps if listening else reversed(steps):
        step(candidate, key)


def _socket(address: Address) -> socket.socket:
    return socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)


def _shut(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
