"""How Horovod's ranks find one another under each launcher, and what is refused because they could not."""

from collections.abc import Mapping

from hvdtrain import mpi
from hvdtrain.errors import WorldError
from hvdtrain.topology import Topology

RENDEZVOUS_LAUNCHERS = ("srun", "torchrun")  # they start no rendezvous of Horovod's, so rank 0 does


def check_plugin(topology: Topology, framework: str, environ: Mapping[str, str]) -> None:
    """Refuses an srun step whose PMI plugin cannot reach Horovod's MPI, before anything is loaded.

    Only what is certain is refused here; what else goes wrong the guard finds once Horovod has started.
    """
    if topology.launcher != "srun" or topology.size == 1 or uses_gloo(topology, framework, environ):
        return
    library, plugin = mpi.of_horovod(framework), mpi.plugin_of(environ)
    if library is None or not library.found or plugin is None or plugin in library.plugins:
        return
    if library.kind == "mpich" and plugin != "pmix":
        return  # a site's MPICH may find a way of its own
    if library.kind == "openmpi" and "PMIX_NAMESPACE" in environ:
        return
    raise WorldError(
        f"srun started {topology.size} tasks with the plugin {plugin}, but this Horovod uses {library.title}, "
        f"which would not find the others by it; start with: srun --mpi={library.plugins[0]} (srun --mpi=list shows "
        "what SLURM has), or load the module of the MPI that belongs to that plugin and build again: "
        "python -m hvdtrain build --mpi system"
    )


def uses_gloo(topology: Topology, framework: str, environ: Mapping[str, str]) -> bool:
    """Whether the ranks are to use Gloo with a rendezvous server of rank 0's own."""
    if topology.launcher not in RENDEZVOUS_LAUNCHERS:
        return False
    if topology.launcher == "torchrun" or environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
        return True
    return bool(mpi.horovod_library(framework)) and mpi.of_horovod(framework) is None
