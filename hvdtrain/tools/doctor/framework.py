"""Prints what a framework and Horovod for it are: `python -m hvdtrain.tools.doctor.framework torch`."""

import importlib
import importlib.metadata
import json
import sys
from typing import Any

MARK = "hvdtrain-doctor "
NO_KERAS = "none"


def imported(name: str) -> tuple[Any, Any]:
    """The framework and Horovod for it. Prints what each is as soon as it is there: a crash leaves the first."""
    module = importlib.import_module(name)
    emit(version=module.__version__, **(_cuda(module) if name == "torch" else _keras(module)))
    hvd = importlib.import_module(f"horovod.{name}")
    emit(nccl_built=bool(hvd.nccl_built()))
    return module, hvd


def emit(**values: Any) -> None:
    """Prints the values for the doctor, among whatever else a library prints."""
    print(MARK + json.dumps(values), flush=True)


def _cuda(torch: Any) -> dict[str, str]:
    cuda = torch.version.cuda or ""
    nccl = torch.cuda.nccl.version() if cuda and torch.distributed.is_nccl_available() else ()
    return {"cuda": cuda, "nccl": ".".join(map(str, nccl))}


def _keras(tensorflow: Any) -> dict[str, str]:
    try:
        keras = tensorflow.keras
        return {"keras": importlib.metadata.version("keras" if hasattr(keras, "ops") else "tf_keras")}
    except ImportError:  # TF_USE_LEGACY_KERAS is set
        return {"keras": NO_KERAS}


if __name__ == "__main__":
    imported(sys.argv[1])
