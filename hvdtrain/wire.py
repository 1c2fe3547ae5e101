"""A rank's connections to other ranks: lines of JSON over TCP, and one selector that hears them all."""

import contextlib
import errno
import json
import selectors
import socket
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvdtrain import meeting
from hvdtrain.errors import WorldError
from hvdtrain.meeting import Seat
from hvdtrain.topology import Topology

TIMEOUT = 1.0  # seconds for a connection to be made, or for a full one to take a line
LONGEST = 2**20  # bytes of a line: all seats of twenty thousand ranks
CUT_OFF = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}

NOWHERE = Seat("", 0, 0)

Message = dict[str, Any]


@dataclass
class Peer:
    """The other end of a connection; its rank is -1 until it has said it."""

    socket: socket.socket
    heard: float
    rank: int = -1
    seat: Seat = NOWHERE
    ready: bool = False
    stopping: bool = False
    left: bool = False
    unread: bytes = b""
    ends: tuple[str, str] = ("", "")
    """On the chief: its own address and the other's, as the connection has them."""

    @property
    def name(self) -> str:
        """As a person is told of it."""
        return f"rank {self.rank} on {self.seat.host}"

    def send(self, message: Message) -> None:
        """Sends a line; a broken connection is found when it is read."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, now: float) -> list[Message]:
        """The lines that have come. Raises OSError at the connection's end, ValueError where no rank speaks."""
        received = self.socket.recv(2**16)
        if not received:
            raise ConnectionResetError
        self.heard = now
        *lines, self.unread = (self.unread + received).split(b"\n")
        if len(self.unread) > LONGEST:
            raise ValueError("too long a line")
        return [json.loads(line) for line in lines]


class Wires:
    """The connections of one rank: the chief's to all others, another's to the chief.

    A host that does not acknowledge for `silence` seconds is cut off, whatever its processes are busy with.
    """

    def __init__(self, topology: Topology, silence: float) -> None:
        self.topology, self.silence = topology, silence
        self.seat = Seat(topology.host, topology.node or 0, topology.local_rank, port=meeting.free_ports(topology))
        self.token = ""
        """The word by which the ranks of a run know one another."""
        self.addresses: list[tuple[str, int]] = []
        """Where the chief may be listening."""
        self.peers: list[Peer] = []
        self.came: set[int] = set()
        self.listener: socket.socket | None = None
        self._selector = selectors.DefaultSelector()

    def hear(self, source: socket.socket) -> None:
        """Makes `wait` tell of that socket too."""
        self._selector.register(source, selectors.EVENT_READ)

    def wait(self, seconds: float) -> list[Any]:
        """The sockets at which there is something to hear, within that time."""
        return [key.fileobj for key, _ in self._selector.select(seconds)]

    def listen(self, ports: range) -> int:
        """Lets others knock at the first free of these ports; which one. Raises WorldError where all are taken."""
        for port in ports:
            with contextlib.suppress(OSError):
                self.listener = socket.create_server(("", port), backlog=self.topology.size)
                self.listener.settimeout(TIMEOUT)
                self.hear(self.listener)
                return int(self.listener.getsockname()[1])
        raise WorldError(f"ports {ports[0]} to {ports[-1]} of {self.topology.host} are all taken; start again.")

    def accept(self, now: float) -> None:
        """Lets in who has knocked."""
        assert self.listener
        with contextlib.suppress(OSError):
            connection = self.listener.accept()[0]
            ends = connection.getsockname()[0], connection.getpeername()[0]
            self.add(connection, now).ends = ends

    def knock(self) -> socket.socket | None:
        """Where the chief is yet to be found: a connection to the next of the addresses at which anybody listens."""
        if self.peers or self.came:
            return None
        for address in self.addresses:
            self.addresses = [*self.addresses[1:], address]
            try:
                return socket.create_connection(address, TIMEOUT)
            except TimeoutError:  # the host is not there: no use to wait for its other ports now
                return None
            except OSError:
                continue
        return None

    def greet(self, connection: socket.socket, now: float) -> None:
        """Says to who let this rank in that it knows the word: only the chief will answer."""
        self.add(connection, now).send({"is": "hello", "token": self.token})

    def introduced(self, peer: Peer, message: Message) -> bool:
        """Whether the peer, having said `hello`, `welcome` or `here`, is now a rank; drops who knows no word."""
        kind = message["is"]
        if not self.topology.is_chief and kind == "welcome":
            self._seat(peer, 0, message)
            me = {"rank": self.topology.rank, "seat": asdict(self.seat)}
            peer.send({"is": "here", "token": self.token, **me})
            return True
        if self.topology.is_chief and message["token"] == self.token != "":
            if kind == "hello":
                peer.send({"is": "welcome", "seat": asdict(self.seat)})
                return False
            if message["rank"] in range(1, self.topology.size) and message["rank"] not in self.came:
                self._seat(peer, message["rank"], message)
                return True
        self.drop(peer)
        return False

    def _seat(self, peer: Peer, rank: int, message: Message) -> None:
        peer.rank, peer.seat = rank, Seat(**message["seat"])
        self.came.add(rank)

    def all_came(self) -> bool:
        """Whether this rank has met all whom it has to meet."""
        return len(self.came) == (self.topology.size - 1 if self.topology.is_chief else 1)

    def missing(self) -> str:
        """Whom this rank has not met."""
        if self.addresses:
            host, ports = self.addresses[0][0], sorted(port for _, port in self.addresses)
            return f"rank 0 was not met at {host}, ports {ports[0]} to {ports[-1]},"
        absent = [str(rank) for rank in range(1, self.topology.size) if rank not in self.came]
        return f"rank {', '.join(absent[:8])} of {self.topology.size} did not come"

    def add(self, connection: socket.socket, now: float) -> Peer:
        """A new connection, to somebody yet unknown."""
        connection.settimeout(TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.silence * 1000))
        peer = Peer(connection, now)
        self.peers.append(peer)
        self.hear(connection)
        return peer

    def ranks(self) -> list[Peer]:
        """Those who have said their rank."""
        return [peer for peer in self.peers if peer.rank >= 0]

    def seats(self) -> list[Seat]:
        """On the chief, when all have come: every rank's seat, with its address as all of them reach it."""
        by_rank = {peer.rank: peer for peer in self.ranks()}
        far = {rank: peer.ends for rank, peer in by_rank.items() if _apart(*peer.ends)}
        own = far[min(far)][0] if far else "127.0.0.1"
        others = [replace(by_rank[r].seat, address=far[r][1] if r in far else own) for r in sorted(by_rank)]
        return [replace(self.seat, address=own), *others]

    def peer_at(self, source: Any) -> Peer | None:
        """Whose socket this is."""
        return next((peer for peer in self.peers if peer.socket is source), None)

    def tell(self, message: Message) -> None:
        """Sends the line to every rank."""
        for peer in self.ranks():
            peer.send(message)

    def drop(self, peer: Peer) -> None:
        """Closes the connection."""
        if peer in self.peers:
            self.peers.remove(peer)
            self._selector.unregister(peer.socket)
            peer.socket.close()

    def close(self) -> None:
        """Closes everything; in a forked child too, where it lets go of the parent's connections."""
        for peer in self.peers:
            peer.socket.close()
        self.peers = []
        if self.listener:
            self.listener.close()
        self._selector.close()


def _apart(own: str, other: str) -> bool:
    """Whether a connection's ends are on two hosts."""
    return own != other and not other.startswith("127.")
