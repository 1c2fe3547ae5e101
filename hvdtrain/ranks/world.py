"""What training uses of the other ranks: how they join, stop together and leave."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping

import numpy as np

from hvdtrain.core.sharing import MOST_RANKS, Sum, gather
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import AbortedError, StoppedError, TrainingError
from hvdtrain.launch import gloo, mpi
from hvdtrain.launch.rendezvous import Rendezvous, own_endpoint
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import messages, timeouts
from hvdtrain.ranks.admission import Admission, Handshake, allow_files
from hvdtrain.ranks.energy import EnergyWatch
from hvdtrain.ranks.joining import Joining, Readiness, Serve
from hvdtrain.ranks.liveness import Listener, Liveness
from hvdtrain.ranks.monitor import Inbox, Monitor
from hvdtrain.ranks.peers import Peers
from hvdtrain.ranks.slow import SlowWatch
from hvdtrain.ranks.stacks import waits_for_ranks
from hvdtrain.ranks.stop import SignalWatcher, StopAgreement
from hvdtrain.ranks.stuck import StuckWatch
from hvdtrain.untrusted import one_line

# MPICH's addresses over UCX are too long for SLURM's pmi2. pip's MPICH has libfabric too, whose provider "sockets"
# hangs in every second MPI_Init on several hosts.
SITE_MPICH = {"UCX_UNIFIED_MODE": "y"}
PIP_MPICH = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "^sockets"}


class World:
    """The ranks of this run, as one of them sees them."""

    def __init__(
        self,
        topology: Topology,
        rendezvous: Rendezvous | None = None,
        listener: Listener | None = None,
        *,
        insecure: bool = False,
    ) -> None:
        """`listener` receives the reports of the ranks. `insecure`: ranks need not prove that they belong together."""
        self.topology, self.listener = topology, listener or Listener()
        self.peers = Peers(topology)
        self.liveness = Liveness(self.peers, self.listener)
        self.stop = StopAgreement(self.liveness)
        self._handshake = handshake = Handshake(self.peers, own_endpoint(topology), self.listener.warning)
        admission, watcher = Admission(self.peers, handshake), SignalWatcher()
        self.joining = Joining(self.liveness, admission, watcher.wake, rendezvous, insecure)
        self.readiness = Readiness(self.liveness, admission)
        self._stuck = StuckWatch(self.liveness, handshake.endpoint)
        self.slow = SlowWatch(self.liveness)
        self._energy = EnergyWatch(self.liveness, handshake.endpoint.label, os.environ)
        self._inbox = Inbox(self.liveness, self.readiness, self.stop, self._stuck, self.slow, self._energy)
        self._monitor = Monitor(admission, watcher, self._inbox)

    @property
    def rendezvous(self) -> Rendezvous | None:
        """Where the ranks connect before the collective library starts; None where they cannot."""
        return self.joining.rendezvous

    def start(self) -> None:
        """Begins to watch for signals and, where there is a rendezvous, for the other ranks. Raises WorldError."""
        if self.topology.size > 1:
            allow_files(self.topology.size)
            self._handshake.process = self._stuck.stacks.open(alone=self.topology.local_size == 1)
        self.joining.connect()
        self._monitor.start()
        self._energy.start()

    def connect_at(self, rendezvous: Rendezvous) -> None:
        """Connects the ranks at this rendezvous, where the launcher has named none. Raises WorldError."""
        self.joining.connect_at(rendezvous)

    def wait_until_ready(self, serve: Serve) -> None:
        """Waits until every rank is ready to start the collective library. Raises AbortedError where a rank refused,
        WorldError where one did not come. Returns at once where there is no rendezvous."""
        if self.rendezvous:
            self.listener.waiting(self.readiness.awaited)
            self.readiness.wait(serve)

    def exchange(self, sum_over_ranks: Sum) -> None:
        """Where there was no rendezvous, gives all ranks rank 0's address through the collective library."""
        self.joining.exchange(sum_over_ranks)

    def stops_after_step(self) -> bool:
        """Whether all ranks stop now. Every rank calls it after every step."""
        with self.liveness.diagnosing("stuck ranks"):
            self._stuck.step_made()
        return self.stop.stops_after_step()

    def stops_here(self, rank: int, size: int, sum_over_ranks: Sum) -> bool:
        """Whether all ranks stop now, at an epoch's end, as one was sent a signal. Every rank calls it."""
        if number := int(gather(np.array([self.stop.signal or 0]), rank, size, sum_over_ranks).max()):
            self.stop.signal = number
            self.stop.reacts()
        return number > 0

    def expect_steps(self, expected: bool) -> None:
        """Says whether the next step is expected soon. After an epoch's last step it is not, as ranks may validate."""
        with self.liveness.diagnosing("stuck ranks"):
            self._stuck.expect_steps(expected)

    def stopped(self, step: int) -> StoppedError:
        """The error with which all ranks end after the last checkpoint, made at `step`."""
        return self.stop.error(step)

    def aborted(self, cause: Exception) -> AbortedError:
        """The error of a rank whose collective library failed, with the reason that a rank has reported, or that a rank
        has left; else with the library's own error, which the first rank of each host prints."""
        topology = self.topology
        with self.liveness.changed:
            # A rank whose error others may raise too waits for rank 0's report, and then reports its own.
            self.liveness.wait_for(lambda: self.liveness.left, timeouts.RANK_0_REPORT + timeouts.GRACE)
            if self.liveness.reason:
                return self.liveness.aborted()
            why = f"the collective library failed, and no rank says why: {one_line(cause)}"
            if self.liveness.left:
                went_on = f"where rank {topology.rank} on {topology.host} continued"
                why = f"{self.liveness.left} left the training {went_on}: end it after the same step on every rank"
                self.liveness.lost(why, self.liveness.left_code)
        error = AbortedError(why, self.liveness.left_code)
        error.everywhere = topology.local_rank > 0 and topology.rank > 1  # it may be rank 0 that has left
        return error

    def wait_for_rank_0(self) -> None:
        """Waits for rank 0's farewell, which may have a checkpoint to write first.

        A launcher ends all ranks when the first one ends with an error.
        """
        with self.liveness.changed:
            self.liveness.wait_for(lambda: self.peers.came, timeouts.RANK_0_REPORT)
            limit = None if self.stop.stopped else timeouts.RANK_0_REPORT
            self.liveness.wait_for(lambda: all(peer.left for peer in self.peers.ranks()), limit)

    @waits_for_ranks
    def serve_rank_0(self) -> None:
        """On all ranks but rank 0: waits until rank 0 has finished, where rank 0 alone drives the engine. Raises
        StoppedError or AbortedError."""
        with self.liveness.changed:
            self.liveness.in_steps = True
            self.liveness.wait_for(self.stop.is_over)
            if self.liveness.reason:
                raise self.liveness.aborted()
            if self.stop.step is not None:
                self.stop.reacts()
                raise self.stopped(self.stop.step)

    def hosts(self) -> list[str]:
        """The host of each rank, once all have joined; where there are many ranks, each host once."""
        known = {0: self.topology.host, **{peer.rank: peer.endpoint.host for peer in self.peers.ranks()}}
        hosts = [known.get(rank, "unknown") for rank in range(self.topology.size)]
        return hosts if len(hosts) <= MOST_RANKS else list(dict.fromkeys(hosts))

    def count_energy(self, *, anew: bool = False) -> None:
        """Reports the energy that all hosts have used in this run. `anew`: this process then trains another run."""
        with self.liveness.diagnosing("energy"):
            if not anew:
                self._energy.close()
            self.listener.energy(self._energy.book.totals, is_last=True)
            if anew:
                self._energy.book.begin()

    def leave(self, failure: str | None = None, code: int = TrainingError.exit_code) -> None:
        """Sends a farewell, or the message and exit code with which this rank fails; releases signals and
        connections."""
        with self.liveness.changed:
            if self._monitor.ended:
                return
            self.liveness.is_ending = True
            self._inbox.farewell = messages.Left()
            if failure is not None:
                self._inbox.farewell = messages.Failed(text=messages.cut(" ".join(failure.split())), code=code)
                self.liveness.deadline = float("inf")  # the training thread ends by itself
                if self.rendezvous and not self.readiness.endpoints:
                    self.liveness.changed.wait_for(self.peers.all_came, timeouts.FAREWELL)
            self.peers.send(self._inbox.farewell)
            self._monitor.ended = True
        self._monitor.close()
        self._stuck.stacks.close()


