"""One rank of a proof: `horovodrun -np 2 python -m hvdtrain.tools.build.allreduce torch`."""

import importlib
import sys
from typing import Any

ELEMENTS = 1000


def proof_line(rank: int, size: int, controller: str) -> str:
    """What a rank prints once its sums are right."""
    return f"allreduce proved: rank {rank} of {size} over {controller}"


def main(framework: str) -> int:
    """Sums a vector over the ranks, over Gloo a second time after a new init; 1 where a value is wrong."""
    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    right = _sums_are_right(framework, hvd)
    rank, size, controller = hvd.rank(), hvd.size(), "mpi" if hvd.mpi_enabled() else "gloo"
    if right and controller == "gloo":  # Over MPI a shutdown finalises MPI, for good.
        hvd.shutdown()
        hvd.init()
        right = _sums_are_right(framework, hvd)
    if right:
        print(proof_line(rank, size, controller), flush=True)
    return 0 if right else 1


def _sums_are_right(framework: str, hvd: Any) -> bool:
    module = importlib.import_module(framework)
    vector = module.ones([ELEMENTS]) * float(hvd.rank() + 1)
    got = set(hvd.allreduce(vector, op=hvd.Sum, name="proof").numpy().tolist())
    expected = float(sum(range(1, hvd.size() + 1)))
    if got != {expected}:
        print(f"allreduce of rank {hvd.rank()} gave {sorted(got)[:3]}, not {expected}", flush=True)
    return got == {expected}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
