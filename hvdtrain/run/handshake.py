"""How both ends of a connection prove that they belong to one run, and which rank they are.

Each message but the first one either way is signed. Rank 0 proves that it has the run's key (launch/keys.py), together
with the address and port that it was reached at, so that nobody at another one can pass its answers on; a rank proves
it by signing. The key of the signatures is made of the run's key and of a fresh nonce of either end.
"""

import hmac
import secrets
import threading
from collections.abc import Callable, Sequence

from hvdtrain.launch import keys
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.run import messages
from hvdtrain.run.peers import Peer, Peers, Signatures
from hvdtrain.run.stacks import Process

MOST_CREDENTIALS = 32  # of which it is known that they were read


class Handshake:
    """The handshake of one rank with each of its peers. `warn` is called with a line for the user."""

    def __init__(self, peers: Peers, endpoint: Endpoint, warn: Callable[[str], None]) -> None:
        self.peers, self.topology, self.endpoint, self.warn = peers, peers.topology, endpoint, warn
        self.token = ""
        """The name of the run among others of the same user."""
        self.key: bytes | None = None
        """The run's key; None for a rank that has to learn it through munge."""
        self.credential: str | None = None
        """On rank 0: the key for munge to read."""
        self.process: Process | None = None
        """What other ranks of this host need, to see where this one stands."""
        self._warned = self.topology.local_rank > 0  # one line a host
        self._learned: bytes | None = None
        self._tried: list[str] = []
        self._reader: threading.Thread | None = None

    def begin(self, peer: Peer) -> None:
        """Requests a proof that the peer is rank 0."""
        peer.nonce = secrets.token_hex(messages.NONCE_DIGITS // 2)
        peer.send(messages.Hello(nonce=peer.nonce))

    def advance(self, peer: Peer, line: bytes) -> bool:
        """Whether the stranger, having sent the line, is now a rank. Raises ValueError where it cannot be one."""
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
        """Whether a key is being read out of the credential, for the next connection to be tried with: munge may take
        its time, and anybody can send one."""
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
