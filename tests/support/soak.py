"""Tests that take too long for the suite: `python tests/support/soak.py power`, or `soak`, as root.

`power` cuts the power of a node in one job after the other; `soak` kills a rank, or cuts off a node, in one long job
every two to three minutes. Both print what happens, and end with exit code 1 where a run has lost anything.
"""

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

from cluster import Minicluster, losses, minicluster
from node_losses import Job, script, trains

MISSES_A_NODE = ("--slurmd-timeout", 300, "--kill-wait", 30)
WITHIN = 60.0  # seconds from the loss to the next step
GOODPUT = 0.6
BATCH, STEP_SECONDS = 100, 0.5
HOUR = 3600.0
LONG = ("linear", "--batch-size", BATCH, "--base-lr", 1e-4, "--checkpoint-every-steps", 10, "--log-every-steps", 1)
LISTENING = re.compile(r"LISTEN\s+\d+\s+\d+\s+(\S+)")


def power(folder: Path, times: int, launcher: str, framework: str) -> bool:
    """Cuts a node's power in each of so many jobs, one after the other. Whether all continued and ended well."""
    command = trains(framework=framework)
    command = command if launcher == "srun" else command[3:]
    mpi = "pmix" if launcher == "srun" else None
    with minicluster(folder, "--nodes", 4, *MISSES_A_NODE) as cluster:
        whole = Job(cluster, folder / "undisturbed")
        wanted = whole.submit(script(command, nodes=3, launcher=launcher, mpi=mpi)).ended().losses()
        good = 0
        for number in range(1, times + 1):
            job = Job(cluster, folder / f"power-{number}")
            job.submit(script(command, nodes=3, spare=1, launcher=launcher, mpi=mpi), "--exclusive").trains()
            node = random.choice(job.nodes()[1:3])
            job.trains_again(job.cut(node))
            job.ended("COMPLETING")
            code, equal = job.state["ExitCode"], job.losses() == wanted
            print(f"{number}: {node}, stepping after {job.seconds:.1f} s, exit code {code}, equal: {equal}", flush=True)
            good += job.seconds <= WITHIN and code == "0:0" and equal
            cluster("heal", node)
            job.ended()
    print(f"{good} of {times} within {WITHIN:.0f} s with equal losses")
    return good == times


def soak(folder: Path, faults: int, shortest: float, longest: float, seed: int) -> bool:
    """Makes faults of a random kind at random ranks and nodes of one long job. Whether it continued and ended well."""
    rng = random.Random(seed)
    seconds = faults * (shortest + longest) / 2
    epochs = round(seconds * 0.75 / STEP_SECONDS / 10)  # of ten steps
    recipe = (*LONG, "--epochs", epochs)
    with minicluster(folder, "--nodes", 8, *MISSES_A_NODE) as cluster:
        whole = Job(cluster, folder / "undisturbed", limit=HOUR)
        whole.submit(script(trains(recipe=recipe, pause=0), nodes=3, mpi="pmix")).ended()
        ports = listening(cluster)
        text = script(trains(recipe=recipe, pause=STEP_SECONDS), nodes=3, spare=4, mpi="pmix")
        job, began = Job(cluster, folder / "soak", limit=HOUR), time.monotonic()
        job.submit(text, "--exclusive", "--time=10:00:00").trains(5)
        down, number = dict[str, float](), 0
        for number in range(1, faults + 1):
            sleep(job, cluster, down, rng.uniform(shortest, longest))
            if is_over(job):
                break
            what = disturb(job, down, rng)
            print(f"{time.monotonic() - began:5.0f} s  {number}: {what}; at step {last(job)}", flush=True)
        sleep(job, cluster, down, max([0.0, *(until - time.monotonic() for until in down.values())]) + 1)
        job.ended("COMPLETING")
        wall = time.monotonic() - began
        time.sleep(10)
        left, open_now = job.processes(), listening(cluster) - ports
    print("\n".join(job.supervised))
    goodput, equal = useful(job.run) / wall, job.losses() == whole.losses()
    print(f"{number} faults in {wall:.0f} s, {job.state['JobState']}, exit code {job.state['ExitCode']}")
    print(f"goodput {goodput:.3f}; equal losses: {equal}, of {len(whole.losses())} steps")
    print(f"left: processes {left}, ports {sorted(open_now)}, {list(job.folder.glob('.hvdtrain-*'))}")
    return job.state["ExitCode"] == "0:0" and equal and goodput >= GOODPUT and not left and not open_now


def disturb(job: Job, down: dict[str, float], rng: random.Random) -> str:
    """Kills a rank or cuts off a node, and returns what it did. The node is to be healed at the time in `down`."""
    hosts = job.hosts()
    kind = rng.choice(["kill", "power", "link"]) if hosts else "none, as no rank runs"
    if kind == "kill":
        rank = rng.choice(sorted(hosts))
        job.kill_rank(rank)
        return f"rank {rank} on {hosts[rank]} killed"
    first = job.nodes()[0]
    # SLURM alone can save a job whose script has lost its node.
    nodes = sorted(set(hosts.values()) - set(down) - ({first} if kind == "power" else set()))
    if not nodes:
        return kind
    node, seconds = rng.choice(nodes), rng.uniform(5, 100) if kind == "link" else 90
    down[node] = time.monotonic() + seconds
    job.cluster("cut", *(["--power"] if kind == "power" else []), node)
    return f"{kind} of {node}, for {seconds:.0f} s"


def sleep(job: Job, cluster: Minicluster, down: dict[str, float], seconds: float) -> None:
    """Waits so many seconds, and meanwhile heals the nodes that are due."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not is_over(job):
        for node in [node for node, until in down.items() if time.monotonic() >= until]:
            del down[node]
            cluster("heal", node)
        time.sleep(1)


def is_over(job: Job) -> bool:
    return job.cluster.job(job.number)["JobState"] not in {"PENDING", "CONFIGURING", "RUNNING", "REQUEUED"}


def last(job: Job) -> int:
    """The newest recorded step."""
    return losses(job.run)[-1][0]


def useful(run: Path) -> float:
    """The seconds that the run's steps took, each counted once."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    seconds = {line["step"]: BATCH / line["examples_per_second"] for line in lines if line["kind"] == "step"}
    middle = statistics.median(seconds.values())
    # The first after a launch also waits for all ranks.
    return sum(min(each, 2 * middle) for each in seconds.values())


def listening(cluster: Minicluster) -> set[str]:
    """Every node's listening TCP ports."""
    found = set[str]()
    for number in range(1, 9):
        shown = cluster("exec", f"nid{number:03}", "ss", "-Hltn")
        found |= {f"nid{number:03} {address}" for address in LISTENING.findall(shown)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    again = commands.add_parser("power")
    again.add_argument("--times", type=int, default=10)
    again.add_argument("--launcher", default="srun", choices=["srun", "torchrun", "tf-config"])
    again.add_argument("--framework", default="torch", choices=["torch", "tensorflow"])
    long = commands.add_parser("soak")
    long.add_argument("--faults", type=int, default=20)
    long.add_argument("--shortest", type=float, default=120.0)
    long.add_argument("--longest", type=float, default=180.0)
    long.add_argument("--seed", type=int, default=1)
    flags = vars(parser.parse_args())
    proof = {"power": power, "soak": soak}[flags.pop("command")]
    folder = Path(tempfile.mkdtemp(prefix="proof-")) / "jobs"
    folder.mkdir()
    print(f"logs: {folder}", flush=True)
    return 0 if proof(folder, **flags) else 1


if __name__ == "__main__":
    sys.exit(main())
