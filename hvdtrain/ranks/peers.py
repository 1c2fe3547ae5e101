"""A rank's connections to other ranks: signed lines of JSON over TCP, and one selector for all of them."""

import contextlib
import fcntl
import hmac
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from hvdtrain.launch import keys
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import timeouts
from hvdtrain.ranks.messages import Message
from hvdtrain.ranks.stacks import Process

LONGEST = 2**22  # bytes of a line: all endpoints of twenty thousand ranks
LONGEST_OF_STRANGER = 2**12
SIGNATURE_DIGITS = 32
SOON = 0.02  # seconds until more is sent to whom there was no room for
UNKNOWN = Endpoint("", 0, 0)


class Signatures:
    """Signs the lines of one end of a connection, and checks those of the other. A signature includes the
    line's number, so that no line can be left out or sent again."""

    def __init__(self, key: bytes, own: str, other: str) -> None:
        self._own, self._other = keys.derived(key, own), keys.derived(key, other)
        self._sent = self._received = 0

    def signed(self, content: bytes) -> bytes:
        """The line to send: the signature, then the content."""
        self._sent += 1
        return _signature(self._own, self._sent, content) + content

    def checked(self, line: bytes) -> bytes:
        """The content of a line. Raises ValueError where its signature is wrong."""
        self._received += 1
        content = line[SIGNATURE_DIGITS:]
        if not hmac.compare_digest(line[:SIGNATURE_DIGITS], _signature(self._other, self._received, content)):
            raise ValueError("a wrong signature")
        return content


def _signature(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, b"%d " % number + content, "sha256").hex()[:SIGNATURE_DIGITS].encode()


@dataclass(eq=False)
class Peer:
    """The other end of a connection. Its rank is -1 until it has proved to be a rank of the run."""

    socket: socket.socket
    opened: float
    last_received: float
    rank: int = -1
    endpoint: Endpoint = UNKNOWN
    process: Process | None = None
    """What other ranks of its host need to see which line its training thread is in."""
    ready: bool = False
    steps_made: int | None = None
    """On rank 0: how many steps it had made when it was asked, so that all stop together."""
    left: bool = False
    exited: int | None = None
    """After how many steps its program has exited, in the middle of the training."""
    busy: str = ""
    """Why it lets the others wait; empty where it does not."""
    ends: tuple[str, str] = ("", "")
    """On rank 0: the addresses of both ends of the connection."""
    address: tuple[str, int] | None = None
    """The address that this rank has connected to."""
    nonce: str = ""
    """The random text that rank 0 must sign for this rank."""
    signatures: Signatures | None = None
    unread: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)
    behind: set["Peer"] = field(default_factory=set)
    """The peers that have bytes in `unsent`; all connections share this set."""

    @property
    def name(self) -> str:
        """Its rank and host, as text for a person."""
        return f"rank {self.rank} on {self.endpoint.host}"

    def send(self, message: Message) -> None:
        """Sends a message, or as much of it as can be sent now. A broken connection is noticed when it is read."""
        self.send_encoded(message.model_dump_json().encode())

    def send_encoded(self, content: bytes) -> None:
        """Sends an encoded message, as `send` does."""
        self.unsent += (self.signatures.signed(content) if self.signatures else content) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what can be sent now; never waits."""
        with contextlib.suppress(OSError):
            del self.unsent[: self.socket.send(self.unsent)]
        (self.behind.add if self.unsent else self.behind.discard)(self)

    def interrupt(self) -> None:
        """Makes the kernel of the other host send SIGURG to the rank's process, which need not read for that."""
        with contextlib.suppress(OSError):
            self.socket.send(b"!", socket.MSG_OOB)

    def be_interrupted(self) -> None:
        """Lets the other end interrupt this process."""
        fcntl.fcntl(self.socket, fcntl.F_SETOWN, os.getpid())

    def receive(self, now: float) -> list[bytes]:
        """The lines that have arrived. Raises OSError at the connection's end, ValueError for what no rank sends."""
        try:
            received = self.socket.recv(2**16)
        except BlockingIOError:
            return []
        if not received:
            raise ConnectionResetError
        self.last_received = now
        *lines, self.unread = (self.unread + received).split(b"\n")
        if max(map(len, (self.unread, *lines))) > (LONGEST if self.rank >= 0 else LONGEST_OF_STRANGER):
            raise ValueError("too long a line")
        return lines

    def read(self, line: bytes, kind: TypeAdapter[Any]) -> Any:
        """The message of that kind in the line. Raises ValueError where there is none."""
        return kind.validate_json(self.signatures.checked(line) if self.signatures else line, strict=True)


