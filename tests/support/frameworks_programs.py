"""What test_frameworks.py starts, in a process of its own for each framework: `python frameworks_programs.py
FRAMEWORK FOLDER`.

FOLDER/given.json holds programs of this module by name, with the command lines of the runs to make by name; what they
return on rank R goes to FOLDER/rank-R.json.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import small

from hvdtrain.launch.topology import discover
from hvdtrain.ranks.world import World
from hvdtrain.run import main as runs
from hvdtrain.run.loop import Loop

FRAMEWORK = sys.argv[1]
small.shrink(FRAMEWORK)


def prepared(argv: list[str]) -> Any:
    """A loop ready to begin, as `python -m hvdtrain.FRAMEWORK ARGV` makes it."""
    adapter, opening = (importlib.import_module(f"hvdtrain.{FRAMEWORK}.{name}") for name in ("trainer", "opening"))
    run = runs.prepare(FRAMEWORK, argv, World(discover(os.environ)))
    return Loop(run, adapter.Trainer(run, opening.open_engine(run)))


def initial(argv: list[str]) -> None:
    """Leaves a checkpoint of step 0."""
    prepared(argv).write_checkpoint(None)


def train(argv: list[str]) -> list[str]:
    """Trains to the end; the frameworks that this process then holds."""
    prepared(argv).train()
    return sorted({"torch", "tensorflow"} & set(sys.modules))


def logits(argv: list[str]) -> list[list[float]]:
    """What the run's newest checkpoint answers to its first validation images."""
    trainer = prepared(argv).trainer
    indices = np.arange(32)
    x, _ = next(trainer.loader.batches(trainer.dataset.valid, [(indices, None)]))
    if FRAMEWORK == "tensorflow":
        return trainer.model(trainer.step.objective.inputs(x), training=False).numpy().tolist()
    return trainer.model.eval()(x).detach().numpy().tolist()


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    rank = discover(os.environ).rank
    given = json.loads((folder / "given.json").read_text())
    results = {program: {name: globals()[program](argv) for name, argv in of.items()} for program, of in given.items()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(results))
