"""Horovod for users' own Keras 3 code.

    import hvdtrain.keras as hvd

gives the names of horovod.tensorflow and horovod.tensorflow.keras, which average correctly under Keras 3. TensorFlow
and Keras are imported when one of these names is first used, not with this package.
"""

import importlib
import itertools
import os
import sys
from typing import Any

from hvdtrain import installed
from hvdtrain.errors import KerasError

installed.refuse("numpy", "tensorflow", "keras", "horovod", "mpi4py")

MODULES = {
    "hvdtrain.keras.ranks": (
        "init", "DistributedOptimizer", "PartialDistributedOptimizer", "broadcast_variables",
        "allreduce", "allgather", "broadcast", "reducescatter",
    ),
    "hvdtrain.keras.averaging": ("DistributedGradientTape", "PartialDistributedGradientTape"),
    "hvdtrain.keras.callbacks": ("callbacks", "BroadcastCallback", "MetricAverageCallback", "WarmupCallback"),
    "hvdtrain.keras.fault_tolerance": ("FaultTolerance",),
    "hvdtrain.keras.global_batches": ("GlobalBatches",),
    "hvdtrain.keras.batch_norm": ("SyncBatchNormalization",),
    "hvdtrain.keras.horovod_names": ("load_model",),
    "horovod.tensorflow.keras.elastic": ("elastic",),
    "horovod.tensorflow": (
        "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size",
        "is_homogeneous", "rank_op", "size_op", "local_rank_op", "local_size_op", "start_timeline", "stop_timeline",
        "broadcast_object", "allgather_object", "alltoall", "join", "broadcast_global_variables",
        "grouped_allreduce", "grouped_allgather", "grouped_reducescatter",
        "Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression",
        "ProcessSet", "add_process_set", "remove_process_set", "global_process_set",
        "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built",
        "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built",
    ),
}  # fmt: skip
"""The names that this package offers, by the module that has them; a module may be one of them itself."""


def __getattr__(name: str) -> Any:
    path = next((path for path, names in MODULES.items() if name in names), "")
    if not path:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _choose_backend()
    # Wraps Keras's methods before a program takes one, as `fit` in `model.fit(hvd.GlobalBatches(...))`. Raises
    # EngineUnavailable where there is no Horovod.
    importlib.import_module(f"{__name__}.global_batches")
    module = importlib.import_module(path)
    globals()[name] = found = module if path.endswith(f".{name}") else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *itertools.chain(*MODULES.values())})


def _choose_backend() -> None:
    """Raises KerasError where Keras runs, or is set to run, on another backend than TensorFlow, or as Keras 2."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("true", "1"):
        raise KerasError(
            "TF_USE_LEGACY_KERAS makes tf.keras Keras 2, and hvdtrain.keras is for Keras 3: unset it, or import "
            "horovod.tensorflow.keras, of the Horovod that `python -m hvdtrain build` makes."
        )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if keras := sys.modules.get("keras"):
        backend = keras.config.backend()
    else:
        backend = os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        raise KerasError(
            f"Keras runs on {backend}, hvdtrain.keras needs it on TensorFlow; "
            "set KERAS_BACKEND=tensorflow before Keras is imported."
        )
