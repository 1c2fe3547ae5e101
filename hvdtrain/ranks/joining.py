"""How the ranks of a run join: they connect at the rendezvous, and wait until all are ready for their libraries.

Where the launcher names rank 0's host (srun, torchrun) they connect before the collective library starts, so that no
rank waits in it for one that refused. Elsewhere they learn rank 0's address through the library.
"""

import os
import secrets
from collections.abc import Callable

from hvdtrain.core.sharing import Sum, from_rank_0
from hvdtrain.errors import WorldError
from hvdtrain.launch import keys
from hvdtrain.launch.rendezvous import Endpoint, Rendezvous, addresses, check_host, interface_of
from hvdtrain.ranks import messages, timeouts
from hvdtrain.ranks.admission import Admission
from hvdtrain.ranks.liveness import Liveness
from hvdtrain.ranks.peers import Peer, endpoints_of

Serve = Callable[[list[Endpoint]], int | None]
"""On rank 0: starts Horovod's rendezvous server for ranks at these endpoints, and returns its port; None where none is
needed."""


class Joining:
    """Where and with which key this rank connects. `insecure`: the ranks need not prove that they belong together."""

    def __init__(
        self,
        liveness: Liveness,
        admission: Admission,
        wake: Callable[[], None],
        rendezvous: Rendezvous | None,
        insecure: bool,
    ) -> None:
        self.liveness, self.admission, self.wake = liveness, admission, wake
        self.rendezvous, self.insecure = rendezvous, insecure
        self.peers, self.handshake, self.topology = liveness.peers, admission.handshake, liveness.topology

    def connect(self) -> None:
        """Connects the ranks, where the launcher has named the rendezvous. Raises WorldError."""
        if not self._own_address():
            check_host(self.rendezvous.host if self.rendezvous else "127.0.0.1")
        if self.rendezvous:
            self._connect(self.rendezvous, *self._key_of(self.rendezvous))

    def connect_at(self, rendezvous: Rendezvous) -> None:
        """Connects the ranks at this rendezvous, where the launcher has named none. Raises WorldError."""
        key = self._key_of(rendezvous)
        with self.liveness.changed:
            self._connect(rendezvous, *key)
            self.rendezvous = rendezvous
            self.wake()

    def exchange(self, sum_over_ranks: Sum) -> None:
        """Where there was no rendezvous, gives all ranks rank 0's address through the collective library."""
        if self.rendezvous or self.topology.size == 1:
            return
        own = self._listen() if self.topology.is_rank_0 else None
        secret, port, hosts = from_rank_0(own, self.topology.rank, sum_over_ranks)
        with self.liveness.changed:
            self.handshake.key = self._shared(bytes.fromhex(secret))
            if self.topology.is_rank_0:
                # A rank that is not connected from the first step on could not learn of a stop.
                self.liveness.wait_for(self.peers.all_came, timeouts.FAREWELL)
            else:
                self.admission.addresses = [(host, port) for host in hosts]
                self.wake()

    def _listen(self) -> tuple[str, int, list[str]]:
        """On rank 0: begins to listen. Returns a secret, the port, and this host's addresses."""
        secret = secrets.token_bytes(keys.BYTES)
        self.handshake.key = self._shared(secret)
        host = self._own_address()
        port = self.admission.listen(host, range(1))
        return secret.hex(), port, [host] if host else addresses()[:8]

    def _connect(self, rendezvous: Rendezvous, key: bytes | None, credential: str | None) -> None:
        self.handshake.key, self.handshake.credential = key, credential
        # Two runs of one user on two hosts may have one name.
        token = f"{rendezvous.token} {keys.boot_id()}" if self._own_address() else rendezvous.token
        self.handshake.token = token
        if self.topology.is_rank_0:
            self.admission.listen(self._own_address(), rendezvous.ports[:-1])
        else:
            host = self._own_address() or rendezvous.host
            self.admission.addresses = [(host, port) for port in rendezvous.ports[:-1]]

    def _own_address(self) -> str:
        """The address where rank 0 listens: the loopback where all ranks are on one host; "" for all addresses."""
        return "127.0.0.1" if self.topology.local_size == self.topology.size else ""

    def _key_of(self, rendezvous: Rendezvous) -> tuple[bytes | None, str | None]:
        """The key, where this rank has one, and on rank 0 its credential. Raises WorldError."""
        if self.insecure:
            if self.topology.is_rank_0:
                self.liveness.listener.warning(keys.WARNING)
            return keys.OPEN, None
        if rendezvous.key:
            return self._shared(rendezvous.key), None
        return keys.of_run(os.environ, self.topology)

    def _shared(self, secret: bytes) -> bytes:
        """The key, derived from the secret that MPI has sent to all ranks, and from a key of the launcher's."""
        return keys.derived(keys.inherited(os.environ) or b"", secret.hex())


