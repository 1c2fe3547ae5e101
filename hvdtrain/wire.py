"""A rank's connections to other ranks: signed lines of JSON over TCP, and one selector that waits for them all.

Each line but the first one either way is signed. Rank 0 proves that it has the run's key (hvdtrain.keys), together
with the address and port that it was reached at, so that nobody at another one can pass its answers on; a rank proves
it by signing. The key of the signatures is made of the run's key and of a fresh nonce of either end.
"""

import contextlib
import errno
import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from hvdtrain import keys, meeting, messages
from hvdtrain.errors import WorldError
from hvdtrain.meeting import Seat
from hvdtrain.messages import Message
from hvdtrain.topology import Topology

TIMEOUT = 3.5  # seconds for a connection to be made: Linux asks again after 1 and 3
LONGEST = 2**22  # bytes of a line: all seats of twenty thousand ranks
LONGEST_OF_STRANGER = 2**12
PAUSE = 0.2  # seconds until the same address is tried again
FEWEST_STRANGERS = 32
CUT_OFF = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
SIGNATURE_DIGITS = 32

NOWHERE = Seat("", 0, 0)


class Signatures:
    """Signs the lines of one end of a connection and checks the other's: each counts, none can be left out or sent
    again."""

    def __init__(self, key: bytes, own: str, other: str) -> None:
        self._own, self._other = keys.derived(key, own), keys.derived(key, other)
        self._sent = self._received = 0

    def signed(self, content: bytes) -> bytes:
        """The content behind its signature."""
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
    """The other end of a connection; its rank is -1 until it has proved that it is one."""

    socket: socket.socket
    opened: float
    heard: float
    rank: int = -1
    seat: Seat = NOWHERE
    ready: bool = False
    stopping: bool = False
    left: bool = False
    doing: str = ""
    ends: tuple[str, str] = ("", "")
    """On the chief: its own address and the other's, as the connection has them."""
    address: tuple[str, int] | None = None
    """Where this rank has connected to."""
    nonce: str = ""
    """What this rank sent to rank 0."""
    signatures: Signatures | None = None
    unread: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)
    is_full: bool = False
    """Whether the selector tells when more can be sent."""

    @property
    def name(self) -> str:
        """As a person is told of it."""
        return f"rank {self.rank} on {self.seat.host}"

    def send(self, message: Message) -> None:
        """Sends a line, or as much of it as goes now; a broken connection is found when it is read."""
        self.send_encoded(message.model_dump_json().encode())

    def send_encoded(self, content: bytes) -> None:
        """The same of an encoded message."""
        self.unsent += (self.signatures.signed(content) if self.signatures else content) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what goes now; never waits."""
        with contextlib.suppress(OSError):
            del self.unsent[: self.socket.send(self.unsent)]

    def receive(self, now: float) -> list[bytes]:
        """The lines that have come. Raises OSError at the connection's end, ValueError where no rank writes so."""
        try:
            received = self.socket.recv(2**16)
        except BlockingIOError:
            return []
        if not received:
            raise ConnectionResetError
        self.heard = now
        *lines, self.unread = (self.unread + received).split(b"\n")
        if max(map(len, (self.unread, *lines))) > (LONGEST if self.rank >= 0 else LONGEST_OF_STRANGER):
            raise ValueError("too long a line")
        return lines

    def read(self, line: bytes, kind: TypeAdapter[Any]) -> Any:
        """The message of that kind in the line. Raises ValueError where there is none."""
        return kind.validate_json(self.signatures.checked(line) if self.signatures else line, strict=True)


