"""What libraries are given before they start, what is refused, and what SLURM is asked."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from environments import CRAY, HOROVODRUN, OPENMPI4, PMI2, PMIX, STEP, TORCHRUN, environment
from paths import DUMPS

from hvdtrain import launch, mpi
from hvdtrain.errors import WorldError
from hvdtrain.lifeline import Lifeline
from hvdtrain.meeting import Meeting, Seat
from hvdtrain.mpi import Mpi
from hvdtrain.topology import Topology, discover

OPEN_MPI_5 = Mpi("openmpi", "5.0.11", Path("/opt/libmpi.so.40"))
OPEN_MPI_4 = Mpi("openmpi", "4.1.5", Path("/opt/libmpi.so.40"), also=("pmi2",))
MPICH = Mpi("mpich", "4.0.2", Path("/opt/libmpich.so.12"))
MPICH_PMIX = Mpi("mpich", "4.2.3", Path("/opt/libmpi.so.12"), also=("pmix",))
CRAY_MPICH = Mpi("mpich", "8.1.28", Path("/opt/libmpi_cray.so.12"), cray=True)
NOT_FOUND = Mpi("mpich", "", Path("libmpi.so.12"))

REFUSED = (
    "srun started 4 tasks with the plugin {}, but this Horovod uses {}, which would not find the others by it; start "
    "with: srun --mpi={} (srun --mpi=list shows what SLURM has), or load the module of the MPI that belongs to that "
    "plugin and build again: python -m hvdtrain build --mpi system"
)
STARTS = {  # environment, Horovod's MPI: what is said
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
    "Gloo asked for": (f"{STEP} HOROVOD_CONTROLLER=gloo", OPEN_MPI_5, None),
    "no MPI": (STEP, None, None),
}


def refused(environ, library, monkeypatch):
    monkeypatch.setattr(mpi, "of_horovod", lambda framework: library)
    try:
        launch.check_plugin(discover(environ), "torch", environ)
    except WorldError as error:
        return str(error)


@pytest.mark.parametrize(("text", "library", "said"), STARTS.values(), ids=STARTS.keys())
def test_a_plugin_that_cannot_reach_the_mpi_is_refused(text, library, said, monkeypatch):
    assert refused(environment(text), library, monkeypatch) == said


@pytest.mark.skipif(not DUMPS.is_dir(), reason=f"the dumps of real steps are not at {DUMPS}")
def test_the_plugins_of_real_steps(monkeypatch):
    seen = set()
    for path in DUMPS.glob("srun-*.env"):
        environ = dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
        plugin = mpi.plugin_of(environ)
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
    "srun, asked for": (f"{PMIX} HOROVOD_CONTROLLER=GLOO", OPEN_MPI_5, "mpi_lib.so", True),
    "torchrun": (TORCHRUN, OPEN_MPI_5, "mpi_lib.so", True),
    "horovodrun": (HOROVODRUN, None, "mpi_lib.so", False),
    "mpirun": (OPENMPI4, None, "mpi_lib.so", False),
}


@pytest.mark.parametrize(("text", "library", "compiled", "gloo"), GLOO.values(), ids=GLOO.keys())
def test_who_meets_over_gloo(text, library, compiled, gloo, monkeypatch):
    monkeypatch.setattr(mpi, "of_horovod", lambda framework: library)
    monkeypatch.setattr(mpi, "horovod_library", lambda framework: compiled and Path(compiled))
    assert launch.uses_gloo(discover(environment(text)), "torch", environment(text)) is gloo


RANK = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "OMPI_MCA_mpi_abort_delay": "10"}
MASTER = {"MASTER_ADDR": "nid001", "MASTER_PORT": "10007"}
TOLD = {
    "srun": (PMIX, OPEN_MPI_5, {**RANK, **MASTER}),
    "munge": (
        f"{PMIX} PMIX_SECURITY_MODE=munge,native",
        OPEN_MPI_5,
        {**RANK, **MASTER, "PMIX_SECURITY_MODE": "native"},
    ),
    "pmi2 with MPICH": (PMI2, MPICH, {**RANK, **MASTER, "UCX_UNIFIED_MODE": "y"}),
    "pmi2 with MPICH, said": (f"{PMI2} UCX_UNIFIED_MODE=n", MPICH, {**RANK, **MASTER, "UCX_UNIFIED_MODE": "n"}),
    "pmi2 with Cray's": (PMI2, CRAY_MPICH, {**RANK, **MASTER}),
    "a delay, said": (
        f"{PMIX} OMPI_MCA_mpi_abort_delay=0",
        OPEN_MPI_5,
        {**RANK, **MASTER, "OMPI_MCA_mpi_abort_delay": "0"},
    ),
    "torchrun has told": (f"{TORCHRUN} RANK=3 WORLD_SIZE=4", None, RANK),
}


@pytest.mark.parametrize(("text", "library", "told"), TOLD.values(), ids=TOLD.keys())
def test_what_libraries_look_for(text, library, told, monkeypatch):
    monkeypatch.setattr(mpi, "of_horovod", lambda framework: library)
    line = Lifeline(discover(environment(text)), Meeting("nid001", range(10_000, 10_008), "22.0"))
    assert launch.variables(line, "torch", environment(text)) == told


def test_gloo_is_told_of_the_rendezvous(monkeypatch):
    monkeypatch.setattr(mpi, "of_horovod", lambda framework: None)
    environ = environment(STEP, SLURM_NODEID="0", SLURM_LOCALID="1", SLURM_PROCID="1")
    line = Lifeline(discover(environ), Meeting("nid001", range(10_000, 10_008), "22.0"))
    line.seats = [
        Seat(f"nid00{node + 1}", node, rank, f"10.0.0.{node + 1}", 23_000) for node in (0, 1) for rank in (0, 1)
    ]
    line.rendezvous, line._wires.key = 4321, bytes(32)
    told = launch.variables(line, "torch", environ)
    assert told["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"
    assert told["MASTER_PORT"] == "23000"  # the one that rank 0 has drawn
    assert told["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4321"
    assert (told["HOROVOD_CROSS_RANK"], told["HOROVOD_CROSS_SIZE"]) == ("0", "2")


def test_a_chief_that_has_left_already_is_still_known(monkeypatch):
    monkeypatch.setattr(mpi, "of_horovod", lambda framework: None)
    place = Meeting("127.0.0.1", range(9_811, 9_819), "word")
    seats = [Topology(rank, 2, 0, 1, rank, f"nid00{rank + 1}", "srun", "22") for rank in range(2)]
    chief, other = (Lifeline(seat, place) for seat in seats)
    for line in (chief, other):
        begins = threading.Thread(target=line.begin)  # signals are the main thread's, and one line's
        begins.start()
        begins.join()
    meets = threading.Thread(target=other.meet, args=(lambda seats: None,))
    meets.start()
    chief.meet(lambda seats: 4321)
    meets.join()
    chief.leave()
    while other._wires.peers:
        time.sleep(0.001)
    told = launch.variables(other, "torch", {})
    other.leave()
    assert (told["HOROVOD_GLOO_RENDEZVOUS_ADDR"], told["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("127.0.0.1", "4321")
    assert (told["HOROVOD_GLOO_IFACE"], told["GLOO_SOCKET_IFNAME"]) == ("lo", "lo")


def test_the_environment_is_as_before():
    line = Lifeline(replace(discover({}), rank=0))
    environ = {"HOME": "/home/alice", "RANK": "old"}
    with pytest.raises(KeyError), launch.joined(line, "none", "local", environ):
        assert environ["RANK"] == "0"
        environ["HOROVOD_CYCLE_TIME"] = "1"
        del environ["HOME"]
        raise KeyError
    assert environ == {"HOME": "/home/alice", "RANK": "old"}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """SLURM's commands, which do as a test says and write down what they were asked."""

    def make(tool, does):
        path = tmp_path / tool
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{does}\n')
        path.chmod(0o755)
        return tmp_path / "asked"

    monkeypatch.setenv("PATH", f"{tmp_path}")
    return make


