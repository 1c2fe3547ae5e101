"""What training's libraries find in the environment once all ranks are ready."""

import json
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from environments import PMI2, PMIX, STEP, TORCHRUN, environment

from hvdtrain.errors import AbortedError
from hvdtrain.launch import mpi
from hvdtrain.launch.mpi import Mpi
from hvdtrain.launch.rendezvous import Endpoint, Rendezvous
from hvdtrain.launch.topology import Topology, discover
from hvdtrain.ranks.world import World, joined, variables
from hvdtrain.record.folder import hold
from hvdtrain.run.process import RankProcess

OPEN_MPI_5 = Mpi("openmpi", "5.0.11", Path("/opt/libmpi.so.40"))
MPICH = Mpi("mpich", "4.0.2", Path("/opt/libmpich.so.12"))
CRAY_MPICH = Mpi("mpich", "8.1.28", Path("/opt/libmpi_cray.so.12"), vendor="Cray MPICH")

RANK = {
    "UCX_DEBUG_SIGNO": "0",
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "OMPI_MCA_mpi_abort_delay": "10",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "300",
}  # fmt: skip
MASTER = {"MASTER_ADDR": "nid001", "MASTER_PORT": "10007"}
FOUND = {
    "srun": (PMIX, OPEN_MPI_5, {**RANK, **MASTER}),
    "munge": (
        f"{PMIX} PMIX_SECURITY_MODE=munge,native",
        OPEN_MPI_5,
        {**RANK, **MASTER, "PMIX_SECURITY_MODE": "native"},
    ),
    "pmi2 with MPICH": (PMI2, MPICH, {**RANK, **MASTER, "UCX_UNIFIED_MODE": "y"}),
    "pmi2 with MPICH, chosen": (f"{PMI2} UCX_UNIFIED_MODE=n", MPICH, {**RANK, **MASTER, "UCX_UNIFIED_MODE": "n"}),
    "pmi2 with Cray's": (PMI2, CRAY_MPICH, {**RANK, **MASTER}),
    "torchrun has set them": (f"{TORCHRUN} RANK=3 WORLD_SIZE=4", None, RANK),
}


@pytest.mark.parametrize(("text", "library", "expected"), FOUND.values(), ids=FOUND.keys())
def test_what_libraries_look_for(text, library, expected, monkeypatch):
    monkeypatch.setattr(mpi, "of_horovod", lambda framework: library)
    world = World(discover(environment(text)), Rendezvous("nid001", range(10_000, 10_008), "22.0"))
    assert variables(world, "torch", environment(text)) == expected


def test_gloo_is_given_the_rendezvous_server(monkeypatch):
    monkeypatch.setattr(mpi, "of_horovod", lambda framework: None)
    environ = environment(STEP, SLURM_NODEID="0", SLURM_LOCALID="1", SLURM_PROCID="1")
    world = World(discover(environ), Rendezvous("nid001", range(10_000, 10_008), "22.0"))
    world.readiness.endpoints = [
        Endpoint(f"nid00{node + 1}", node, rank, f"10.0.0.{node + 1}", 23_000) for node in (0, 1) for rank in (0, 1)
    ]
    world.readiness.horovod_port, world.readiness.handshake.key = 4321, bytes(32)
    found = variables(world, "torch", environ)
    assert found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"
    assert found["MASTER_PORT"] == "23000"  # the one that rank 0 has drawn
    assert found["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4321"
    assert (found["HOROVOD_CROSS_RANK"], found["HOROVOD_CROSS_SIZE"]) == ("0", "2")


def test_a_rank_0_that_has_left_already_is_still_known(monkeypatch):
    monkeypatch.setattr(mpi, "of_horovod", lambda framework: None)
    rendezvous = Rendezvous("127.0.0.1", range(9_811, 9_819), "token")
    topologies = [Topology(rank, 2, 0, 1, rank, f"nid00{rank + 1}", "srun", "22") for rank in range(2)]
    rank_0, other = (World(topology, rendezvous) for topology in topologies)
    for world in (rank_0, other):
        starts = threading.Thread(target=world.start)  # signals are the main thread's, and one world's
        starts.start()
        starts.join()
    waits = threading.Thread(target=other.wait_until_ready, args=(lambda endpoints: None,))
    waits.start()
    rank_0.wait_until_ready(lambda endpoints: 4321)
    waits.join()
    rank_0.leave()
    while other.peers.connections:
        time.sleep(0.001)
    found = variables(other, "torch", {})
    other.leave()
    assert (found["HOROVOD_GLOO_RENDEZVOUS_ADDR"], found["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("127.0.0.1", "4321")
    assert (found["HOROVOD_GLOO_IFACE"], found["GLOO_SOCKET_IFNAME"]) == ("lo", "lo")


def test_the_environment_is_as_before():
    world = World(replace(discover({}), rank=0))
    environ = {"HOME": "/home/alice", "RANK": "old"}
    with pytest.raises(KeyError), joined(world, "none", "local", environ):
        assert environ["RANK"] == "0"
        environ["HOROVOD_CYCLE_TIME"] = "1"
        del environ["HOME"]
        raise KeyError
    assert environ == {"HOME": "/home/alice", "RANK": "old"}


@pytest.mark.parametrize(("number", "times"), [(signal.SIGTERM, 1), (signal.SIGHUP, 1), (signal.SIGUSR1, 0)])
def test_an_end_is_recorded_before_a_launcher_kills(number, times):
    world, texts = World(Topology.alone()), []
    world.liveness.in_steps, world.listener.signalled = True, texts.append
    with world.liveness.changed:
        world.stop.signalled(number, 0.0)
        world.stop.signalled(number, 1.0)
    assert world.stop.error(3).exit_code == 128 + number
    name = signal.Signals(number).name
    assert texts == [f"{name}: it could report no more; the same command continues from the last checkpoint."] * times


def test_a_launcher_that_has_ended_is_the_cause():
    world, texts = World(Topology.alone()), []
    world.liveness.in_steps, world.listener.error = True, lambda kind, text: texts.append(text)
    with world.liveness.changed:
        world.stop.signalled(signal.SIGTERM, 0.0, launcher=True)
    assert str(world.stop.error(3)).startswith("SIGTERM (the launcher was ended by a signal): stopped after step 3, ")
    assert [text.partition(":")[0] for text in texts] == ["SIGTERM (the launcher was ended by a signal)"]


@pytest.mark.parametrize(("code", "state"), [(1, "failed"), (130, "stopped")])
def test_ctrl_c_at_another_rank_is_a_stop(code, state, tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.run.process.write_report", lambda *_: None)
    with RankProcess(Topology.alone()) as process:
        process.listener.folder = hold(tmp_path)
        raise AbortedError("rank 1 on nid1 failed: interrupted", code)
    assert process.code == code
    assert json.loads((tmp_path / "status.json").read_text())["state"] == state
