"""The model of a step in lab 5: its fit to a few measured points, and published runs to hold it against."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, PercentFormatter, ScalarFormatter
from numpy.typing import ArrayLike

from hvdtrain.tools.predict.scaling import BACKWARD, Numbers, StepModel, gain_of_halving  # noqa: F401  # the lab's own
from labtools.style import COLOURS

IMAGES = 10 * 1_281_167
"""What every run of JSC's series reads: 10 epochs of ImageNet."""
RESNET50_BYTES = 4 * 25_557_032
"""ResNet50's gradient in float32."""


class Run(NamedTuple):
    """A run of JSC's series, as published."""

    gpus: int
    batch: int
    """Images a GPU and step."""
    seconds: float

    @property
    def image_seconds(self) -> float:
        """Seconds in which one GPU does one image."""
        return self.gpus * self.seconds / IMAGES

    @property
    def step_seconds(self) -> float:
        """Seconds a step, with what the run does beside its steps spread over them."""
        return self.batch * self.image_seconds


# Jülich Supercomputing Centre's course: ResNet50, ImageNet, 10 epochs, Lightning DDP, A100s of JUWELS Booster.
JSC_ONE, JSC_NODE, JSC_NODES = Run(1, 256, 20531.9), Run(4, 128, 5355.9), Run(16, 128, 1488.2)


class Published(NamedTuple):
    """Efficiency against the one-GPU figure of the same series."""

    what: str
    gpus: int
    efficiency: float
    source: str


PUBLISHED = (
    *(
        Published("JSC, ResNet50", run.gpus, JSC_ONE.image_seconds / run.image_seconds, "JSC's course, from run times")
        for run in (JSC_ONE, JSC_NODE, JSC_NODES)
    ),
    Published("NERSC, ResNet50", 16, 0.81, "NERSC's SC20 tutorial: CIFAR-100, V100, batch 128 a GPU"),
    Published("Horovod, ResNet-101 and Inception V3", 128, 0.90, "Sergeev, Del Balso 2018, arXiv:1802.05799: about"),
    Published("Horovod, VGG-16", 128, 0.79, "Sergeev, Del Balso 2018, arXiv:1802.05799"),
)


def fit_laptop(ranks: Sequence[int], step_seconds: Sequence[float], gradient_bytes: float, cores: int) -> StepModel:
    """The model of ranks that share one machine's cores, from measured points, the first of them one rank.

    Two parameters: compute is the first point; seconds a byte from least squares over the others. Nothing is hidden:
    the cores that would compute meanwhile are those that add the gradients.
    """
    free = StepModel(step_seconds[0], gradient_bytes, 0.0, cores=cores)
    ring = replace(free, byte_seconds=1.0).allreduce(ranks)
    waited = np.asarray(step_seconds) - free.step(ranks)
    return replace(free, byte_seconds=max(0.0, float(ring @ waited / (ring @ ring))))


def through_jsc(network: float, hidden: float) -> StepModel:
    """The model that passes through JSC's runs on one node and on four, both of batch 128.

    `network`, in [0, 1], is the fraction of the time lost between the two that the network takes; drag takes the rest.
    `hidden` is the fraction of compute behind which an allreduce hides.
    """
    few, many = JSC_NODE, JSC_NODES
    lost = many.step_seconds - few.step_seconds
    drag = (1 - network) * lost / (many.gpus - few.gpus)
    compute = few.step_seconds - drag * few.gpus
    model = StepModel(compute, RESNET50_BYTES, 1.0, hidden=hidden, drag=drag, node=few.gpus)
    allreduce = network * lost + hidden * compute if network else 0.0
    return replace(model, byte_seconds=allreduce / float(model.allreduce(many.gpus)))


def jsc_efficiency(model: StepModel, gpus: ArrayLike) -> Numbers:
    """Efficiency against JSC's one GPU, whose batch was 256."""
    return JSC_NODE.batch * JSC_ONE.image_seconds / model.step(gpus)


