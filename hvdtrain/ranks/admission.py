"""How ranks connect: rank 0 listens, every other rank searches for it; strangers' connections are few and short."""

import contextlib
import errno
import hmac
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from hvdtrain.errors import WorldError
from hvdtrain.launch import keys
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.ranks import messages, timeouts
from hvdtrain.ranks.peers import Peer, Peers, Signatures
from hvdtrain.ranks.stacks import Process

FEWEST_STRANGERS = 32
FILES, FILES_OF_RANK = 256, 4  # files that are open, and more for each rank: torch.distributed has two connections
MOST_CREDENTIALS = 32  # that are remembered, so that none is taken twice


def allow_files(size: int) -> None:
    """Raises this process's limit of open files, where so many ranks need more, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FILES + FILES_OF_RANK * size:
        with contextlib.suppress(OSError, ValueError):  # a hard limit above the system's
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Handshake:
    """How one rank and each of its peers prove to each other that they belong to the run. `warn` prints a line."""

    def __init__(self, peers: Peers, endpoint: Endpoint, warn: Callable[[str], None]) -> None:
        self.peers, self.topology, self.endpoint, self.warn = peers, peers.topology, endpoint, warn
        self.token = ""
        """The name of the run, by which it differs from other runs of the same user."""
        self.key: bytes | None = None
        """The run's key; None for a rank that has to learn it through munge."""
        self.credential: str | None = None
        """On rank 0: the key, encrypted by munge."""
        self.process: Process | None = None
        """What other ranks of this host need to see which line this one is in."""
        self._warned = self.topology.local_rank > 0  # one line for each host
        self._learned: bytes | None = None
        self._tried: list[str] = []
        self._reader: threading.Thread | None = None

    def begin(self, peer: Peer) -> None:
        """Requests a proof that the peer is rank 0."""
        peer.nonce = secrets.token_hex(messages.NONCE_DIGITS // 2)
        peer.send(messages.Hello(nonce=peer.nonce))

    def advance(self, peer: Peer, line: bytes) -> bool:
        """Reads a line of a peer that has not proved to be a rank. Returns whether it has now. Raises ValueError where
        it cannot be one."""
        if not self.topology.is_rank_0:
            return self._advance_with_rank_0(peer, line)
        if not peer.signatures:
            self._challenge(peer, peer.read(line, messages.HELLO).nonce)
            return False
        identity = peer.read(line, messages.IDENTITY)
        if identity.rank not in range(1, self.topology.size) or identity.rank in self.peers.came:
            raise ValueError("no rank that is awaited")
        self.peers.admit(peer, identity.rank, identity.endpoint)
        peer.process = identity.process
        peer.send(messages.Welcome(endpoint=self.endpoint, process=self.process))
        return True

    def _challenge(self, peer: Peer, nonce: str) -> None:
        assert self.key is not None
        own = secrets.token_hex(messages.NONCE_DIGITS // 2)
        session = self.token, *peer.socket.getsockname()[:2], nonce, own
        proof = keys.derived(self.key, "rank 0", *session).hex()
        peer.send(messages.Challenge(nonce=own, proof=proof, credential=self.credential))
        peer.signatures = Signatures(keys.derived(self.key, "session", *session), "rank 0", "rank")

    def _advance_with_rank_0(self, peer: Peer, line: bytes) -> bool:
        if peer.signatures:
            welcome = peer.read(line, messages.WELCOME)
            self.peers.admit(peer, 0, welcome.endpoint)
            peer.process = welcome.process
            peer.be_interrupted()
            return True
        challenge = peer.read(line, messages.CHALLENGE)
        session = self.token, *peer.socket.getpeername()[:2], peer.nonce, challenge.nonce
        if not self._is_proved(challenge, session):
            if not self._learns(challenge.credential):
                self._warn_of_other_key(*peer.socket.getpeername()[:2])
            raise ValueError("another key")
        assert self.key is not None
        peer.signatures = Signatures(keys.derived(self.key, "session", *session), "rank", "rank 0")
        peer.send(messages.Identity(rank=self.topology.rank, endpoint=self.endpoint, process=self.process))
        return False

    def _is_proved(self, challenge: messages.Challenge, session: Sequence[object]) -> bool:
        for key in filter(None, (self.key, self._learned)):
            if hmac.compare_digest(keys.derived(key, "rank 0", *session).hex(), challenge.proof):
                self.key = key
                return True
        return False

    def _learns(self, credential: str | None) -> bool:
        """Whether a key is being read from the credential, which the next connection then tries. It is read
        in a thread: munge may be slow, and anybody can send a credential."""
        if credential is None or credential in self._tried:
            return self._reader is not None and self._reader.is_alive()
        if self._reader is None or not self._reader.is_alive():
            self._tried = [*self._tried[-MOST_CREDENTIALS:], credential]
            self._reader = threading.Thread(target=self._learn, args=(credential,), daemon=True)
            self._reader.start()
        return True

    def _learn(self, credential: str) -> None:
        self._learned = keys.unwrapped(credential) or self._learned

    def _warn_of_other_key(self, host: str, port: int) -> None:
        if not self._warned:
            self._warned = True
            self.warn(
                f"who answers at {host}:{port} has another key than this rank: a stranger, or rank 0 where the nodes "
                f"share no home; if rank 0 is not found, {keys.REMEDY}"
            )


class Admission:
    """Rank 0's listener, or another rank's search for rank 0. A peer that passes the handshake becomes a rank."""

    def __init__(self, peers: Peers, handshake: Handshake) -> None:
        self.peers, self.handshake, self.topology = peers, handshake, peers.topology
        self.addresses: list[tuple[str, int]] = []
        """Where rank 0 may be listening."""
        self.listener: socket.socket | None = None
        self._last_tried: dict[tuple[str, int], float] = {}

    def listen(self, host: str, ports: Sequence[int]) -> int:
        """Listens on the first free one of these ports of the address, "" for all addresses, and returns the port.
        Raises WorldError where all are taken."""
        for port in ports:
            with self._one_connection():
                self.listener = socket.create_server((host, port), backlog=max(128, self.topology.size))
                self.listener.setblocking(False)
                self.peers.watch(self.listener)
                return int(self.listener.getsockname()[1])
        raise WorldError(f"ports {ports[0]} to {ports[-1]} of {self.topology.host} are all taken; start again.")

    def accept(self, now: float) -> None:
        """Accepts new connections. Where too many are strangers', those that have sent nothing are closed first, then
        the oldest."""
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
        """A connection to the next address where anybody listens, while rank 0 was not found."""
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
        """Begins the handshake with the peer at the address that was connected to last."""
        peer = self.peers.add(connection, now)
        peer.address = self.addresses[-1]
        self.handshake.begin(peer)

    def advance(self, peer: Peer, line: bytes) -> bool:
        """Reads a stranger's line. Returns whether it is a rank now. Raises ValueError where it cannot be one."""
        admitted = self.handshake.advance(peer, line)
        if admitted and self.peers.all_came():
            self._stop_listening()
        return admitted

    def drop_slow(self, now: float) -> None:
        """Closes connections of strangers that have not proved in time to be ranks."""
        for peer in self.peers.strangers() if self.listener or not self.topology.is_rank_0 else ():
            # Rank 0 has proved itself and may count this rank in already: its welcome takes as long as it takes.
            is_rank_0 = peer.signatures is not None and not self.topology.is_rank_0
            limit = timeouts.of_each(timeouts.HANDSHAKE, self.topology.size)
            if now - peer.opened > (timeouts.ARRIVAL if is_rank_0 else limit):
                self.peers.drop(peer)

    def missing(self) -> str:
        """The ranks for which this one has waited in vain, as text for a person."""
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
        """Around the work on one connection, whose errors are ignored, as they concern no other. Raises
        WorldError where this process may have no more connections."""
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
