"""How connections come to be: rank 0 listens, another rank looks for it, and strangers are few and go in time."""

import contextlib
import errno
import resource
import socket
import time
from collections.abc import Iterator, Sequence

from hvdtrain.errors import WorldError
from hvdtrain.run import timeouts
from hvdtrain.run.handshake import Handshake
from hvdtrain.run.peers import Peer, Peers

FEWEST_STRANGERS = 32
FILES, FILES_OF_RANK = 256, 4  # open at a time: torch.distributed has two connections to each rank


def allow_files(size: int) -> None:
    """Raises the limit of open files as far as it may, where so many ranks want more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FILES + FILES_OF_RANK * size:
        with contextlib.suppress(OSError, ValueError):  # a hard limit above the system's
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Admission:
    """Rank 0's listener, or another rank's search for rank 0; whoever passes the handshake becomes a rank."""

    def __init__(self, peers: Peers, handshake: Handshake) -> None:
        self.peers, self.handshake, self.topology = peers, handshake, peers.topology
        self.addresses: list[tuple[str, int]] = []
        """Where rank 0 may be listening."""
        self.listener: socket.socket | None = None
        self._last_tried: dict[tuple[str, int], float] = {}

    def listen(self, host: str, ports: Sequence[int]) -> int:
        """Lets others connect to the first free one of these ports of the host's address, "" for all it has; which one.
        Raises WorldError where all are taken."""
        for port in ports:
            with self._one_connection():
                self.listener = socket.create_server((host, port), backlog=max(128, self.topology.size))
                self.listener.setblocking(False)
                self.peers.watch(self.listener)
                return int(self.listener.getsockname()[1])
        raise WorldError(f"ports {ports[0]} to {ports[-1]} of {self.topology.host} are all taken; start again.")

    def accept(self, now: float) -> None:
        """Lets in who has connected; of too many strangers those go who have sent nothing, then the longest unknown."""
        assert self.listener
        size, limit = self.topology.size, resource.getrlimit(resource.RLIMIT_NOFILE)[0] % 2**63  # infinite is -1
        most = max(FEWEST_STRANGERS, min(2 * size, limit - size - FILES))
        strangers = sorted(self.peers.strangers(), key=lambda peer: (peer.signatures is not None, peer.opened))
        with self._one_connection():
            # A part of them at a time: a rank's first message is read before it could have to go.
            for _ in range(most // 4):
                connection = self.listener.accept()[0]
                if len(strangers) >= most:
                    self.peers.drop(strangers.pop(0))
                peer = self.peers.add(connection, now)
                strangers.append(peer)
                peer.ends = connection.getsockname()[0], connection.getpeername()[0]

    def connect(self) -> socket.socket | None:
        """Where rank 0 is yet to be found: a connection to the next address at which anybody listens, whoever
        listens at others."""
        if self.peers.came or any(peer.signatures for peer in self.peers.connections):
            return None
        pending, now = {peer.address for peer in self.peers.connections}, time.monotonic()
        for address in [address for address in self.addresses if address not in pending]:
            if now - self._last_tried.get(address, -timeouts.RETRY) < timeouts.RETRY:
                continue
            self._last_tried[address] = now
            self.addresses.remove(address)
            self.addresses.append(address)
            # IPv4 alone, as rank 0 listens: at the same port of its IPv6 address a stranger may.
            with self._one_connection(), socket.socket(socket.AF_INET) as connection:
                connection.settimeout(timeouts.CONNECT)
                try:
                    connection.connect(address)
                except TimeoutError:  # the host is not there: no use to wait for its other ports now
                    return None
                return connection.dup()
        return None

    def greet(self, connection: socket.socket, now: float) -> None:
        """Begins the handshake with whoever is at the address that was connected to last."""
        peer = self.peers.add(connection, now)
        peer.address = self.addresses[-1]
        self.handshake.begin(peer)

    def advance(self, peer: Peer, line: bytes) -> bool:
        """Whether the stranger, having sent the line, is now a rank. Raises ValueError where it cannot be one."""
        admitted = self.handshake.advance(peer, line)
        if admitted and self.peers.all_came():
            self._stop_listening()
        return admitted

    def drop_slow(self, now: float) -> None:
        """Drops strangers that have not proved in time what they are."""
        for peer in self.peers.strangers() if self.listener or not self.topology.is_rank_0 else ():
            # Rank 0 has proved itself and may count this rank in already: its welcome takes as long as it takes.
            is_rank_0 = peer.signatures is not None and not self.topology.is_rank_0
            limit = timeouts.of_each(timeouts.HANDSHAKE, self.topology.size)
            if now - peer.opened > (timeouts.ARRIVAL if is_rank_0 else limit):
                self.peers.drop(peer)

    def missing(self) -> str:
        """Whom this rank waits for in vain, for a person."""
        if self.addresses:
            host, ports = self.addresses[0][0], sorted(port for _, port in self.addresses)
            return f"rank 0 was not found at {host}, ports {ports[0]} to {ports[-1]},"
        return self.peers.absent()

    def close(self) -> None:
        """Closes all connections and the listener; in a forked child too."""
        if self.listener:
            self.listener.close()
        self.peers.close()

    @contextlib.contextmanager
    def _one_connection(self) -> Iterator[None]:
        """An error is that connection's. Raises WorldError where this process may have no more of them."""
        try:
            yield
        except (OSError, UnicodeError, TypeError) as error:  # the last two of a name that no host can have
            if getattr(error, "errno", None) in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                raise WorldError(
                    f"{error}: this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}, and of "
                    f"{self.topology.size} ranks each is a connection; run ulimit -n "
                    f"{FILES + FILES_OF_RANK * self.topology.size} before the launcher, or have nofile in "
                    "/etc/security/limits.conf raised."
                ) from None

    def _stop_listening(self) -> None:
        if self.listener:
            self.peers.unwatch(self.listener)
            self.listener.close()
            self.listener = None
        for peer in self.peers.strangers():
            self.peers.drop(peer)
