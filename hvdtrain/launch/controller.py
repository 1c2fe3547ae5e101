"""How Horovod's ranks find one another under each launcher, and what is refused because they could not."""

from collections.abc import Mapping

from hvdtrain.launch import mpi
from hvdtrain.launch.topology import Topology

RENDEZVOUS_LAUNCHERS = ("srun", "torchrun", "env://")  # they start no rendezvous of Horovod's, so rank 0 does


def uses_gloo(topology: Topology, framework: str, environ: Mapping[str, str]) -> bool:
    """Whether the ranks are to use Gloo with a rendezvous server of rank 0's own."""
    if topology.launcher not in RENDEZVOUS_LAUNCHERS:
        return False
    if topology.launcher != "srun" or environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
        return True
    return bool(mpi.horovod_library(framework)) and mpi.of_horovod(framework) is None
