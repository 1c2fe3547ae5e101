"""Ranks that measure: started on this machine, or by the launcher of this process; and what rank 0 found."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import EngineUnavailable
from hvdtrain.tools.bench.engines import reason

KEPT = "HVDTRAIN_BENCH_KEPT"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}


def launch(program: Sequence[str], engine: str, ranks: int, *flags: str) -> dict[str, Any]:
    """Starts `python -m program` on so many local ranks and waits; what rank 0 kept.

    `flags` are for horovodrun. Raises EngineUnavailable with what the ranks printed where they fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "kept.json")
        done = subprocess.run(
            [*_launcher(engine, ranks, flags), "-m", *program],
            env={**QUIET, **os.environ, KEPT: str(kept)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode or not kept.exists():
            raise EngineUnavailable(reason(done.stdout))
        try:
            found: dict[str, Any] = json.loads(kept.read_text())
        except (ValueError, RecursionError):
            raise EngineUnavailable(
                f"the ranks left figures that cannot be read; they printed: {reason(done.stdout)}"
            ) from None
        return found


def _launcher(engine: str, ranks: int, flags: Sequence[str]) -> list[str]:
    beside = Path(sys.executable).parent
    if ranks == 1:
        return [sys.executable]
    if ENGINES[engine].launcher == "torchrun":
        return [str(beside / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
    if not (beside / "horovodrun").exists():
        raise EngineUnavailable(f"{beside / 'horovodrun'} is missing; build Horovod first: python -m hvdtrain build")
    return [str(beside / "horovodrun"), "-np", str(ranks), *flags, sys.executable]


def become(program: Sequence[str]) -> NoReturn:
    """Continues as that program, in the same process: as the rank that a launcher has started."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", *program], {**QUIET, **os.environ})


def keep(found: dict[str, Any]) -> bool:
    """On rank 0: leaves what was found to the caller of `launch`; False where there is none."""
    if KEPT not in os.environ:
        return False
    Path(os.environ[KEPT]).write_text(json.dumps(found))
    return True
