"""Horovod for users' own Keras 3 code.

    import hvdtrain.keras as hvd

gives Horovod's names, right under Keras 3. The framework is imported with the first of them, not with the package.
"""

import importlib
import os
import sys
from typing import Any

from hvdtrain import shadows
from hvdtrain.errors import KerasError

shadows.refuse("numpy", "tensorflow", "keras", "horovod", "mpi4py")

MODULES = {
    "init": "ranks",
    "DistributedOptimizer": "optimizer",
    "DistributedGradientTape": "optimizer",
    "broadcast_variables": "ranks",
    "BroadcastCallback": "callbacks",
    "MetricAverageCallback": "callbacks",
    "WarmupCallback": "callbacks",
    "FaultTolerance": "fault_tolerance",
    "GlobalBatches": "global_batches",
    "SyncBatchNormalization": "batch_norm",
}
HOROVODS_OWN = (
    "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size",
    "allreduce", "allgather", "broadcast", "broadcast_object", "allgather_object",
    "Average", "Sum", "Adasum", "Min", "Max", "Compression",
    "ProcessSet", "add_process_set", "global_process_set",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in MODULES and name not in HOROVODS_OWN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _choose_backend()
    module = importlib.import_module(f"{__name__}.{MODULES.get(name, 'ranks')}")
    globals()[name] = found = getattr(module if name in MODULES else module.hvd, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES, *HOROVODS_OWN})


def _choose_backend() -> None:
    """Raises KerasError where Keras runs, or is set to run, on another backend than TensorFlow."""
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