@contextlib.contextmanager
def joined(world: World, framework: str, engine: str, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Around training: waits until all ranks are ready, and sets in `environ`, while the block runs, the variables that
    their libraries read. Raises AbortedError or WorldError where a rank is missing."""
    over_gloo = engine == "horovod" and mpi.uses_gloo(world.topology, framework, environ)
    key = world.readiness.horovod_key
    world.readiness.shares = framework == "tensorflow" and ENGINES[engine].needs_address
    world.wait_until_ready((lambda endpoints: gloo.serve(endpoints, key())) if over_gloo else lambda endpoints: None)
    title, others = ENGINES[engine].title, range(1, world.topology.size)
    if others and not world.rendezvous:  # nothing is known of them yet
        late = f"rank{'s 1 to' if others[1:] else ''} {others[-1]}"
        world.listener.waiting(lambda: f"waiting for {late} to start {title}")
    before = dict(environ)
    environ.update(variables(world, framework, environ))
    try:
        yield
    finally:
        # One by one, as a library's thread may read the environment meanwhile.
        for name in environ.keys() - before.keys():
            del environ[name]
        environ.update({name: value for name, value in before.items() if environ.get(name) != value})


def variables(world: World, framework: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that libraries read: torch.distributed's, and Horovod's where no launcher set them."""
    topology, ready, endpoints = world.topology, world.readiness, world.readiness.endpoints
    found = {
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.size),
        "LOCAL_RANK": str(topology.local_rank),
        "LOCAL_WORLD_SIZE": str(topology.local_size),
    }
    if world.rendezvous and not topology.row.holds_store:
        # Rank 0 has drawn its port, so that no other user can have taken it before.
        port = endpoints[0].port if endpoints else world.rendezvous.ports[-1]
        found |= {"MASTER_ADDR": world.rendezvous.host, "MASTER_PORT": str(port)}
    if ready.interface:
        found["GLOO_SOCKET_IFNAME"] = environ.get("GLOO_SOCKET_IFNAME", ready.interface)
    if ready.horovod_port:
        found |= gloo.variables(
            topology, endpoints, endpoints[0].address, ready.horovod_port, ready.interface, ready.horovod_key()
        )
    # Else Open MPI, when a rank is killed, now and then ends its peers before one can be named.
    found["OMPI_MCA_mpi_abort_delay"] = environ.get("OMPI_MCA_mpi_abort_delay", f"{timeouts.GRACE + 2:.0f}")
    # Else Gloo gives up after 30 seconds, when a rank may still be importing its framework, and then refuses that rank.
    found["HOROVOD_GLOO_TIMEOUT_SECONDS"] = environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", f"{timeouts.ARRIVAL:.0f}")
    found["UCX_DEBUG_SIGNO"] = environ.get("UCX_DEBUG_SIGNO", "0")  # else UCX takes SIGHUP, to show where it stands
    if environ.get("PMIX_SECURITY_MODE") == "munge,native":
        found["PMIX_SECURITY_MODE"] = "native"  # pip's Open MPI has no munge, and complains in a box of its own
    library = mpi.of_horovod(framework) if mpi.plugin_of(environ) == "pmi2" else None
    if library and library.kind == "mpich" and not library.vendor:
        wanted = PIP_MPICH if library.library.is_relative_to(sys.prefix) else SITE_MPICH
        found |= {name: environ.get(name, value) for name, value in wanted.items()}
    return found