class Peers:
    """The connections of one rank: on rank 0 those to all other ranks, elsewhere the one to rank 0; and connections of
    strangers, which have not proved to be ranks.

    A host that acknowledges nothing for `timeouts.UNREACHABLE` seconds is cut off, whatever its processes do.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.connections: list[Peer] = []
        self.came: set[int] = set()
        """All ranks that were ever admitted."""
        self.sent = 0.0
        """When `send` was called last."""
        self._selector = selectors.DefaultSelector()
        self._behind: set[Peer] = set()
        """The peers that have bytes in `unsent`."""

    def watch(self, source: socket.socket, peer: Peer | None = None) -> None:
        """Makes `wait` report that socket too, or its peer."""
        self._selector.register(source, selectors.EVENT_READ, peer or source)

    def unwatch(self, source: socket.socket) -> None:
        """Ends what `watch` began; to be called before the socket is closed."""
        self._selector.unregister(source)

    def wait(self, seconds: float) -> list[Any]:
        """Waits for at most that time, and returns the peers and sockets that can be read. Waits less where more has to
        be sent."""
        return [key.data for key, _ in self._selector.select(min(seconds, SOON) if self._behind else seconds)]

    def flush(self) -> None:
        """Sends what could not be sent before."""
        for peer in list(self._behind):
            peer.flush()

    def add(self, connection: socket.socket, now: float) -> Peer:
        """Adds a new connection, which has yet to prove that it is a rank."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeouts.UNREACHABLE * 1000))
        peer = Peer(connection, now, now, behind=self._behind)
        self.connections.append(peer)
        self.watch(connection, peer)
        return peer

    def admit(self, peer: Peer, rank: int, endpoint: Endpoint) -> None:
        """Notes that the peer has proved to be that rank."""
        peer.rank, peer.endpoint = rank, endpoint
        self.came.add(rank)

    def all_came(self) -> bool:
        """Whether all ranks that this one is connected with have been admitted."""
        return len(self.came) == (self.topology.size - 1 if self.topology.is_rank_0 else 1)

    def absent(self) -> str:
        """On rank 0: the ranks that have not connected, as text for a person."""
        absent = [str(rank) for rank in range(1, self.topology.size) if rank not in self.came]
        return f"rank {', '.join(absent[:8])} of {self.topology.size} did not come"

    def awaited(self) -> str:
        """On rank 0, for a person: which ranks are not ready yet, and what keeps them."""
        coming = [str(rank) for rank in range(1, self.topology.size) if rank not in self.came]
        late = [peer for peer in self.ranks() if not peer.ready]
        come = [f"rank {', '.join(coming[:8])}{', ...' if coming[8:] else ''} to come"] if coming else []
        return ", ".join(come + [f"{peer.name}{f', which {peer.busy}' if peer.busy else ''}" for peer in late[:3]])

    def ranks(self) -> list[Peer]:
        """The peers that have proved to be ranks."""
        return [peer for peer in self.connections if peer.rank >= 0]

    def peer(self, rank: int) -> "Peer | None":
        """The peer of that rank; None where it is not connected."""
        return next((peer for peer in self.ranks() if peer.rank == rank), None)

    def name_of(self, rank: int) -> str:
        """A rank and its host, as text for a person."""
        peer = self.peer(rank)
        return peer.name if peer else f"rank {rank} on {self.topology.host}"

    def strangers(self) -> list[Peer]:
        """The peers that have not proved to be ranks."""
        return [peer for peer in self.connections if peer.rank < 0]

    def send(self, message: Message) -> None:
        """Sends the message to every rank."""
        content, self.sent = message.model_dump_json().encode(), time.monotonic()
        for peer in self.ranks():
            peer.send_encoded(content)

    def drop(self, peer: Peer) -> None:
        """Closes the connection."""
        if peer in self.connections:
            self.connections.remove(peer)
            self._behind.discard(peer)
            peer.behind = set()
            self.unwatch(peer.socket)
            peer.socket.close()

    def close(self) -> None:
        """Closes everything. A forked child calls it too, to release its parent's connections."""
        for peer in self.connections:
            peer.socket.close()
        self.connections = []
        self._selector.close()


def endpoints_of(own: Endpoint, ranks: Sequence[Peer]) -> list[Endpoint]:
    """On rank 0, once all ranks have connected: every rank's endpoint, with an address at which all can reach it."""
    by_rank = {peer.rank: peer for peer in ranks}
    ends = {rank: peer.ends for rank, peer in by_rank.items()}
    remote = {rank: (here, there) for rank, (here, there) in ends.items() if here != there and there[:4] != "127."}
    here = remote[min(remote)][0] if remote else "127.0.0.1"
    others = [replace(by_rank[r].endpoint, address=remote[r][1] if r in remote else here) for r in sorted(by_rank)]
    return [replace(own, address=here), *others]
