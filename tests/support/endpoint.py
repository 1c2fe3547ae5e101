"""`python endpoint.py FOLDER`, started by a launcher, writes what a rank knows of itself into FOLDER/rank-N.json."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from hvdtrain.launch import rendezvous
from hvdtrain.launch.devices import threads
from hvdtrain.launch.topology import discover
from hvdtrain.ranks.world import World, joined

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(folder: Path) -> None:
    """Joins the other ranks and writes its own topology, threads, and what libraries find in the environment."""
    topology = discover(os.environ)
    before = dict(os.environ)
    world = World(topology, rendezvous.from_launcher(topology, os.environ))
    world.start()
    with joined(world, "torch", "horovod", os.environ):
        variables = {name: os.environ.get(name) for name in NAMES}
    world.leave()
    count = threads(
        96, 96, topology, {**os.environ, "SRUN_CPUS_PER_TASK": os.environ.get("SRUN_CPUS_PER_TASK", "")}, 96.0
    )
    found = {**asdict(topology), "variables": variables, "threads": count, "restored": dict(os.environ) == before}
    (folder / f"rank-{topology.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