def jsc_band(gpus: ArrayLike) -> tuple[Numbers, Numbers]:
    """The lowest and highest efficiency of all models through JSC's points: any `network`, any `hidden`."""
    networks, hiddens = np.linspace(0, 1, 21), (0, BACKWARD / 2, BACKWARD)
    curves = [jsc_efficiency(through_jsc(network, hidden), gpus) for network in networks for hidden in hiddens]
    return np.min(curves, axis=0), np.max(curves, axis=0)


def draw_laptop(axes: Axes, model: StepModel, ranks: Sequence[int], step_seconds: Sequence[float]) -> None:
    """Measured efficiency over ranks on one machine, the model's, and its prediction with a core for each rank."""
    few = 2.0 ** np.linspace(0, 4, 161)
    apart = replace(model, cores=math.inf)
    axes.plot(few, apart.efficiency(few), "--", color=COLOURS["green"], label="model, a core for each rank")
    axes.plot(few, model.efficiency(few), color=COLOURS["blue"], label=f"model, {model.cores:g} cores for all ranks")
    measured = step_seconds[0] / np.asarray(step_seconds)
    axes.plot(ranks, measured, "o", color=COLOURS["vermillion"], markersize=12, label="measured here")
    _efficiency_axes(axes, "Number of ranks", 16)
    axes.legend(loc="upper right")


def draw_published(axes: Axes) -> None:
    """The models through JSC's points to 1,024 GPUs, as a band between its two explanations, and published points."""
    gpus = 2.0 ** np.linspace(0, 10, 401)
    axes.fill_between(gpus, *jsc_band(gpus), color=COLOURS["sky"], alpha=0.3, linewidth=0, label="all that fit JSC's")
    network, drag = through_jsc(1, BACKWARD), through_jsc(0, BACKWARD)
    axes.plot(gpus, jsc_efficiency(network, gpus), color=COLOURS["blue"], label="the network's fault")
    axes.plot(gpus, jsc_efficiency(drag, gpus), "--", color=COLOURS["vermillion"], label="the fixed part's fault")
    whats = dict.fromkeys(point.what for point in PUBLISHED)
    for what, marker, colour in zip(whats, "osD^", ("black", "green", "purple", "orange"), strict=True):
        points = [(point.gpus, point.efficiency) for point in PUBLISHED if point.what == what]
        axes.plot(*zip(*points, strict=True), marker, color=COLOURS[colour], markersize=11, label=what)
    _efficiency_axes(axes, "Number of GPUs", 1024)
    axes.legend(loc="lower left", fontsize=13)


def draw_recorded(axes: Axes) -> None:
    """JSC's runs on a cluster where every rank has a GPU of its own: images a second, beside N times one GPU."""
    runs = (JSC_ONE, JSC_NODE, JSC_NODES)
    gpus, speed = [run.gpus for run in runs], [1 / run.image_seconds for run in runs]
    axes.plot(gpus, [speed[0] * number for number in gpus], "--", color=COLOURS["black"], label="N times one GPU")
    axes.plot(gpus, [number * each for number, each in zip(gpus, speed, strict=True)], "o-", color=COLOURS["blue"],
              markersize=10, label="JSC: ResNet50, ImageNet, A100")  # fmt: skip
    for number, each in zip(gpus, speed, strict=True):
        note = f"{number * each:,.0f} ({each / speed[0]:.0%})"
        axes.annotate(note, (number, number * each), (12, -20), textcoords="offset points")
    axes.set(xlabel="Number of GPUs", ylabel="Throughput / (images/s)", xticks=gpus, xlim=(0, 20), ylim=(0, None))
    axes.legend(loc="upper left")


def _efficiency_axes(axes: Axes, label: str, most: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**k for k in range(most.bit_length())])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 1.1)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    axes.set(xlabel=label, ylabel="Efficiency / %")
