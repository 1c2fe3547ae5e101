"""The flags and files of `python -m hvdtrain predict`, and the model of a step that they make."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from hvdtrain.core import plan as plans
from hvdtrain.core import recipe as recipes
from hvdtrain.core.flags import Flag
from hvdtrain.engines import frameworks
from hvdtrain.errors import RecipeError
from hvdtrain.files import read_bytes
from hvdtrain.run.setup import load_dataset
from hvdtrain.tools.bench.measure import MOST_RANKS, RankCount
from hvdtrain.tools.predict.scaling import NOISE, Point, Points, StepModel
from hvdtrain.untrusted import quoted

MOST_POINTS = 32  # each of them, and each requested number of ranks, takes a fit
LEAST, MOST = 1e-9, 1e12  # bounds of seconds, megabytes, ... beyond all real ones, whose products are still finite
MOST_BYTES = 2**20  # of a file of points
WORST_MISFIT = 0.25

Count = Annotated[int, Field(ge=1, le=int(MOST))]
Positive = Annotated[float, Field(ge=LEAST, le=MOST)]
NotNegative = Annotated[float, Field(ge=0, le=MOST)]


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Predicts time, throughput and efficiency on N ranks.

    From measured runs: --point 4:5355.9 --point 16:1488.2 (ranks:seconds for the same work, each
    rank with the same batch), or --from the JSON of `bench scaling`. Or from --step-seconds,
    --gradient-mb and --link-gbit.
    """

    point: Annotated[tuple[str, ...], Flag(help="ranks:seconds of a run; twice or more", is_repeated=True)] = ()
    from_file: Annotated[
        Path | None, Flag(name="from", help="scaling.json, of bench scaling --output", metavar="FILE")
    ] = None
    ranks: Annotated[str | None, Flag("as 32,64,128; left out: powers of two", metavar="N,N")] = None
    ranks_per_node: Annotated[Count | None, Flag("left out: the fewest ranks of a point, else 1", metavar="N")] = None
    cores: Annotated[Count | None, Flag("that all ranks share; left out: enough", metavar="N")] = None
    fixed_seconds: Annotated[
        NotNegative | None,
        Flag("of a run, the same whatever the ranks; left out: not known", metavar="S"),
    ] = None
    examples: Annotated[Count | None, Flag("that a run reads, all epochs together", metavar="N")] = None
    batch: Annotated[Count | None, Flag("examples a rank and step", metavar="N")] = None
    step_seconds: Annotated[Positive | None, Flag("of one rank alone", metavar="S")] = None
    gradient_mb: Annotated[Positive | None, Flag("4 bytes a parameter; 1e6 bytes", metavar="MB")] = None
    recipe: Annotated[str | None, Flag("in place of --gradient-mb: the recipe whose gradients are communicated")] = None
    link_gbit: Annotated[Positive | None, Flag("of a node, each way; 1e9 bits/s", metavar="GBIT")] = None
    latency_us: Annotated[NotNegative, Flag("of a message between nodes", metavar="US")] = 0.0
    node_gbit: Annotated[Positive | None, Flag("of a rank inside its node; left out: free")] = None
    overlap: Annotated[
        Annotated[float, Field(ge=0, le=1)] | None,
        Flag("part of a step behind which the allreduce hides; left out: 0 to 2/3"),
    ] = None
    fusion_mb: Annotated[
        Positive | None, Flag("buffers of this size, the last never hidden; left out: one, hidden")
    ] = None
    json: Annotated[bool, Flag("print JSON alone")] = False
    picture: Annotated[Path | None, Flag("draw efficiency over ranks", metavar="FILE.html")] = None


@dataclasses.dataclass(frozen=True)
class Task:
    """A prediction to make: the model, the ranks, and the units of the result."""

    model: Points
    ranks: tuple[int, ...]
    per_second: float
    """The throughput of a run that takes one second."""
    unit: str
    steps: float | None
    """The steps that one rank alone makes; None where they are not known."""
    whole_run: bool
    """Whether seconds are those of a whole run, or of the work of one step of one rank."""

    @property
    def against(self) -> Point:
        """The point that efficiency is against: that of the fewest ranks, or one rank."""
        return self.model.points[0]

    @property
    def measured(self) -> bool:
        """Whether there are points to compare with, or only a step and a link."""
        return len(self.model.points) > 1


