"""Horovod for users' own Keras 3 code.

    import hvdtrain.keras as hvd

gives the names of horovod.tensorflow and horovod.tensorflow.keras, right under Keras 3. The framework is imported with
the first of them, not with the package.
"""

import importlib
import os
import sys
from typing import Any

from hvdtrain import installed
from hvdtrain.errors import KerasError

installed.refuse("numpy", "tensorflow", "keras", "horovod", "mpi4py")

MODULES = {
    "init": "ranks",
    "DistributedOptimizer": "ranks",
    "DistributedGradientTape": "averaging",
    "broadcast_variables": "ranks",
    "BroadcastCallback": "callbacks",
    "MetricAverageCallback": "callbacks",
    "WarmupCallback": "callbacks",
    "FaultTolerance": "fault_tolerance",
    "GlobalBatches": "global_batches",
    "SyncBatchNormalization": "batch_norm",
}
AS_HOROVODS = {
    "PartialDistributedOptimizer": "ranks",
    "PartialDistributedGradientTape": "averaging",
    "load_model": "horovod_names",
    "allreduce": "ranks",
    "allgather": "ranks",
    "broadcast": "ranks",
    "reducescatter": "ranks",
}
"""Of this package too, and as Horovod's documentation describes them."""
HOROVODS_OWN = (
    "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size",
    "is_homogeneous", "rank_op", "size_op", "local_rank_op", "local_size_op", "start_timeline", "stop_timeline",
    "broadcast_object", "allgather_object", "alltoall", "join", "broadcast_global_variables",
    "grouped_allreduce", "grouped_allgather", "grouped_reducescatter",
    "Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression",
    "ProcessSet", "add_process_set", "remove_process_set", "global_process_set",
    "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built",
    "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built",
)  # fmt: skip
SUBMODULES = {"callbacks": "hvdtrain.keras.callbacks", "elastic": "horovod.tensorflow.keras.elastic"}


def __getattr__(name: str) -> Any:
    ours = MODULES | AS_HOROVODS
    if name not in ours and name not in HOROVODS_OWN and name not in SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _choose_backend()
    if name in SUBMODULES:
        return importlib.import_module(SUBMODULES[name])
    module = importlib.import_module(f"{__name__}.{ours.get(name, 'ranks')}")
    globals()[name] = found = getattr(module if name in ours else module.hvd, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES, *AS_HOROVODS, *HOROVODS_OWN, *SUBMODULES})


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