class Wires:
    """The connections of one rank: the chief's to all others, another's to the chief.

    A host that does not acknowledge for `silence` seconds is cut off, whatever its processes are busy with.
    `note` is called with a line for the user.
    """

    def __init__(self, topology: Topology, silence: float, note: Callable[[str], None]) -> None:
        self.topology, self.silence, self.note = topology, silence, note
        self.seat = Seat(topology.host, topology.node or 0, topology.local_rank, port=meeting.free_ports(topology))
        self.token = ""
        """The name of the run among others of the same user."""
        self.key: bytes | None = None
        """The run's key; None for a rank that has to learn it through munge."""
        self.credential: str | None = None
        """On the chief: the key for munge to read."""
        self.addresses: list[tuple[str, int]] = []
        """Where the chief may be listening."""
        self.peers: list[Peer] = []
        self.came: set[int] = set()
        self.listener: socket.socket | None = None
        self._noted = self.topology.local_rank > 0  # one line a host
        self._last_tried: dict[tuple[str, int], float] = {}
        self._learned: bytes | None = None
        self._tried: list[str] = []
        self._reader: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()

    def hear(self, source: socket.socket) -> None:
        """Makes `wait` tell of that socket too."""
        self._selector.register(source, selectors.EVENT_READ)

    def wait(self, seconds: float) -> list[Any]:
        """The sockets at which there is something to read, within that time; what was unsent goes out meanwhile."""
        for peer in [peer for peer in self.peers if peer.is_full != bool(peer.unsent)]:
            peer.is_full = not peer.is_full
            self._selector.modify(peer.socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.is_full else 0))
        found = self._selector.select(seconds)
        return [key.fileobj for key, events in found if events & selectors.EVENT_READ]

    def flush(self) -> None:
        """Sends what could not be sent before."""
        for peer in [peer for peer in self.peers if peer.is_full]:
            peer.flush()

    def listen(self, host: str, ports: Sequence[int]) -> int:
        """Lets others connect to the first free one of these ports of the host's address, "" for all it has; which one.
        Raises WorldError where all are taken."""
        for port in ports:
            with contextlib.suppress(OSError):
                self.listener = socket.create_server((host, port), backlog=max(128, self.topology.size))
                self.listener.setblocking(False)
                self.hear(self.listener)
                return int(self.listener.getsockname()[1])
        raise WorldError(f"ports {ports[0]} to {ports[-1]} of {self.topology.host} are all taken; start again.")

    def accept(self, now: float) -> None:
        """Lets in who has connected; of too many strangers those go who have said nothing, then the longest unknown."""
        assert self.listener
        most = max(FEWEST_STRANGERS, 2 * self.topology.size)
        strangers = [peer for peer in self.peers if peer.rank < 0]
        strangers.sort(key=lambda peer: (peer.signatures is not None, peer.opened))
        with contextlib.suppress(OSError):
            # A part of them at a time: a rank's first word is read before it could have to go.
            for _ in range(most // 4):
                connection = self.listener.accept()[0]
                if len(strangers) >= most:
                    self.drop(strangers.pop(0))
                peer = self.add(connection, now)
                strangers.append(peer)
                peer.ends = connection.getsockname()[0], connection.getpeername()[0]

    def connect(self) -> socket.socket | None:
        """Where the chief is yet to be found: a connection to the next address at which anybody listens, whoever
        listens at others."""
        if self.came or any(peer.signatures for peer in self.peers):
            return None
        pending, now = {peer.address for peer in self.peers}, time.monotonic()
        for address in [address for address in self.addresses if address not in pending]:
            if now - self._last_tried.get(address, -PAUSE) < PAUSE:
                continue
            self._last_tried[address] = now
            self.addresses.remove(address)
            self.addresses.append(address)
            try:
                return _connected(address)
            except TimeoutError:  # the host is not there: no use to wait for its other ports now
                return None
            except (OSError, UnicodeError):  # the latter for a name that no host can have
                continue
        return None

    def greet(self, connection: socket.socket, now: float) -> None:
        """Asks who is at the other end for a proof that it is rank 0."""
        peer = self.add(connection, now)
        peer.address = self.addresses[-1]
        peer.nonce = secrets.token_hex(messages.NONCE_DIGITS // 2)
        peer.send(messages.Hello(nonce=peer.nonce))

    def introduce(self, peer: Peer, line: bytes) -> bool:
        """Whether the stranger, having sent the line, is now a rank. Raises ValueError where it cannot be one."""
        if not self.topology.is_chief:
            return self._introduce_chief(peer, line)
        if not peer.signatures:
            self._challenge(peer, peer.read(line, messages.HELLO).nonce)
            return False
        here = peer.read(line, messages.HERE)
        if here.rank not in range(1, self.topology.size) or here.rank in self.came:
            raise ValueError("no rank that is awaited")
        self._seat(peer, here.rank, here.seat)
        peer.send(messages.Welcome(seat=self.seat))
        if self.all_came():
            self._stop_listening()
        return True

    def _challenge(self, peer: Peer, nonce: str) -> None:
        assert self.key is not None
        own = secrets.token_hex(messages.NONCE_DIGITS // 2)
        words = self.token, *peer.socket.getsockname()[:2], nonce, own
        proof = keys.derived(self.key, "rank 0", *words).hex()
        peer.send(messages.Challenge(nonce=own, proof=proof, credential=self.credential))
        peer.signatures = Signatures(keys.derived(self.key, "session", *words), "rank 0", "rank")

    def _introduce_chief(self, peer: Peer, line: bytes) -> bool:
        if peer.signatures:
            self._seat(peer, 0, peer.read(line, messages.WELCOME).seat)
            self._drop_strangers()
            return True
        challenge = peer.read(line, messages.CHALLENGE)
        words = self.token, *peer.socket.getpeername()[:2], peer.nonce, challenge.nonce
        if not self._is_proved(challenge, words):
            if not self._learns(challenge.credential):
                self._note_wrong_key(*peer.socket.getpeername()[:2])
            raise ValueError("another key")
        assert self.key is not None
        peer.signatures = Signatures(keys.derived(self.key, "session", *words), "rank", "rank 0")
        peer.send(messages.Here(rank=self.topology.rank, seat=self.seat))
        return False

    def _is_proved(self, challenge: messages.Challenge, words: Sequence[object]) -> bool:
        for key in filter(None, (self.key, self._learned)):
            if hmac.compare_digest(keys.derived(key, "rank 0", *words).hex(), challenge.proof):
                self.key = key
                return True
        return False

    def _learns(self, credential: str | None) -> bool:
        """Whether a key is being read out of the credential, for the next connection to be tried with: munge may take
        its time, and anybody can send one."""
        if credential is None or credential in self._tried:
            return self._reader is not None and self._reader.is_alive()
        if self._reader is None or not self._reader.is_alive():
            self._tried = [*self._tried[-FEWEST_STRANGERS:], credential]
            self._reader = threading.Thread(target=self._learn, args=(credential,), daemon=True)
            self._reader.start()
        return True

    def _learn(self, credential: str) -> None:
        self._learned = keys.unwrapped(credential) or self._learned

    def _note_wrong_key(self, host: str, port: int) -> None:
        if not self._noted:
            self._noted = True
            self.note(
                f"who answers at {host}:{port} has another key than this rank: a stranger, or rank 0 where the nodes "
                f"share no home; if rank 0 is not found, {keys.REMEDY}"
            )

    def _seat(self, peer: Peer, rank: int, seat: Seat) -> None:
        peer.rank, peer.seat = rank, seat
        self.came.add(rank)

    def _stop_listening(self) -> None:
        if self.listener:
            self._selector.unregister(self.listener)
            self.listener.close()
            self.listener = None
        self._drop_strangers()

    def _drop_strangers(self) -> None:
        for peer in [peer for peer in self.peers if peer.rank < 0]:
            self.drop(peer)

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
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.silence * 1000))
        peer = Peer(connection, now, now)
        self.peers.append(peer)
        self.hear(connection)
        return peer

    def ranks(self) -> list[Peer]:
        """Those who have proved to be one."""
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

    def send(self, message: Message) -> None:
        """Sends the message to every rank."""
        content = message.model_dump_json().encode()
        for peer in self.ranks():
            peer.send_encoded(content)

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


def _connected(address: tuple[str, int]) -> socket.socket:
    # IPv4 alone, as rank 0 listens: at the same port of its IPv6 address a stranger may.
    connection = socket.socket(socket.AF_INET)
    try:
        connection.settimeout(TIMEOUT)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _apart(own: str, other: str) -> bool:
    """Whether a connection's ends are on two hosts."""
    return own != other and not other.startswith("127.")