class Scaling(BaseModel):
    """The JSON of `bench scaling`; `weak` has the seconds of a step by ranks and round."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    batch: Annotated[int, Field(ge=1, le=10**9)]
    cores: Annotated[int, Field(ge=1, le=10**6)] | None
    ranks_per_node: RankCount
    weak: Annotated[
        dict[Annotated[RankCount, Field(strict=False)], Annotated[list[Positive], Field(min_length=1)]],
        Field(max_length=MOST_POINTS),
    ]


def task_of(options: Options) -> Task:
    """The prediction that the options describe. Raises RecipeError where they break a rule."""
    if options.recipe is not None:
        if options.gradient_mb is not None:
            raise RecipeError("--recipe and --gradient-mb exclude each other; give one of them.")
        recipe = recipes.load(options.recipe)
        framework = frameworks.framework_of(recipe)
        dataset = load_dataset(recipe, framework)
        plan = plans.make(recipe, 1, dataset, frameworks.network_of(recipe, framework, dataset))
        options = dataclasses.replace(options, gradient_mb=plan.gradient_bytes / 1e6)
    measured = bool(options.point or options.from_file)
    if measured and options.step_seconds is not None:
        raise RecipeError("--step-seconds and measured points exclude each other; give one of them.")
    if options.point and options.from_file:
        raise RecipeError("--from has points of its own; give --point or --from.")
    if options.from_file:
        return _from_file(options, options.from_file)
    if measured:
        points = parse_points(options.point)
        for few, many in itertools.pairwise(points):
            enough_cores = options.cores is None or many.ranks <= options.cores
            if many.seconds >= few.seconds and enough_cores and options.link_gbit is None:
                raise RecipeError(
                    f"--point: {many.ranks} ranks take {many.seconds:g} s, no less than {few.ranks} with "
                    f"{few.seconds:g} s; give the seconds for the same work, or give --link-gbit where the network is "
                    "that slow."
                )
        return _from_points(options, points, NOISE, options.fixed_seconds)
    return _from_step(options)


def parse_points(texts: Sequence[str]) -> tuple[Point, ...]:
    """The points of texts as ranks:seconds, by ranks. Raises RecipeError."""
    points = []
    if len(texts) > MOST_POINTS:
        raise RecipeError(f"--point must be given at most {MOST_POINTS} times, got {len(texts)}.")
    for text in texts:
        ranks, _, seconds = text.partition(":")
        try:
            points.append(Point(int(ranks), float(seconds)))
        except ValueError:
            raise RecipeError(f"--point must read like 4:5355.9 (ranks:seconds), got {quoted(text)}.") from None
        if not (1 <= points[-1].ranks <= MOST_RANKS and LEAST <= points[-1].seconds <= MOST):
            raise RecipeError(
                f"--point must have 1 to {MOST_RANKS} ranks and {LEAST:g} to {MOST:g} seconds, got {quoted(text)}."
            )
    points.sort()
    for few, many in itertools.pairwise(points):
        if few.ranks == many.ranks:
            raise RecipeError(
                f"--point gives {few.ranks} ranks twice; give each number once, with the median of its runs."
            )
    if len(points) == 1:
        raise RecipeError(
            "--point must be given at least twice, got 1; or give --step-seconds, --gradient-mb and --link-gbit."
        )
    return tuple(points)


def _ranks(options: Options, fewest: int) -> tuple[int, ...]:
    if options.ranks is None:
        first = 2 ** max(0, math.ceil(math.log2(fewest)))
        return tuple(n for n in (first * 2**k for k in range(1, 8)) if n <= MOST_RANKS) or (MOST_RANKS,)
    try:
        ranks = tuple(sorted({int(number) for number in options.ranks.split(",")}))
    except ValueError:
        raise RecipeError(f"--ranks must read like 32,64,128, got {quoted(options.ranks)}.") from None
    bad = next((n for n in ranks if not 1 <= n <= MOST_RANKS), None)
    if bad is not None:
        raise RecipeError(f"--ranks must lie in [1, {MOST_RANKS}], got {quoted(bad)}.")
    if len(ranks) > MOST_POINTS:
        raise RecipeError(f"--ranks must be at most {MOST_POINTS} numbers, got {len(ranks)}.")
    return ranks


def _from_points(options: Options, points: tuple[Point, ...], noise: float, fixed: float | None) -> Task:
    cores = options.cores or math.inf
    if fixed is not None and fixed >= points[-1].seconds:
        raise RecipeError(
            f"--fixed-seconds must be less than the {points[-1].seconds:g} s of a whole run, got {fixed:g}."
        )
    steps = options.examples / options.batch if options.examples and options.batch else None
    node = options.ranks_per_node or points[0].ranks
    link = None
    if options.link_gbit is not None:
        if steps is None or options.gradient_mb is None:
            raise RecipeError(
                "--link-gbit beside points needs --gradient-mb, --batch and --examples, to know how often the "
                "gradients are communicated."
            )
        link = _network(options, node)
    elif options.overlap is not None:
        raise RecipeError("--overlap beside points needs --link-gbit; without it only the points are used.")
    model = Points(points, node, cores, fixed, link, steps or 1.0, options.overlap, noise)
    if model.misfit > WORST_MISFIT:
        raise RecipeError(
            f"--point: the nearest fit misses a point by {min(1.0, model.misfit):.0%}; give seconds of the same work, "
            "each rank with the same batch."
        )
    per_second, unit = (options.examples, "examples/s") if options.examples else (3600.0, "runs/h")
    return Task(model, _ranks(options, points[-1].ranks), per_second, unit, steps, whole_run=True)


def _from_file(options: Options, path: Path) -> Task:
    try:
        found = Scaling.model_validate_json(read_bytes(path, MOST_BYTES))
    except OSError as error:
        raise RecipeError(f"--from must name the JSON of bench scaling, got {path}: {error.strerror}.") from None
    except ValueError:  # of the JSON, or of a number in it
        raise RecipeError(
            f"--from must name the JSON of bench scaling with its weak part, got {path}; make one with: "
            "python -m hvdtrain bench scaling --output DIR"
        ) from None
    middle = {n: statistics.median(times) for n, times in found.weak.items()}
    spread = max(((max(times) - min(times)) / 2 / middle[n] for n, times in found.weak.items()), default=0.0)
    if len(middle) < 2:
        raise RecipeError(f"--from needs at least two numbers of ranks, {path} has {len(middle)}; bench more of them.")
    points = tuple(Point(n, seconds / n) for n, seconds in sorted(middle.items()))
    of_a_step = dataclasses.replace(
        options,
        batch=found.batch,
        examples=found.batch,
        cores=options.cores or found.cores,
        ranks_per_node=options.ranks_per_node or found.ranks_per_node,
    )
    task = _from_points(of_a_step, points, max(NOISE, spread), 0.0)
    return dataclasses.replace(task, whole_run=False)


def _from_step(options: Options) -> Task:
    wanted = ("step_seconds", "gradient_mb", "link_gbit")
    lacks = ["--" + name.replace("_", "-") for name in wanted if getattr(options, name) is None]
    if lacks or options.step_seconds is None:
        raise RecipeError(
            f"nothing to predict from: give --point RANKS:SECONDS twice, or --from FILE, or add {', '.join(lacks)}."
        )
    batch, fixed = options.batch or 1, options.fixed_seconds or 0.0
    of_a_run = dataclasses.replace(options, batch=batch, examples=options.examples or batch)
    alone = Point(1, (options.examples or batch) / batch * options.step_seconds + fixed)
    task = _from_points(of_a_run, (alone,), NOISE, fixed)
    unit = task.unit if options.batch or options.examples else "rank-steps/s"
    return dataclasses.replace(task, unit=unit, whole_run=options.examples is not None)


def _network(options: Options, node: int) -> StepModel:
    assert options.gradient_mb is not None
    assert options.link_gbit is not None
    return StepModel(
        0.0,
        1e6 * options.gradient_mb,
        8e-9 / options.link_gbit,
        message_seconds=1e-6 * options.latency_us,
        node=node,
        cores=options.cores or math.inf,
        node_byte_seconds=8e-9 / options.node_gbit if options.node_gbit else 0.0,
        fusion_bytes=1e6 * options.fusion_mb if options.fusion_mb else math.inf,
    )
