"""Runs of recipes in their folders, one after the other on every rank: `python example_programs.py torch FOLDER`.

FOLDER/given.json holds them by name: {"folder": where it is started, "argv": ..., "adapter": torch or lightning,
"kill": the step at which SIGKILL ends every rank, or null}. Exit code, stdout and stderr on rank R go to
FOLDER/rank-R.json.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from captured import captured
from programs import framework, results, runs, write

from hvdtrain.launch.topology import discover
from hvdtrain.run import loop as runs_loop


@contextlib.contextmanager
def inside(folder: str) -> Iterator[None]:
    """The folder as the current one; modules that are imported from it are forgotten at the end."""
    before, paths = Path.cwd(), list(sys.path)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = paths
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "") or "").startswith(folder):
                del sys.modules[name]


def trained(argv: list[str], adapter: str = "torch", kill: int | None = None) -> dict[str, Any]:
    """Exit code, stdout and stderr of the run on this rank, whose ranks stay joined for the next."""

    def train(run: runs.Run) -> None:
        engine = framework.open_engine(run)
        run.world.exchange(engine.sum)
        if adapter == "lightning":
            from hvdtrain.lightning.train import fit, quiet

            with quiet():
                fit(run, engine)
            return
        trainer = framework.Trainer(run, engine)
        if kill is not None:
            trainer.update = killed_at(kill, trainer.update)
        runs_loop.Loop(run, trainer).train()

    return captured(adapter, argv, train)


def killed_at(kill: int, update: Any) -> Any:
    def killed_or_updated(batch: Any, lr: float, step: int) -> None:
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        update(batch, lr, step)

    return killed_or_updated


if __name__ == "__main__":
    own = Path(sys.argv[2])
    for name, one in json.loads((own / "given.json").read_text()).items():
        with inside(one.pop("folder")):
            results[name] = trained(**one)
    write(discover(os.environ).rank)
