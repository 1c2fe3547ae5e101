"""`python -m hvdtrain lr-range RECIPE`: the loss while the LR rises step by step, on any number of ranks."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import Field

from hvdtrain import files
from hvdtrain.core import flags
from hvdtrain.core import recipe as recipes
from hvdtrain.core.compatibility import Framework
from hvdtrain.core.metrics import Totals
from hvdtrain.core.progress import Progress
from hvdtrain.core.schedule import Plateau, Schedule
from hvdtrain.engines import frameworks, registry
from hvdtrain.errors import DivergedError, RecipeError
from hvdtrain.record.folder import folder_name
from hvdtrain.run import main as runs
from hvdtrain.run.loop import Loop
from hvdtrain.run.options import OPTIONS, parse_flags, usage
from hvdtrain.run.process import WITHOUT_REPORT
from hvdtrain.run.run import Run
from hvdtrain.terminal import SCREEN
from hvdtrain.tools.bench.measure import Figure, page

PROG = "python -m hvdtrain lr-range"
PAGE = "lr-range.html"
TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
SMOOTHED, EXPLODED = 0.9, 4.0
"""How much of the mean loss each step keeps; the sweep ends where that is so many times the lowest."""
LR = Annotated[float, Field(gt=0, le=1e38)]


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """The flags of `lr-range` itself, beside those of a run."""

    low: LR = Field(1e-6, description="the LR of the first step")
    high: LR = Field(10.0, description="the LR of the last step")
    steps: Annotated[int, Field(ge=10, le=10**6)] = Field(100, description="the number of steps")
    framework: Framework | None = Field(
        None, description="what trains; left out: what the model is of, torch where both have it"
    )


OWN = flags.fields_of(Options)


@dataclasses.dataclass(frozen=True)
class Sweep(Schedule):
    """An LR that rises by the same factor in each step. Smith 2017, arXiv:1506.01186, section 3.3, has it rise by the
    same difference."""

    low: float = 0.0
    high: float = 0.0
    steps: int = 2

    def lr(self, epoch: float, plateau: Plateau | None = None) -> float:
        done = round(epoch * self.steps_per_epoch)
        return float(self.low * (self.high / self.low) ** (done / (self.steps - 1)))


@dataclasses.dataclass
class Found:
    """The steps of a sweep: their LRs, and their losses over all ranks."""

    rates: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)

    @property
    def smoothed(self) -> NDArray[np.float64]:
        """The losses' moving average, without the bias of its beginning."""
        means, mean = [], 0.0
        for step, loss in enumerate(self.losses, 1):
            mean = SMOOTHED * mean + (1 - SMOOTHED) * loss
            means.append(mean / (1 - SMOOTHED**step))
        return np.array(means)

    @property
    def has_exploded(self) -> bool:
        mean = self.smoothed
        return bool(mean[-1] > EXPLODED * mean.min() > 0)

    def sentence(self, per_base: float) -> str:
        """What the sweep shows; `per_base`: the LR over the recipe's base_lr."""
        mean, first = self.smoothed, np.array(self.losses[: max(5, len(self.losses) // 10)])
        begin, lowest, last = float(first.mean()), int(mean.argmin()), f"LR {self.rates[-1]:.3g}"
        if begin - mean[lowest] <= first.std():
            return f"The loss has not fallen by more than chance up to {last}: give another --low and --high."
        half = int((mean < (begin + mean[lowest]) / 2).argmax())
        best = self.rates[lowest]
        text = f"The loss has made half of its fall at LR {self.rates[half]:.3g} and is lowest at {best:.3g}"
        if lowest == len(mean) - 1:
            return f"{text}, where the sweep ends: go on with a larger --high."
        base = f" (--lr {best / 10 / per_base:.3g})" if per_base != 1 else ""
        return f"{text}: a tenth of that, {best / 10:.3g}{base}, is a first guess for the peak LR."


def main(argv: Sequence[str]) -> int:
    """Sweeps the LR on this rank; rank 0 writes the page. Raises HvdtrainError."""
    if {"-h", "--help"} & set(argv[:1]) or not argv:
        own = [f"  --{name}\n      {field.description} (default: {field.default})" for name, field in OWN.items()]
        print(f"{usage(PROG)};\n         those of a run, and of lr-range alone:\n", *own, sep="\n")
        return 0 if argv else 2
    name, given = parse_flags(PROG, argv, {**OPTIONS, **OWN}, groups={"lr-range": tuple(OWN)})
    options = Options(**{key: given[key] for key in OWN if key in given})
    if options.low >= options.high:
        raise RecipeError(f"--low must be less than --high={options.high:g}, got {options.low:g}.")
    of_recipe = {key: value for key, value in given.items() if key not in {**OPTIONS, **OWN}}
    framework = options.framework or frameworks.framework_of(recipes.load(name, of_recipe))
    os.environ.update(WITHOUT_REPORT)
    output = given.get("output") or Path("runs", f"lr-range-{folder_name(name)}")
    fixed = {"output": output, "max_steps": options.steps, "log_every_steps": 1, "resume": "never", "tracker": "none"}
    words = [word for key, value in fixed.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return runs.main(framework, [*_without_own(argv), *words], lambda run: _sweep(run, framework, options))


def _without_own(argv: Sequence[str]) -> list[str]:
    """The command line without the flags of OWN, each of which has a value."""
    words, found = list(argv), list[str]()
    while words:
        word = words.pop(0)
        flag, equals, _ = word.partition("=")
        if flag.startswith("--") and flag[2:] in OWN:
            del words[: not equals]
        else:
            found.append(word)
    return found


def _sweep(prepared: Run, framework: Framework, options: Options) -> None:
    run, found = _swept(prepared, options), Found()
    with runs.importing(run, TITLES[framework]):
        module = registry.module(framework, "trainer")
    with module.engine_of(run) as engine:
        loop: Any = Loop(run, module.Trainer(run, engine))
        with loop.reported():
            try:
                _train(loop, found)
            except DivergedError:
                if not found.losses:
                    raise
            loop.progress.ended = "the sweep is over"
    if run.folder and found.losses:
        peak = prepared.plan.schedule.peak_lr / prepared.recipe.base_lr
        sentence = found.sentence(peak)
        SCREEN.print(f"INFO - {sentence}")
        SCREEN.print(f"INFO - {_write(run, found, sentence)}")


def _swept(run: Run, options: Options) -> Run:
    """The run with the sweep in place of its schedule, and as many epochs as that needs."""
    plan, peak = run.plan, run.plan.schedule.peak_lr
    epochs = options.steps // plan.steps_per_epoch + 1
    schedule = Sweep(peak, plan.steps_per_epoch, epochs, low=options.low, high=options.high, steps=options.steps)
    recipe = plan.recipe.model_copy(update={"epochs": epochs})
    plan = dataclasses.replace(plan, recipe=recipe, schedule=schedule)
    text = f"LR          from {options.low:g} to {options.high:g} in {options.steps} steps, by the same factor in each"
    shown = (text if line.startswith("LR ") else line for line in run.identity.lines)
    lines = tuple(line for line in shown if not line.startswith(("steps ", "best ", "stop ")))
    return dataclasses.replace(run, plan=plan, identity=dataclasses.replace(run.identity, lines=lines))


def _train(loop: Any, found: Found) -> None:
    """Makes the steps of the sweep, until the loss explodes. Every rank has the same losses."""
    while len(found.losses) < loop.plan.schedule.steps:
        for _ in loop.epoch():
            found.rates.append(loop.plan.schedule.lr((loop.progress.step - 1) / loop.plan.steps_per_epoch))
            found.losses.append(loop.progress.train.mean_loss)
            loop.progress.train = Totals(0.0, 0.0)
            if found.has_exploded:
                return
        loop.progress = Progress(loop.progress.step, loop.progress.epoch + 1)


def _write(run: Run, found: Found, sentence: str) -> Path:
    """Writes the values and the page into the run folder; the path of the page. Raises EngineUnavailable."""
    assert run.folder
    values = {"lr": found.rates, "loss": found.losses}
    files.write(run.folder.path / "lr-range.json", json.dumps(values))
    curves = {"each step": found.losses, "smoothed": found.smoothed.tolist()}
    lines = {name: {lr: [loss] for lr, loss in zip(found.rates, of, strict=True)} for name, of in curves.items()}
    figure = Figure(lines, "LR", "loss", base=10)
    files.write(run.folder.path / PAGE, page(f"lr-range {run.recipe.name}", sentence, figure, run.identity.lines))
    return run.folder.path / PAGE
