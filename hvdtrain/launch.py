"""What a rank's libraries are given before they start, and what is refused because they could not start right."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, MutableMapping

from hvdtrain import gloo, mpi
from hvdtrain.errors import WorldError
from hvdtrain.lifeline import GRACE, Lifeline
from hvdtrain.topology import Topology

REQUEUE_SECONDS = 30
# MPICH's addresses over UCX are longer than SLURM's pmi2 can carry. pip's MPICH has libfabric too, whose provider
# "sockets" hangs in one of two MPI_Init on several hosts.
SITE_MPICH = {"UCX_UNIFIED_MODE": "y"}
PIP_MPICH = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "^sockets"}
RENDEZVOUS_LAUNCHERS = ("srun", "torchrun")  # they start no rendezvous of Horovod's, so the chief does


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
    """Whether the ranks shall meet over Gloo with the chief's own rendezvous."""
    if topology.launcher not in RENDEZVOUS_LAUNCHERS:
        return False
    if topology.launcher == "torchrun" or environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
        return True
    return bool(mpi.horovod_library(framework)) and mpi.of_horovod(framework) is None


@contextlib.contextmanager
def joined(line: Lifeline, framework: str, engine: str, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Around training: the ranks have met, and `environ` holds what their libraries look for; then it is as before.

    Raises AbortedError or WorldError where not every rank comes.
    """
    over_gloo = engine == "horovod" and uses_gloo(line.topology, framework, environ)
    line.meet((lambda seats: gloo.serve(seats, line.horovod_key())) if over_gloo else lambda seats: None)
    before = dict(environ)
    environ.update(variables(line, framework, environ))
    try:
        yield
    finally:
        # One by one: a library's thread may be reading the environment, which must not be empty even for a moment.
        for name in environ.keys() - before.keys():
            del environ[name]
        environ.update({name: value for name, value in before.items() if environ.get(name) != value})


def variables(line: Lifeline, framework: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What libraries look for: torch.distributed's variables, and Horovod's where no launcher gave them."""
    topology = line.topology
    told = {
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.size),
        "LOCAL_RANK": str(topology.local_rank),
        "LOCAL_WORLD_SIZE": str(topology.local_size),
    }
    if line.place and topology.launcher != "torchrun":
        # Rank 0 has drawn its port, so that no other user can have taken it before.
        port = line.seats[0].port if line.seats else line.place.ports[-1]
        told |= {"MASTER_ADDR": line.place.host, "MASTER_PORT": str(port)}
    if line.interface:
        told["GLOO_SOCKET_IFNAME"] = environ.get("GLOO_SOCKET_IFNAME", line.interface)
    if line.rendezvous:
        told |= gloo.variables(
            topology, line.seats, line.chief_address(), line.rendezvous, line.interface, line.horovod_key()
        )
    # Else Open MPI, when a rank is killed, now and then ends its peers before the lifeline could name it.
    told["OMPI_MCA_mpi_abort_delay"] = environ.get("OMPI_MCA_mpi_abort_delay", f"{GRACE + 2:.0f}")
    if environ.get("PMIX_SECURITY_MODE") == "munge,native":
        told["PMIX_SECURITY_MODE"] = "native"  # pip's Open MPI has no munge, and complains in a box of its own
    library = mpi.of_horovod(framework) if mpi.plugin_of(environ) == "pmi2" else None
    if library and library.kind == "mpich" and not library.cray:
        wanted = PIP_MPICH if library.library.is_relative_to(sys.prefix) else SITE_MPICH
        told |= {name: environ.get(name, value) for name, value in wanted.items()}
    return told


def cancel_step(environ: Mapping[str, str]) -> None:
    """Ends this srun step, if it is one: srun itself waits minutes for a dead node before it ends the others' tasks."""
    scancel = shutil.which("scancel")
    if scancel and mpi.plugin_of(environ):
        subprocess.Popen([scancel, f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"])


def requeue(job_id: str) -> str:
    """Asks SLURM to start the job again; what to tell the user."""
    scontrol = shutil.which("scontrol")
    if not scontrol:
        return "submit the job again to go on."
    try:
        done = subprocess.run(
            [scontrol, "requeue", job_id], capture_output=True, text=True, timeout=REQUEUE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"scontrol requeue {job_id} did not answer; submit the job again to go on."
    if done.returncode <= 0:  # SLURM ends the step at once, and this child with it
        return f"job {job_id} is queued again."
    return f"scontrol requeue {job_id}: {done.stderr.strip() or done.returncode}; submit the job again to go on."
