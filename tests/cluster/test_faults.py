"""What ends a job on a cluster ends every rank of it, names rank and host, and leaves no process behind."""

import contextlib
import json
import re
import sys
import time
from pathlib import Path

import pytest
from cluster import ENVIRONMENTS
from marks import marked, rows
from paths import SUPPORT
from ranks import tagged, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


PACED = SUPPORT / "paced.py"
TRAINER = re.compile(rf"[^\0]*python[\d.]*\0{re.escape(str(PACED))}\0")
ENDLESS = ("linear", "--epochs", 100_000, "--log-every-steps", 1, "--checkpoint-every-epochs", 50)
OVER_SSH = ("-np", 2, "-H", "nid001:1,nid002:1")

# Two ranks on two nodes, started in every way; where `srun` has no flag to kill on a bad exit, it must not be needed.
STARTS = {
    "srun, Open MPI": ("openmpi", "torch", ("srun", "-w", "nid[001-002]", "-N2", "-n2", "--mpi=pmix")),
    "srun, MPICH": ("mpich", "torch", ("srun", "-w", "nid[001-002]", "-N2", "-n2", "--mpi=pmi2")),
    "srun, Gloo": ("gloo", "torch", ("srun", "-w", "nid[001-002]", "-N2", "-n2")),
    "horovodrun --gloo": ("openmpi", "torch", ("exec", "nid001", "horovodrun", "--gloo", *OVER_SSH)),
    "horovodrun --mpi": ("openmpi", "torch", ("exec", "nid001", "horovodrun", "--mpi", *OVER_SSH)),
}
TENSORFLOW = {"srun, TensorFlow": ("openmpi", "tensorflow", STARTS["srun, Open MPI"][2])}
LIMITED = ("srun", "-w", "nid[003-004]", "-N2", "-n2", "--mpi=pmix", "--time=1")


def starts_of(*names):
    return {name: STARTS[name] for name in names}


@contextlib.contextmanager
def training(cluster, starts):
    """These runs, each having made some steps: by name the launcher with its ranks, and the run folder."""
    with contextlib.ExitStack() as stack:
        runs = {}
        for name, (build, framework, command) in starts.items():
            folder = cluster.folder / f"{name} {time.monotonic_ns()}"
            python = ENVIRONMENTS[build] / "bin" / "python"
            train = (python, PACED, f"hvdtrain.{framework}", *ENDLESS, "--output", folder)
            launch = cluster.started(*command, *train, build=build)
            runs[name] = stack.enter_context(launch), folder
        for ranks, folder in runs.values():
            wait_while(ranks, lambda folder=folder: steps(folder) > 5)
        yield runs


def steps(folder):
    recorded = folder / "metrics.jsonl"
    return recorded.read_text().count('"kind": "step"') if recorded.exists() else 0


def wait_while(ranks, true):
    """Until it is true, while these ranks run."""
    while not true():
        if ranks.process.poll() is not None:
            pytest.fail(f"{ranks.out.read_text()[-2000:]}{ranks.err.read_text()[-4000:]}")
        ranks.nap()


def trainers(ranks):
    """The ranks' processes that are alive, wherever they run, cut-off nodes included."""
    return [pid for pid in tagged(ranks.tag) if TRAINER.match(command(pid))]


