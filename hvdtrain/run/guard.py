"""The promises checked while training: the right world, and replicas identical to the bit."""

from collections.abc import Sequence

import numpy as np

from hvdtrain.core.sharing import Sum, gather
from hvdtrain.errors import ReplicaError, WorldError
from hvdtrain.launch.topology import Topology
from hvdtrain.run import agreement

MOST_NAMED = 8

REMEDIES = {
    "srun": "ask srun for the plugin of the MPI that Horovod was built with: --mpi=pmix (Open MPI), "
    "--mpi=pmi2 or --mpi=cray_shasta (MPICH, Cray-MPICH), and load that MPI's module",
    "mpirun": "start with the mpirun of the MPI that Horovod was built with",
    "mpiexec": "start with the mpiexec of the MPI that Horovod was built with",
    "torchrun": "build Horovod with Gloo: python -m hvdtrain build",
    "env://": "build Horovod with Gloo: python -m hvdtrain build",
    "horovodrun": "build Horovod with the controller that horovodrun used: python -m hvdtrain build",
    "alone": "take --engine local, or start with horovodrun, mpirun or srun",
}


def check_world(topology: Topology, rank: int, size: int, title: str = "Horovod") -> None:
    """Refuses to train when the engine (rank of size) sees another world than the launcher promised."""
    if (rank, size) != (topology.rank, topology.size):
        outcome = "nothing would be averaged" if size == 1 else "the ranks would not share the batch"
        error = WorldError(
            f"{topology.launcher} promised rank {topology.rank} of {topology.size} on {topology.host}, "
            f"but {title} reports rank {rank} of {size}: {outcome}; {REMEDIES[topology.launcher]}."
        )
        error.everywhere = size == 1  # with ranks in another order, rank 0's may be the promised one
        raise error


def check_replicas(
    fingerprint: int, values: agreement.Values, step: int, ranks: tuple[int, int], host: str, sum_over_ranks: Sum
) -> None:
    """Compares the ranks' 64-bit fingerprints of their weights, and the values that an update follows from. Every rank
    calls it; `ranks`: its own number, and how many there are.

    Raises ReplicaError on every rank, naming what differs, on which ranks and hosts.
    """
    marks = gather(np.array([agreement.mark(values), fingerprint]), *ranks, sum_over_ranks)
    of_values, of_weights = (marks != marks[0]).any(axis=0)
    if of_values or of_weights:
        differing = values if of_values else {"weights: weights": f"{fingerprint % 2**64:016x}"}
        text = agreement.differences(differing, ranks, host, sum_over_ranks)
        raise ReplicaError(f"after step {step} {text}")


def of_unlike_buffers(names: Sequence[str], kind: str, end: str, remedy: str) -> list[str]:
    """A line of the log on what the forward pass has made differ between ranks; none where nothing has."""
    if not names:
        return []
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return [
        f"after a step each rank has another {', '.join(names[:MOST_NAMED])}{more}: the forward pass changes these "
        f"{kind} by the rank's own examples, so the curve depends on the number of ranks, and all get {end} at an "
        f"epoch's end; for one value on all ranks after every step, {remedy}"
    ]


def check_devices(fingerprints: Sequence[int], step: int, devices: Sequence[str]) -> None:
    """Compares the fingerprints of one process's replicas, one a device. Raises ReplicaError, naming each that
    differs from the first."""
    differing = [index for index, mark in enumerate(fingerprints) if mark != fingerprints[0]]
    if differing:
        named = [f"replica {index} on {devices[index]}" for index in differing]
        more = [f"{len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
        raise ReplicaError(
            f"after step {step} the weights of {', '.join(named[:MOST_NAMED] + more)} differ from replica 0's: the "
            "replicas have diverged and training stops; resume from the last checkpoint with the same command, and "
            "check that device's memory."
        )
