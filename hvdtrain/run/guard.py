"""The promises checked while training: the right world, and replicas identical to the bit."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence

import numpy as np

from hvdtrain.core.sharing import Sum, gather, of_ranks
from hvdtrain.errors import LoopError, ReplicaError, WorldError
from hvdtrain.launch.topology import Topology

HOST_BYTES = 64
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


def check_replicas(fingerprint: int, step: int, ranks: tuple[int, int], host: str, sum_over_ranks: Sum) -> None:
    """Compares the ranks' 64-bit fingerprints of their weights. Every rank calls it; `ranks`: its own number, and how
    many there are.

    Raises ReplicaError on every rank, naming each rank and host that differs from rank 0.
    """
    prints = gather(np.array([fingerprint], dtype=np.int64), *ranks, sum_over_ranks)[:, 0]
    differing = np.flatnonzero(prints != prints[0])
    if not differing.size:
        return
    hosts = of_ranks(os.fsencode(host)[:HOST_BYTES].decode(errors="replace"), *ranks, sum_over_ranks)
    named = [f"rank {rank} on {hosts[rank]}" for rank in differing]
    raise _error(named, "rank 0's", "host", step)


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
        raise _error([f"replica {index} on {devices[index]}" for index in differing], "replica 0's", "device", step)


def check_epoch(
    epoch: int, steps: int, reported: Mapping[str, float], ranks: tuple[int, int], sum_over_ranks: Sum
) -> None:
    """Compares the ranks' steps of an epoch, and what they report of it. Every rank calls it; `ranks` as above.

    Raises LoopError on every rank, naming two that differ.
    """
    text = json.dumps(reported, sort_keys=True).encode()
    mark = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    rows = gather(np.array([steps, mark], dtype=np.int64), *ranks, sum_over_ranks)
    if (rows == rows[0]).all():
        return
    of_all = of_ranks([steps, reported], *ranks, sum_over_ranks)
    first, at_first = of_all[0]
    for rank, (made, at_rank) in enumerate(of_all):
        if made != first:
            raise LoopError(
                f"in epoch {epoch} rank 0 made {first} steps and rank {rank} made {made}; every rank must make the "
                "same: end an epoch early by a number that all of them have, as of world.sum."
            )
        _check_reported(epoch, at_first, at_rank, rank)


def _check_reported(epoch: int, at_first: Mapping[str, float], at_rank: Mapping[str, float], rank: int) -> None:
    """Raises LoopError where a rank reports otherwise than rank 0."""
    for name in [*at_first, *at_rank]:
        if name not in at_first or name not in at_rank:
            (less, lacking), (more, having) = sorted(((0, at_first), (rank, at_rank)), key=lambda one: name in one[1])
            what = f"no {name}" if lacking else "nothing"
            raise LoopError(
                f"in epoch {epoch} rank {less} reported {what}, rank {more} {name}={having[name]:.9g}; call "
                "run.report() on every rank, with the same names."
            )
        one, other = at_first[name], at_rank[name]
        if one != other and not (math.isnan(one) and math.isnan(other)):
            raise LoopError(
                f"in epoch {epoch} rank 0 reported {name}={one:.9g} and rank {rank} {name}={other:.9g}; every rank "
                f"must report the same: take {name}=world.mean(total, count)."
            )


def _error(named: list[str], like: str, what: str, step: int) -> ReplicaError:
    more = [f"{len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
    listed = ", ".join(named[:MOST_NAMED] + more)
    return ReplicaError(
        f"after step {step} the weights of {listed} differ from {like}: the replicas have diverged and "
        f"training stops; resume from the last checkpoint with the same command, and check that {what}'s memory."
    )