class Readiness:
    """Waits until all ranks are ready to start the collective library, and gives them what they need for that."""

    def __init__(self, liveness: Liveness, admission: Admission) -> None:
        self.liveness, self.admission = liveness, admission
        self.peers, self.handshake, self.topology = liveness.peers, admission.handshake, liveness.topology
        self.endpoints: list[Endpoint] = []
        """Every rank's endpoint, once all are ready; rank 0's alone where its library needs no other."""
        self.shares = False
        """On rank 0: whether the collective library needs the endpoints of all ranks."""
        self.horovod_port: int | None = None
        """The port of the rendezvous server that rank 0 started for Horovod, once all are ready."""
        self.interface: str | None = None
        """The network interface by which this host reaches the others; None while it is not known."""
        self._ready, self._busy = False, ""

    def wait(self, serve: Serve) -> None:
        """Waits until every rank is ready; fills `endpoints`, `horovod_port` and `interface`.

        Raises AbortedError where a rank refused, WorldError where one did not come.
        """
        is_rank_0 = self.topology.is_rank_0
        with self.liveness.changed:
            self._ready, self._busy = True, "waits for the other ranks" if is_rank_0 else ""
            self.peers.send(messages.Busy(text=self._busy) if is_rank_0 else messages.Ready())
            while not self.liveness.wait_for(lambda: self.endpoints or self._all_ready(), timeouts.ARRIVAL):
                self._check_waiting()
            if self.liveness.reason:
                raise self.liveness.aborted()
        if is_rank_0:
            self._report_all_ready(serve)

    def awaited(self) -> str:
        """The ranks that rank 0 waits for, as text for a person."""
        # Without the lock: whoever holds it may print, and then waits for the display, which calls this.
        return f"waiting for {self.peers.awaited() or 'the other ranks'}"

    def busy(self, text: str) -> None:
        """Reports to the other ranks why this one lets them wait, as in "copies the data"; "" once it does not. They
        wait for as long as this process is alive."""
        with self.liveness.changed:
            self._busy = messages.cut(text)
            self.peers.send(messages.Busy(text=self._busy))

    def catch_up(self, peer: Peer) -> None:
        """Sends the peer of a new connection what it has missed."""
        if self._busy:
            peer.send(messages.Busy(text=self._busy))
        if self._ready and not self.topology.is_rank_0:
            peer.send(messages.Ready())

    def all_ready(self, peer: Peer, message: messages.AllReady) -> None:
        """Rank 0 has reported that all ranks are ready."""
        # Now, while rank 0 is sure to be there: a short run may be over on rank 0 before it has begun here.
        remote = peer.endpoint.node != self.topology.node
        own = peer.socket.getsockname()[0]
        self.interface = interface_of(own) if remote else message.interface
        self.horovod_port, self.endpoints = message.horovod_port, message.endpoints

    def horovod_key(self) -> bytes:
        """The key of the rendezvous server that rank 0 starts; every rank that is connected has the same."""
        assert self.handshake.key is not None
        return keys.derived(self.handshake.key, "horovod", self.handshake.token)

    def _all_ready(self) -> bool:
        return self.topology.is_rank_0 and sum(peer.ready for peer in self.peers.ranks()) == self.topology.size - 1

    def _check_waiting(self) -> None:
        """Raises WorldError where a rank did not come, or does not report what it is busy with."""
        awaited = [peer for peer in self.peers.ranks() if not (peer.ready and self.topology.is_rank_0)]
        silent = next((peer for peer in awaited if not peer.busy), None)
        if not self.peers.all_came():
            raise _late(self.admission.missing())
        if silent:
            raise _late(f"{silent.name} was not ready")
        if self.topology.is_rank_0 and awaited:
            self.liveness.listener.warning(f"waiting for {awaited[0].name}, which {awaited[0].busy}.")

    def _report_all_ready(self, serve: Serve) -> None:
        """On rank 0: sends all ranks what they need to start the collective library."""
        own = self.handshake.endpoint
        endpoints = endpoints_of(own, self.peers.ranks())
        remote = [peer for peer in self.peers.ranks() if peer.endpoint.node != self.topology.node]
        self.interface = interface_of(remote[0].socket.getsockname()[0] if remote else "127.0.0.1")
        self.horovod_port = serve(endpoints)
        with self.liveness.changed:
            self.endpoints = endpoints
            shared = endpoints if self.shares or self.horovod_port else endpoints[:1]
            ready = messages.AllReady(horovod_port=self.horovod_port, interface=self.interface, endpoints=shared)
            self.peers.send(ready)


def _late(who: str) -> WorldError:
    return WorldError(
        f"{who} within {timeouts.ARRIVAL:.0f} seconds; read the messages of that rank and of its node, and see whether "
        "the nodes may communicate by TCP."
    )
