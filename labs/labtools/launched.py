"""Programs that a notebook launches as a shell does: with horovodrun, and on a minicluster. One of their ranks may be
killed."""

import contextlib
import html
import inspect
import os
import re
import secrets
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from hvdtrain.errors import LabError
from labtools.processes import LABS

MINICLUSTER = LABS.parent / "slurm" / "minicluster"
SILENCE = 10.0  # seconds without a line, after which a line says that it still runs
RANK = re.compile(r"^\[(?:\d+,)?(\d+)\]<std(?:out|err)>: ?")  # what horovodrun puts before a rank's line
TOKEN = "HVDTRAIN_LAB_LAUNCH"  # noqa: S105  marks the processes of one launch


def write(path: str, *parts: str | Callable[..., object]) -> None:
    """Writes a script: texts, and the functions of cells, as their cells show them."""
    file = Path(path)
    file.parent.mkdir(exist_ok=True)
    sources = [part if isinstance(part, str) else inspect.getsource(part) for part in parts]
    file.write_text("\n\n".join(source.strip() + "\n" for source in sources), encoding="utf-8")
    print(f"{path}: {len(file.read_text().splitlines())} lines")


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The notebook's variables, with this environment's programs first, which need not be activated."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
    return {"OMP_NUM_THREADS": "1", **environ, "PATH": path, "PYTHONUNBUFFERED": "1"}


def run(command: str | Sequence[str], folder: str = ".", kill: int | None = None, after: str = "") -> int:
    """Runs a command in a folder, shows its output line by line, and returns its exit code.

    Kills the rank `kill` at once when a line contains `after`. The interrupt of the cell ends the command.
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    print("$", shlex.join(words), flush=True)
    token = secrets.token_hex(8)
    try:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env={**environment(), TOKEN: token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise LabError(f"{words[0]} cannot be started: {error.strerror}") from None
    try:
        for line in _lines(process):
            print(fill(RANK.sub(r"[rank \1] ", line), 96, subsequent_indent="    "), flush=True)
            if kill is not None and after in line:
                _kill(token, kill)
                kill = None
        return process.wait()
    finally:
        if process.poll() is None:
            _end(process)


def on_minicluster(command: str, folder: str, shows: str, recorded: str) -> None:
    """Runs a command of SLURM's on this machine's minicluster, and shows the file that it wrote in the folder; where
    none is up, shows what was recorded on another machine, and how to bring one up."""
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n", "-E", "env", f"PATH={environment()['PATH']}"]
    mini = [*sudo, str(MINICLUSTER)]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        is_up = subprocess.run([*mini, "status"], env=environment(), check=False, timeout=60, **quiet).returncode == 0  # type: ignore[call-overload]
    except (OSError, subprocess.TimeoutExpired):
        is_up = False
    if is_up:
        if run([*mini, *shlex.split(command)], folder) == 0:
            print((Path(folder) / shows).read_text(encoding="utf-8", errors="replace"))
        return
    print(f"No minicluster is up here. In a terminal: cd {LABS.parent}; make minicluster; sudo slurm/minicluster up")
    print("This is what it printed on another machine:\n")
    print(f"$ {command}\n{recorded.strip()}")


def page(path: str) -> Any:
    """A page of a run, as its report, shown below the cell: in any front end, and without a server for its files."""
    from IPython.display import HTML

    text = html.escape(Path(path).read_text(encoding="utf-8"))
    return HTML(f'<div><iframe sandbox="" srcdoc="{text}" width="100%" height="640"></iframe></div>')


def _lines(process: "subprocess.Popen[bytes]") -> Iterator[str]:
    """The lines as they come; in silence, how long it has run."""
    assert process.stdout
    began, rest = time.monotonic(), b""
    while True:
        if not select.select([process.stdout], [], [], SILENCE)[0]:
            yield f"... running for {time.monotonic() - began:.0f} s"
            continue
        content = os.read(process.stdout.fileno(), 65536)
        *lines, rest = re.split(rb"[\r\n]+", rest + content)
        yield from (line.decode(errors="replace") for line in lines if line)
        if not content:
            if rest:
                yield rest.decode(errors="replace")
            return


def _kill(token: str, rank: int) -> None:
    """Kills the Python of this rank of the launch."""
    wanted = {f"{TOKEN}={token}"}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = set((folder / "environ").read_bytes().decode(errors="replace").split("\0"))
            program = (folder / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
            ranks = {f"HOROVOD_RANK={rank}", f"OMPI_COMM_WORLD_RANK={rank}", f"SLURM_PROCID={rank}"}
            if wanted <= variables and ranks & variables and Path(program).name.startswith("python"):
                print(f"$ kill -KILL {folder.name}    # rank {rank}", flush=True)
                os.kill(int(folder.name), signal.SIGKILL)


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            return
