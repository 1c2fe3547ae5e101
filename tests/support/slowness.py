"""Tests whether slow ranks are named, and no others: `python tests/support/slowness.py --slow 20 --clean 20`, as root.

Four ranks train on four nodes of a minicluster, each with its part of a processor and a link of 1 Gbit/s, beside busy
processes. From a random step on, one rank has half the processor, a tenth of the link, or a data set that sleeps.
On a machine so busy that no node gets its part of a processor, halving the part slows nothing, and nothing is named.
"""

import argparse
import contextlib
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster import Minicluster, minicluster
from ranks import Ranks

NODES, WITHIN, CLEAN_STEPS = 4, 50, 200
PROCESSORS, RATE = 0.2, "1gbit"
PERIOD = 10_000  # microseconds
NAMED = re.compile(r"rank (\d) on (\S+) is slow in (\w+)[^\n]*")
PROGRAM = """
import os
import time

import torch

WORK = 8  # some 20 ms of a processor
asleep = f"reads-slowly-{os.environ['SLURM_PROCID']}"


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.02 if os.path.exists(asleep) else 0.0)
        return torch.full((512,), float(index % 7)), torch.tensor(index % 2)


# 2 MB of weights, and as much work as many more would be.
class Net(torch.nn.Sequential):
    def __init__(self):
        nn = torch.nn
        super().__init__(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2))
        self.work = torch.eye(512)

    def forward(self, x):
        with torch.no_grad():
            for _ in range(WORK):
                self.work @ self.work
        return super().forward(x)


def data():
    return Data(), torch.utils.data.Subset(Data(), range(4))
"""
RECIPE = """
default: {model: "slow:Net", dataset: "slow:data", loss: "torch.nn.functional:cross_entropy", batch_size: 32, epochs: 1,
  base_lr: 0.001}
"""


@dataclass
class Run:
    cluster: Minicluster
    ranks: Ranks
    folder: Path

    def steps(self) -> int:
        recorded = self.folder / "metrics.jsonl"
        return recorded.read_text().count('"kind": "step"') if recorded.exists() else 0

    def named(self) -> list[re.Match[str]]:
        return list(NAMED.finditer(self.ranks.err.read_text()))

    def wait_for(self, step: int, *, unless_named: bool = False) -> None:
        while self.steps() < step and not (unless_named and self.named()):
            if self.ranks.process.poll() is not None:
                sys.exit(self.ranks.err.read_text())
            time.sleep(0.1)


def allot(cluster: Minicluster, node: str, processors: float | None) -> None:
    """Gives a node that part of a processor, or all there are."""
    group = f"minicluster{str(cluster.state).replace('/', '-')}-{node}"
    first, second = (Path("/sys/fs/cgroup") / top / group for top in ("cpu", ""))
    quota = round(processors * PERIOD) if processors else None
    if first.exists():
        (first / "cpu.cfs_quota_us").write_text(str(quota or -1))
    else:
        (second / "cpu.max").write_text(f"{quota or 'max'} {PERIOD}")


def nodes(cluster: Minicluster, processors: float | None) -> None:
    for number in range(NODES):
        allot(cluster, f"nid{number + 1:03}", processors)


@contextlib.contextmanager
def slowed(cluster: Minicluster, rank: int, cause: str) -> Iterator[None]:
    """Makes that rank slow inside the block."""
    node, sleeps = f"nid{rank + 1:03}", cluster.folder / f"reads-slowly-{rank}"
    try:
        if cause == "computing":
            allot(cluster, node, PROCESSORS / 2)
        elif cause == "network":
            cluster("shape", node, "--rate", "100mbit")
        else:
            sleeps.touch()
        yield
    finally:
        cluster("shape", node, "--rate", RATE)
        sleeps.unlink(missing_ok=True)


@contextlib.contextmanager
def training(cluster: Minicluster, engine: str, *argv: str, **environ: str) -> Iterator[Run]:
    """Starts a run, and waits until it has made some steps."""
    folder = cluster.folder / f"run-{time.monotonic_ns()}"
    nodes(cluster, None)  # with a part of a processor the libraries would take half a minute to load
    train = (sys.executable, "-m", "hvdtrain.torch", "slow.yaml", "--engine", engine, "--log-every-steps", 1)
    with cluster.started("srun", f"-N{NODES}", f"-n{NODES}", *train, *argv, "--output", folder, **environ) as ranks:
        run = Run(cluster, ranks, folder)
        run.wait_for(1)
        nodes(cluster, PROCESSORS)
        run.wait_for(5)
        yield run


@contextlib.contextmanager
def loaded(processes: int) -> Iterator[None]:
    """Runs so many busy processes during the block."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def slow(cluster: Minicluster, engine: str, draw: random.Random, cause: str) -> bool:
    """Makes a run with a slow rank. Prints and returns whether it is named in time, and nothing else is."""
    rank = draw.randrange(NODES)
    with training(cluster, engine) as run:
        run.wait_for(draw.randrange(20, 40))
        began, early = run.steps(), run.named()
        with slowed(cluster, rank, cause):
            run.wait_for(began + WITHIN, unless_named=not early)
            found, steps = run.named(), run.steps() - began
    right = [each.groups() for each in found] == [(str(rank), f"nid{rank + 1:03}", cause)]
    print(
        f"{'ok' if right else 'WRONG'}: rank {rank}, {cause}, {steps} steps: {[each[0] for each in found]}", flush=True
    )
    return right


def clean(cluster: Minicluster, engine: str) -> bool:
    """Makes a run without a slow rank. Prints and returns whether nothing is named."""
    began = time.monotonic()
    with training(cluster, engine) as run:
        run.wait_for(CLEAN_STEPS)
        found, seconds = run.named(), time.monotonic() - began
    print(f"{'WRONG' if found else 'ok'}: clean, {seconds:.0f} s: {[each[0] for each in found]}", flush=True)
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=int, default=20, help="runs with a slow rank")
    parser.add_argument("--clean", type=int, default=20, help="runs without one")
    parser.add_argument("--load", type=int, default=2, help="busy processes beside them")
    parser.add_argument("--engine", default="ddp", help="of hvdtrain.torch")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    draw = random.Random(flags.seed)
    with tempfile.TemporaryDirectory() as parent, loaded(flags.load):
        folder = Path(parent) / "runs"
        folder.mkdir()
        (folder / "slow.py").write_text(PROGRAM)
        (folder / "slow.yaml").write_text(RECIPE)
        with minicluster(folder, "--nodes", NODES, "--rate", RATE, "--cpu-quota", PROCESSORS) as cluster:
            causes = [("computing", "network", "reading")[number % 3] for number in range(flags.slow)]
            right = [slow(cluster, flags.engine, draw, cause) for cause in causes]
            quiet = [clean(cluster, flags.engine) for _ in range(flags.clean)]
    print(f"{sum(right)} of {len(right)} slow ranks named; {len(quiet) - sum(quiet)} alarms in {len(quiet)} clean runs")
    return 0 if all(right + quiet) else 1


if __name__ == "__main__":
    sys.exit(main())