REQUEUES = {
    "done": (":", "job 22 is queued again."),
    "refused": (
        "echo slurm_requeue error >&2; exit 1",
        "scontrol requeue 22: slurm_requeue error; submit the job again to go on.",
    ),
    "refused without a word": ("exit 3", "scontrol requeue 22: 3; submit the job again to go on."),
    "no answer": ("read forever < /dev/zero", "scontrol requeue 22 did not answer; submit the job again to go on."),
}


@pytest.mark.parametrize(("does", "said"), REQUEUES.values(), ids=REQUEUES.keys())
def test_a_job_is_queued_again(does, said, slurm, monkeypatch):
    monkeypatch.setattr(launch, "REQUEUE_SECONDS", 1)
    asked = slurm("scontrol", does)
    assert launch.requeue("22") == said
    assert asked.read_text() == "requeue 22\n"


def test_a_job_is_not_queued_again_without_slurm(slurm):
    assert launch.requeue("22") == "submit the job again to go on."


@pytest.mark.parametrize(("text", "asks"), [(PMIX, "22.0\n"), (STEP, "22.0\n"), (TORCHRUN, None)])
def test_a_step_is_cancelled(text, asks, slurm):
    asked = slurm("scancel", ":")
    launch.cancel_step(environment(text))
    for _ in range(200):
        if asked.exists() and asked.read_text():
            break
        time.sleep(0.001 if asks is None else 0.05)
    assert (asked.read_text() if asked.exists() else None) == asks