def command(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def end(ranks):
    """The launcher's end, once every rank has ended too."""
    wait_until(lambda: not trainers(ranks))
    return ranks.wait()


def restore(cluster, node):
    """Heals the node; SLURM, patient as a site's, would otherwise wait minutes for the end of the jobs that it had."""
    cluster("heal", node)
    cluster("scontrol", "update", f"nodename={node}", "state=down", "reason=healed")
    # A node that registers meanwhile is back by itself, and SLURM refuses to resume it.
    cluster.run("scontrol", "update", f"nodename={node}", "state=resume")


def output_of(of):
    """What an ended launch, or one under way, has printed."""
    return "".join(text if isinstance(text, str) else text.read_text() for text in (of.out, of.err))


def status(folder):
    return json.loads((folder / "status.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def limited(cluster):
    """A run on the other two nodes with SLURM's shortest limit, a minute, which passes beside the other tests."""
    with training(cluster, {"srun": ("openmpi", "torch", LIMITED)}) as runs:
        yield runs["srun"]


KILLED = {
    "Open MPI, Gloo and TensorFlow": starts_of("srun, Open MPI", "srun, Gloo") | TENSORFLOW,
    "other starts": starts_of("srun, MPICH", "horovodrun --gloo", "horovodrun --mpi"),
}


# Two cores take half a minute to start ten more ranks, all of which have the same failure detector.
@pytest.mark.parametrize("starts", marked(rows(KILLED), slow={"other starts"}))
def test_a_killed_rank_is_named(cluster, starts):
    with training(cluster, starts) as runs:
        for ranks, _ in runs.values():
            ranks.kill_rank(1)
        for name, (ranks, folder) in runs.items():
            ended = end(ranks)
            assert ended.code != 0, name
            assert "rank 1 on nid002 ended without a message" in output_of(ended), name
            assert status(folder)["state"] == "failed"
            assert "rank 1 on nid002" in status(folder)["error"]
            assert ended.left == [], name


LOST = {
    "a cut link": ((), starts_of("srun, MPICH", "horovodrun --gloo")),
    "other starts": ((), starts_of("srun, Open MPI", "srun, Gloo", "horovodrun --mpi")),
    "a dead node": (("--power",), TENSORFLOW),
}


@pytest.mark.parametrize(("power", "starts"), marked(rows(LOST), slow={"other starts", "a dead node"}))
def test_a_node_that_is_lost_ends_every_rank_and_is_named(cluster, power, starts):
    with training(cluster, starts) as runs:
        try:
            cluster("cut", *power, "nid002")
            for name, (ranks, folder) in runs.items():
                if name == "horovodrun --mpi":  # mpirun itself waits for ssh, which never gives a silent host up
                    wait_until(lambda ranks=ranks: not trainers(ranks))
                    ranks.kill()
                else:
                    assert end(ranks).code != 0, name
                assert "rank 1 on nid002" in output_of(ranks), (name, output_of(ranks)[-3000:])
                assert status(folder)["state"] == "failed"
        finally:
            restore(cluster, "nid002")
        for name, (ranks, _) in runs.items():
            assert ranks.left() == [], name


CANCELLED = {"MPICH": starts_of("srun, MPICH"), "other starts": starts_of("srun, Open MPI") | TENSORFLOW}


@pytest.mark.parametrize("starts", marked(rows(CANCELLED), slow={"other starts"}))
def test_scancel_stops_after_the_step_with_a_checkpoint(cluster, starts):
    with training(cluster, starts) as runs:
        for job in cluster.jobs("nid001"):
            cluster("scancel", job)
        for name, (ranks, folder) in runs.items():
            ended = end(ranks)
            assert ended.code != 0, (name, output_of(ended)[-3000:])
            assert "(rank 0 on nid001): SIGTERM" in output_of(ended), name
            assert status(folder)["state"] == "stopped", (name, output_of(ended)[-3000:])
            assert ended.left == [], name
            assert list((folder / "checkpoints").glob("step-*")), name


def test_a_rank_that_raises_ends_the_others_too(cluster):
    program = (
        "import sys; from hvdtrain.run import main; "
        "from hvdtrain.torch.__main__ import train; "
        "from hvdtrain.torch.trainer import Trainer; "
        "take = Trainer.update; "
        "Trainer.update = lambda self, batch, lr, step: 1 / 0 if step == 9 and self.engine.rank == 1 "
        "else take(self, batch, lr, step); "
        "sys.exit(main.main('torch', sys.argv[1:], train))"
    )
    command = ("srun", "-N2", "-n4", "--mpi=pmix", sys.executable, "-c", program, *ENDLESS)
    with cluster.started(*command, "--output", cluster.folder / "raised") as ranks:
        ended = end(ranks)
    assert ended.code != 0
    assert "ZeroDivisionError" in ended.err
    assert ended.left == []


def test_the_time_limit_stops_after_the_step_with_a_checkpoint(limited):
    ranks, folder = limited
    ended = end(ranks)
    assert ended.code != 0
    assert "DUE TO TIME LIMIT" in output_of(ended)
    assert "(rank 0 on nid003): SIGTERM" in output_of(ended)
    assert status(folder)["state"] == "stopped"
    assert ended.left == []


NETWORK = """
import torch

from hvdtrain.ranks import timeouts

timeouts.TIMES = 0.2  # 50 steps of a tenth of a second are enough


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.ones(512), torch.tensor(index % 2)


def net():
    return torch.nn.Linear(512, 512)  # 1 MB


def data():
    return Data(), torch.utils.data.Subset(Data(), range(3))
"""
NETWORK_RECIPE = """
default: {model: "network:net", dataset: "network:data", loss: "torch.nn.functional:cross_entropy", batch_size: 3,
  epochs: 1, base_lr: 0.001}
"""


@pytest.mark.parametrize("build", marked(["gloo", "openmpi"], slow={"openmpi"}))
def test_a_slow_link_is_named_with_rank_and_host(cluster, build):
    folder = cluster.folder / f"network {build}"
    folder.mkdir()
    (folder / "network.py").write_text(NETWORK)
    (folder / "network.yaml").write_text(NETWORK_RECIPE)
    python = ENVIRONMENTS[build] / "bin" / "python"
    train = (python, "-m", "hvdtrain.torch", "network.yaml", "--log-every-steps", 1, "--output", "run")
    cluster("shape", "nid003", "--rate", "100mbit")
    try:
        command = ("srun", "--mpi=pmix", "-w", "nid[001-003]", "-N3", "-n3", *train)
        with cluster.started(*command, build=build, cwd=folder) as ranks:
            wait_while(ranks, lambda: " is slow in " in output_of(ranks))
            named = re.findall(r"(rank \d on \S+ is slow in \w+): \d+ ms", output_of(ranks))
            assert named == ["rank 2 on nid003 is slow in network"]
    finally:
        cluster("shape", "nid003", "--rate", "none")
