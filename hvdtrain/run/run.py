"""A run: everything an adapter needs to train, and what of it rank 0 writes down."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain import datasets
from hvdtrain.core.compatibility import Framework
from hvdtrain.core.plan import Plan
from hvdtrain.core.progress import Progress
from hvdtrain.core.recipe import Recipe
from hvdtrain.launch.topology import Topology
from hvdtrain.run import folder as folders
from hvdtrain.run.folder import ResumePoint, RunFolder
from hvdtrain.run.reporter import Events, Reporter
from hvdtrain.run.world import World


@dataclass(frozen=True)
class Run:
    """Everything an adapter needs; `world` is the ranks of the run, as this one knows them."""

    framework: Framework
    recipe: Recipe
    engine: str
    devices: tuple[str, ...]
    """Of an engine of one process that takes several; () elsewhere."""
    topology: Topology
    dataset: datasets.Dataset
    plan: Plan
    folder: RunFolder | None
    """Rank 0's alone."""
    resume: ResumePoint
    """Rank 0's; elsewhere there is no checkpoint."""
    world: World

    def reporter(
        self, step: int, device: object, events: Callable[[Path, int], Events], notes: tuple[str, ...]
    ) -> Reporter | None:
        """Rank 0's log, with the plan and the engine's notes in it; None elsewhere. `events` makes, for the run folder
        and the step to come, the writer of TensorBoard's events."""
        if not self.folder:
            return None
        folder = self.folder.path
        # Open MPI gives its ranks a terminal of their own, wherever their output goes in the end.
        live = sys.stdout.isatty() and self.topology.launcher != "mpirun"
        reporter = Reporter(folder, events(folder, step + 1), self.plan, step, live)
        on = ",".join(self.devices) or str(device).strip("/").lower()
        where = f"{self.topology.size} ranks, {self.topology.launcher}, {self.engine} on {on} ({self.framework})"
        for line in (*self.plan.lines(), f"ranks       {where}", f"output      {folder}", *notes, *self.resume.notes):
            reporter.note(line)
        return reporter

    def metadata(
        self, progress: Progress, scaler: dict[str, Any], optimizer: Mapping[str, Any], valid_score: float | None
    ) -> dict[str, Any]:
        """A checkpoint's `meta`: all of the state that is no array. `scaler` and `optimizer` are empty where there is
        none."""
        return {
            **progress.metadata(),
            "framework": self.framework,
            "model": folders.model_identity(self.plan),
            "recipe": self.recipe.name,
            "ranks": self.topology.size,
            "scaler": scaler,
            "optimizer": dict(optimizer),
            "valid_score": valid_score,
        }

    def finish(self, reporter: Reporter | None, step: int, line: tuple[float, float] | None) -> None:
        """Rank 0's last lines of the log; `line` is the fitted slope and intercept of a linear model."""
        if not (reporter and self.folder):
            return
        if line:
            reporter.note(f"fitted line: y = {line[0]:.4f} x + {line[1]:.4f}")
        self.folder.write_status("finished", step=step)
        reporter.note(f"finished at step {step}; everything is in {self.folder.path}")
