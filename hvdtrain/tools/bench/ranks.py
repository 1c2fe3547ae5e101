"""The ranks of a benchmark, which are started here or by the user's launcher, and what rank 0
measures.

Rank 0 of ranks that were started here writes its progress and its figures into files for the
process that started them.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain import errors, files
from hvdtrain.core.wording import counted
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import EngineUnavailable
from hvdtrain.launch import topology as topologies
from hvdtrain.launch.display import shown
from hvdtrain.launch.topology import Topology
from hvdtrain.run.process import WITHOUT_REPORT
from hvdtrain.terminal import Show, hidden
from hvdtrain.untrusted import printable

FOLDER = "HVDTRAIN_BENCH"
"""The variable that names the folder of rank 0's files."""
KEPT, NOW = "kept.json", "now"
"""The files of its figures, and of what it measures now."""
INTERVAL = 0.25
"""Seconds between two looks into the latter."""
GRACE = 20.0
"""Seconds that a launcher has to end its ranks."""
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow", **WITHOUT_REPORT}


def launch(
    program: Sequence[str], engine: str, ranks: int, show: Show, known: Callable[[Any], object] = hidden, *flags: str
) -> dict[str, Any]:
    """Runs `python program` on so many local ranks; the figures that rank 0 kept.

    `flags` are for horovodrun. `known` gets the figures that were kept, after a Ctrl-C, too. Raises
    EngineUnavailable with what the ranks printed, where they fail.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, KEPT)
        show(f"starting {counted(ranks, 'rank')}" if ranks > 1 else "starting the process that measures")
        name = ENGINES[engine].launcher if ranks > 1 else None
        command = [*launcher(name, ranks, *flags), *program]
        try:
            code, printed = follow(command, {**QUIET, **os.environ, FOLDER: folder}, Path(folder, NOW), show)
        finally:
            if kept.exists():
                found = json.loads(kept.read_text())
                known(found)
    if code or not found:
        raise EngineUnavailable(reason(printed))
    return found


def follow(
    command: Sequence[str], environ: Mapping[str, str], now: Path | None = None, show: Show = hidden
) -> tuple[int, str]:
    """Runs a command, showing what the file `now` holds; its exit code and what it printed. After a Ctrl-C the command
    ends with all that it has started."""
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    printed, _ = process.communicate(timeout=INTERVAL)
                    return process.returncode, printed
                if now and now.exists() and (text := now.read_text()):
                    show(text)
        except BaseException:
            process.terminate()  # a launcher ends its ranks only where it is not killed
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=GRACE)
            process.kill()
            raise


@contextlib.contextmanager
def showing(topology: Topology) -> Iterator[Show]:
    """On every rank, what shows a text to the person who started it; only rank 0 shows it."""
    if FOLDER not in os.environ:
        with shown(topology, "preparing") as at_terminal:
            yield at_terminal
    elif topology.is_rank_0:

        def show(text: str) -> None:
            Path(os.environ[FOLDER], NOW).write_text(text)

        show("preparing")
        yield show
    else:
        yield hidden


def launcher(name: str | None, ranks: int, *flags: str) -> list[str]:
    """The words before a program that start it on so many ranks of this machine; without a
    launcher's name, Python.

    Raises EngineUnavailable where the launcher is not installed beside this Python.
    """
    if name is None:
        return [sys.executable]
    row = topologies.launcher(name)
    program, *words = row.words(ranks, {"localhost": ranks})
    path = Path(sys.executable).with_name(program)
    if not path.exists():
        raise EngineUnavailable(f"{path} is missing; get it first: {row.install}")
    return [str(path), *words, *flags, *([] if row.starts_python else [sys.executable])]


def reason(printed: str) -> str:
    """The line of a failed run's output that names an error, or else the last one."""
    names = [name for name in vars(errors) if name.endswith(("Error", "Unavailable"))]
    for line in printed.splitlines():
        for name in names:
            if f"{name}: " in line or f"{name} (rank" in line:
                return printable(line[line.index(name) :].strip(), 500)
    return printable((printed.strip().splitlines() or ["it ended without output"])[-1], 500)


def become(module: str, argv: Sequence[str]) -> NoReturn:
    """Runs that module in place of this process, which the user's launcher started as a rank."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", module, *argv], {**QUIET, **os.environ})


def keep(found: dict[str, Any]) -> bool:
    """On rank 0, keeps the figures for `launch`, in place of those before; False where that did not start it."""
    if folder := os.environ.get(FOLDER):
        files.write(Path(folder, KEPT), json.dumps(found))
    return bool(folder)
