"""Ranks that measure: started on this machine, or by the launcher of this process; what rank 0 does, and found.

Rank 0 of ranks that were started here writes what it does into a file, which the process that started them reads.
"""

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain import errors
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import EngineUnavailable
from hvdtrain.launch.display import shown
from hvdtrain.launch.topology import Topology, discover
from hvdtrain.run.ending import WITHOUT_REPORT
from hvdtrain.terminal import Show, hidden
from hvdtrain.untrusted import printable

KEPT = "HVDTRAIN_BENCH_KEPT"
NOW = "HVDTRAIN_BENCH_NOW"
INTERVAL = 0.25
"""Seconds between two looks at what rank 0 does."""
_IMPORTS = contextlib.ExitStack()
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow", **WITHOUT_REPORT}


def launch(program: Sequence[str], engine: str, ranks: int, *flags: str, show: Show) -> dict[str, Any]:
    """Starts `python program` on so many local ranks and waits; what rank 0 kept.

    `flags` are for horovodrun. Raises EngineUnavailable with what the ranks printed where they fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept, now = Path(folder, "kept.json"), Path(folder, "now")
        show(f"starting {ranks} ranks" if ranks > 1 else "starting the process that measures")
        name = ENGINES[engine].launcher if ranks > 1 else None
        command = [*launcher(name, ranks, *flags), *program]
        code, printed = follow(command, {**QUIET, **os.environ, KEPT: str(kept), NOW: str(now)}, now, show)
        if code or not kept.exists():
            raise EngineUnavailable(reason(printed))
        try:
            found: dict[str, Any] = json.loads(kept.read_text())
        except (ValueError, RecursionError):
            raise EngineUnavailable(
                f"the ranks left figures that cannot be read; they printed: {reason(printed)}"
            ) from None
        return found


def follow(command: Sequence[str], environ: Mapping[str, str], now: Path, show: Show) -> tuple[int, str]:
    """Runs a command and shows what stands in the file `now`; its exit code and what it printed."""
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    printed, _ = process.communicate(timeout=INTERVAL)
                    return process.returncode, printed
                if now.exists() and (text := now.read_text()):
                    show(text)
        except BaseException:
            process.kill()
            raise


@contextlib.contextmanager
def showing(topology: Topology) -> Iterator[Show]:
    """On every rank: what shows its argument as that which the ranks do now, for the person who started them."""
    _IMPORTS.close()
    if NOW not in os.environ:
        with shown(topology, "preparing") as at_terminal:
            yield at_terminal
    elif topology.is_rank_0:
        path = Path(os.environ[NOW])

        def show(text: str) -> None:
            path.write_text(text)

        show("preparing")
        yield show
    else:
        yield hidden


def launcher(name: str | None, ranks: int, *flags: str) -> list[str]:
    """The command that starts ranks on this machine, up to and with Python; without a name, Python.

    Raises EngineUnavailable where the launcher is not beside this Python.
    """
    if name is None:
        return [sys.executable]
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        remedy = "python -m hvdtrain build" if name == "horovodrun" else "pip install torch"
        raise EngineUnavailable(f"{path} is missing; get it first: {remedy}")
    if name == "torchrun":
        return [str(path), "--standalone", "--nproc-per-node", str(ranks)]
    return [str(path), "-np", str(ranks), *flags, sys.executable]


def reason(printed: str) -> str:
    """The line that names the reason, without the launcher's mark before it."""
    names = [name for name in vars(errors) if name.endswith(("Error", "Unavailable"))]
    for line in printed.splitlines():
        for name in names:
            if f"{name}: " in line or f"{name} (rank" in line:
                return printable(line[line.index(name) :].strip(), 500)
    return printable((printed.strip().splitlines() or ["it ended without output"])[-1], 500)


def become(program: Sequence[str]) -> NoReturn:
    """Continues as that program, in the same process: as the rank that a launcher has started."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "hvdtrain.tools.bench", *program], {**QUIET, **os.environ})


def keep(found: dict[str, Any]) -> bool:
    """On rank 0: leaves what was found to the caller of `launch`; False where there is none."""
    if KEPT not in os.environ:
        return False
    Path(os.environ[KEPT]).write_text(json.dumps(found))
    return True


def work(module: str, *argv: str) -> None:
    """Runs the module, and shows until `showing` begins that the libraries are imported."""
    _IMPORTS.enter_context(shown(discover(os.environ), "importing the libraries"))
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__")
