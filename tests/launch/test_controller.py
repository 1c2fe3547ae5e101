"""Which PMI plugins are refused, and which ranks use Gloo."""

from pathlib import Path

import pytest
from choices import choice
from environments import CRAY, HOROVODRUN, OPENMPI4, PMI2, PMIX, STEP, TORCHRUN, environment
from paths import DUMPS

from hvdtrain.core import compatibility
from hvdtrain.errors import WorldError
from hvdtrain.launch import mpi
from hvdtrain.launch.mpi import Mpi
from hvdtrain.launch.topology import discover

OPEN_MPI_5 = Mpi("openmpi", "5.0.11", Path("/opt/libmpi.so.40"))
OPEN_MPI_4 = Mpi("openmpi", "4.1.5", Path("/opt/libmpi.so.40"), also=("pmi2",))
MPICH = Mpi("mpich", "4.0.2", Path("/opt/libmpich.so.12"))
MPICH_PMIX = Mpi("mpich", "4.2.3", Path("/opt/libmpi.so.12"), also=("pmix",))
CRAY_MPICH = Mpi("mpich", "8.1.28", Path("/opt/libmpi_cray.so.12"), vendor="Cray MPICH")
NOT_FOUND = Mpi("mpich", "", Path("libmpi.so.12"))

REFUSED = (
    "srun started 4 tasks with the plugin {}, but this Horovod uses {}, which would not find the others by it; start "
    "with: srun --mpi={} (srun --mpi=list shows what SLURM has), or load the module of the MPI that belongs to that "
    "plugin and build again: python -m hvdtrain build --mpi system"
)
MESSAGES = {  # environment, Horovod's MPI: the message
    "pmix, Open MPI": (PMIX, OPEN_MPI_5, None),
    "pmi2, Open MPI 5": (PMI2, OPEN_MPI_5, REFUSED.format("pmi2", "Open MPI 5.0.11", "pmix")),
    "pmi2, an Open MPI built for it": (PMI2, OPEN_MPI_4, None),
    "none, Open MPI": (STEP, OPEN_MPI_5, REFUSED.format("none", "Open MPI 5.0.11", "pmix")),
    "none, but another PMIx": (f"{STEP} PMIX_NAMESPACE=prte-1 PMIX_RANK=3", OPEN_MPI_5, None),
    "cray_shasta, Open MPI": (CRAY, OPEN_MPI_5, REFUSED.format("cray_shasta", "Open MPI 5.0.11", "pmix")),
    "pmi2, MPICH": (PMI2, MPICH, None),
    "pmix, MPICH": (PMIX, MPICH, REFUSED.format("pmix", "MPICH 4.0.2", "pmi2")),
    "pmix, an MPICH built for it": (PMIX, MPICH_PMIX, None),
    "none, MPICH: a site may have its way": (STEP, MPICH, None),
    "cray_shasta, Cray's": (CRAY, CRAY_MPICH, None),
    "pmix, Cray's": (PMIX, CRAY_MPICH, REFUSED.format("pmix", "Cray MPICH 8.1.28", "cray_shasta")),
    "an MPI that is not there": (PMIX, NOT_FOUND, None),
    "mpirun": (OPENMPI4, MPICH, None),
    "horovodrun": (HOROVODRUN, MPICH, None),
    "torchrun": (TORCHRUN, MPICH, None),
    "Gloo requested": (f"{STEP} HOROVOD_CONTROLLER=gloo", OPEN_MPI_5, None),
    "no MPI": (STEP, None, None),
}


def refused(environ, library, monkeypatch):
    monkeypatch.setattr(mpi, "of_horovod", lambda framework: library)
    try:
        compatibility.check(choice(topology=discover(environ)), environ)
    except WorldError as error:
        return str(error)


@pytest.mark.parametrize(("text", "library", "message"), MESSAGES.values(), ids=MESSAGES.keys())
def test_a_plugin_that_cannot_reach_the_mpi_is_refused(text, library, message, monkeypatch):
    assert refused(environment(text), library, monkeypatch) == message


@pytest.mark.skipif(not DUMPS.is_dir(), reason=f"the dumps of real steps are not at {DUMPS}")
def test_the_plugins_of_real_steps(monkeypatch):
    seen = set()
    for path in DUMPS.glob("srun-*.env"):
        environ = dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
        plugin, name = mpi.plugin_of(environ), path.name.partition("srun-")[2].partition(".")[0]
        assert plugin == name or name not in {"pmix", "pmi2", "none"}
        if discover(environ).launcher != "srun" or discover(environ).size == 1 or "gloo" in path.name:
            continue
        seen.add(plugin)
        assert bool(refused(environ, OPEN_MPI_5, monkeypatch)) == (plugin != "pmix"), path
        assert bool(refused(environ, MPICH, monkeypatch)) == (plugin == "pmix"), path
    assert seen >= {"pmix", "pmi2", "none"}


GLOO = {
    "srun": (PMIX, OPEN_MPI_5, "mpi_lib.so", False),
    "srun, Horovod without MPI": (PMIX, None, "mpi_lib.so", True),
    "srun, no Horovod": (PMIX, None, None, False),
    "srun, requested": (f"{PMIX} HOROVOD_CONTROLLER=GLOO", OPEN_MPI_5, "mpi_lib.so", True),
    "torchrun": (TORCHRUN, OPEN_MPI_5, "mpi_lib.so", True),
    "horovodrun": (HOROVODRUN, None, "mpi_lib.so", False),
    "mpirun": (OPENMPI4, None, "mpi_lib.so", False),
}


@pytest.mark.parametrize(("text", "library", "compiled", "gloo"), GLOO.values(), ids=GLOO.keys())
def test_who_uses_gloo(text, library, compiled, gloo, monkeypatch):
    monkeypatch.setattr(mpi, "of_horovod", lambda framework: library)
    monkeypatch.setattr(mpi, "horovod_library", lambda framework: compiled and Path(compiled))
    assert mpi.uses_gloo(discover(environment(text)), "torch", environment(text)) is gloo
