"""What a framework and Horovod for it say of themselves: `python -m hvdtrain.doctor.framework torch`."""

import importlib
import json
import sys
from typing import Any

from hvdtrain.doctor.live import MARK


def main(name: str) -> None:
    """Prints, one mark a line, the framework's facts and then Horovod's: a crash leaves what came before it."""
    module = importlib.import_module(name)
    _say(version=module.__version__, **(_cuda(module) if name == "torch" else {}))
    hvd = importlib.import_module(f"horovod.{name}")
    _say(nccl_built=bool(hvd.nccl_built()))


def _cuda(torch: Any) -> dict[str, str]:
    cuda = torch.version.cuda or ""
    nccl = torch.cuda.nccl.version() if cuda and torch.distributed.is_nccl_available() else ()
    return {"cuda": cuda, "nccl": ".".join(map(str, nccl))}


def _say(**values: Any) -> None:
    print(MARK + json.dumps(values), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
