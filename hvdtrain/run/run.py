"""A run: everything an adapter needs to train, and what of it rank 0 writes down."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain import datasets
from hvdtrain.core.compatibility import Framework
from hvdtrain.core.plan import Plan
from hvdtrain.core.progress import Progress
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.settings import Intervals
from hvdtrain.core.sharing import Totals, check_finite
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import agreement
from hvdtrain.ranks.world import World
from hvdtrain.record import trackers
from hvdtrain.record.folder import Identity, ResumePoint, RunFolder, folder_name
from hvdtrain.record.journal import Journal
from hvdtrain.record.reporter import OF_PROGRAMS, Events, Reporter
from hvdtrain.record.trackers import Trackers
from hvdtrain.terminal import SCREEN


@dataclass(frozen=True)
class BaseRun:
    """What the loop's hooks need; `world` is the ranks of the run, as this one knows them."""

    identity: Identity
    intervals: Intervals
    engine: str
    devices: tuple[str, ...]
    """Of an engine of one process that takes several; () elsewhere."""
    folder: RunFolder | None
    """Rank 0's alone."""
    resume: ResumePoint
    """Rank 0's; elsewhere there is no checkpoint."""
    world: World
    journal: Journal
    """Rank 0's records of this launch, and every rank's clock."""
    trackers: tuple[str, ...] = field(default=("tensorboard",), kw_only=True)
    """Their names."""

    @property
    def topology(self) -> Topology:
        return self.world.topology

    def reporter(
        self, step: int, device: object, events: Callable[[Path, int], Events], notes: tuple[str, ...]
    ) -> Reporter | None:
        """Rank 0's log, with what the run is and the engine's notes in it; None elsewhere. `events` makes, for the run
        folder and the step to come, the writer of TensorBoard's events."""
        if not self.folder:
            return None
        folder, topology = self.folder.path, self.topology
        curves = events(folder, step + 1) if "tensorboard" in self.trackers else None
        reporter = Reporter(folder, curves, step, trackers=self._start_trackers(folder), **self._log())
        on = ",".join(self.devices) or str(device).strip("/").lower()
        where = f"{topology.size} ranks, {topology.launcher}, {self.engine} on {on} ({self.identity.framework})"
        for line in (*self.identity.lines, f"ranks       {where}", f"output      {folder}", *notes, *self.resume.notes):
            reporter.note(line)
        return reporter

    def agreed(self) -> dict[str, Any]:
        """What must be equal on all ranks and may change; see `hvdtrain.ranks.agreement`."""
        return {}

    def check_finite(self, totals: Totals, step: int) -> None:
        """Raises DivergedError where the loss of all ranks is no longer a number."""
        raise NotImplementedError

    def metadata(
        self, progress: Progress, scaler: dict[str, Any], optimizer: Mapping[str, Any], valid_score: float | None
    ) -> dict[str, Any]:
        """A checkpoint's `meta`: all of the state that is no array. `scaler` and `optimizer` are empty where there is
        none."""
        return {
            **progress.metadata(),
            "framework": self.identity.framework,
            "model": self.identity.model,
            "recipe": self.identity.name,
            "ranks": self.topology.size,
            "scaler": scaler,
            "optimizer": dict(optimizer),
            "data": self.identity.contents,
            "valid_score": valid_score,
        }

    def finish(self, reporter: Reporter | None, step: int, *, is_over: bool) -> None:
        """Rank 0's last lines of the log; `is_over`: whether no epoch is left."""
        if reporter and self.folder and not is_over:
            self.folder.write_status("stopped", step=step)
            reporter.note(
                f"left at step {step} with epochs to go: the same command trains on. To end a run for good, call "
                'run.stop("why") in its last epoch.'
            )
        elif reporter and self.folder:
            self.folder.write_status("finished", step=step)
            self.journal.is_finished = True
            reporter.note(f"finished at step {step}; everything is in {self.folder.path}")

    def _start_trackers(self, folder: Path) -> Trackers:
        about = trackers.metadata(self.topology, self.identity.framework, self.engine, **self._described())
        project = folder_name(self.identity.name.partition(":")[0])
        return Trackers(self.trackers, folder, project, about, resumes=self.resume.checkpoint is not None)

    def _described(self) -> dict[str, Any]:
        """What is trained, for the trackers."""
        return {"model": self.identity.model}

    def _log(self) -> dict[str, Any]:
        """How its log is: more keywords of a Reporter."""
        return {"words": OF_PROGRAMS}


@dataclass(frozen=True)
class Run(BaseRun):
    """A recipe's run: everything an adapter needs."""

    recipe: Recipe
    dataset: datasets.Dataset
    plan: Plan

    @property
    def framework(self) -> Framework:
        return self.identity.framework

    def given(self) -> dict[str, Any]:
        """What must be equal on all ranks from the start."""
        return agreement.of_plan(self.plan, self.identity.contents) | {"recipe: engine": self.engine}

    def check_finite(self, totals: Totals, step: int) -> None:
        check_finite(totals, step, self.plan.peak_lr)

    def _described(self) -> dict[str, Any]:
        return {"recipe": self.recipe.model_dump(mode="json"), "plan": self.plan.to_json()}

    def _log(self) -> dict[str, Any]:
        return {"valid_examples": self.plan.valid_examples, "screen": SCREEN}
