"""What one rank is told: `python seat.py FOLDER` under a launcher writes FOLDER/rank-N.json."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from hvdtrain import launch, meeting
from hvdtrain.devices import threads
from hvdtrain.lifeline import Lifeline
from hvdtrain.topology import discover

TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(folder: Path) -> None:
    """Meets the other ranks and writes the own seat, threads, and what libraries find in the environment."""
    topology = discover(os.environ)
    before = dict(os.environ)
    line = Lifeline(topology, meeting.of(topology, os.environ))
    line.begin()
    with launch.joined(line, "torch", "horovod", os.environ):
        told = {name: os.environ.get(name) for name in TOLD}
    line.leave()
    count = threads(96, 96, topology, {**os.environ, "SRUN_CPUS_PER_TASK": os.environ.get("SRUN_CPUS_PER_TASK", "")})
    seat = {**asdict(topology), "told": told, "threads": count, "restored": dict(os.environ) == before}
    (folder / f"rank-{topology.rank}.json").write_text(json.dumps(seat))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
