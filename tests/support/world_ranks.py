"""Ranks without a framework, for tests of their world: `python world_ranks.py` reads what to start, a JSON object a
line, and answers each with how its ranks ended; `python world_ranks.py seconds` prints how long some take to end, and
how long a stranger is kept.

The ranks are forked from here, which saves them the start. They go through `run.main` as those of a framework do, and
add by a file that they share. `steps`: how many; `acts`: by rank, what it does to itself before a step; `orders`: what
is done to a rank once all have made a step, or those without a delay have come to "wait" for others or to "act";
`argv`, `delay`, `environs`: by rank, and so `reads` and `idles`, seconds that its data take and that it waits after
them; `constants`: of ranks/timeouts.py. A rank that stopped in order gives its last step as a negative number.
"""

import ctypes
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.engines import registry
from hvdtrain.errors import DataError
from hvdtrain.ranks import timeouts
from hvdtrain.ranks.stacks import COLLECTIVES
from hvdtrain.run import main as runs

LIMIT = 280
WIDTH = 256


class Together:
    """Adds over ranks, which all call it equally often. Where a rank has ended it raises, or waits for ever."""

    def __init__(self, folder: Path, rank: int, size: int, breaks: bool) -> None:
        self.rank, self.round, self.broken = rank, 0, folder / "broken" if breaks else None
        self.rows = np.memmap(folder / "rows", np.int64, "r+", shape=(2, size, WIDTH))
        self.rounds = np.memmap(folder / "rounds", np.int64, "r+", shape=(size,))
        self.steps = np.memmap(folder / "steps", np.int64, "r+", shape=(size,))

    def sum(self, array: np.ndarray) -> np.ndarray:
        self.round += 1
        rows = self.rows[self.round % 2]  # nobody comes to the round after the next before all have read this one
        rows[self.rank, : array.size] = array
        self.rounds[self.rank] = self.round
        while self.rounds.min() < self.round:
            time.sleep(0.0002 * len(self.rounds))
            if self.broken and self.broken.exists() and self.rounds.min() < self.round:
                raise BrokenPipeError
        return rows[:, : array.size].sum(axis=0)


def loop(seconds: float) -> None:
    """As an endless loop would, for a while."""
    ends = time.monotonic() + seconds
    any(time.monotonic() > ends for _ in itertools.count())


def act(name: str) -> None:
    """What a rank does to itself."""
    match name:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            time.sleep(600)
        case "nap":
            time.sleep(1.5)
        case "stuck":  # in C, which no Python handler interrupts
            ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
        case "refuse":
            raise DataError("part 3 is damaged; copy it again.")
        case "escape":
            raise DataError("\x1b[31mred.")
        case "crash":
            raise RuntimeError("two\nlines")
        case "return":
            os._exit(0)
        case "fork":
            if not os.fork():
                time.sleep(15)
                os._exit(0)
        case "loop":
            loop(2)
        case "read" | "locked":  # the latter in C code that holds Python's lock, whatever signals come
            waits = subprocess.Popen(["/bin/sleep", "2"], stdout=subprocess.PIPE)
            library, buffer = ctypes.CDLL if name == "read" else ctypes.PyDLL, ctypes.create_string_buffer(1)
            library(None).read(waits.stdout.fileno(), buffer, 1)


def train(run: runs.Run, spec: dict[str, Any], folder: Path) -> None:
    topology, world = run.topology, run.world
    together = Together(folder, topology.rank, topology.size, spec.get("breaks", True))
    acts = {step: name for rank, step, name in spec.get("acts", ()) if rank == topology.rank}
    try:
        (folder / f"act-{topology.rank}").touch()
        act(acts.get(0, ""))
        if spec.get("exchange", True):
            world.exchange(together.sum)
        for step in range(1, spec.get("steps", 100_000) + 1):
            act(acts.get(step, ""))
            together.sum(np.ones(1, np.int64))
            together.steps[topology.rank] = step
            if world.stops_at(step):
                together.steps[topology.rank] = -step
                time.sleep(spec.get("checkpoint", 0) if topology.is_rank_0 else 0)
                raise world.stopped(step)
        act(acts.get(-1, ""))
    except BrokenPipeError as error:
        raise world.aborted(error) from None


def environment(spec: dict[str, Any], rank: int) -> dict[str, str]:
    """The variables of that rank's launcher."""
    nodes = spec.get("nodes") or [0] * spec["size"]
    local_rank = nodes[:rank].count(nodes[rank])
    if spec.get("launcher") == "alone":
        return {}
    if spec.get("launcher") == "horovodrun":
        given = {"SIZE": len(nodes), "LOCAL_RANK": local_rank, "LOCAL_SIZE": nodes.count(nodes[rank])}
        return {
            f"HOROVOD_{name}": str(value) for name, value in {**given, "RANK": rank, "CROSS_RANK": nodes[rank]}.items()
        }
    tasks = ",".join(str(nodes.count(node)) for node in sorted(set(nodes)))
    given = {"PROCID": rank, "LOCALID": local_rank, "NODEID": nodes[rank], "STEP_NUM_TASKS": len(nodes)}
    given |= {
        "JOB_ID": spec["job"],
        "STEP_ID": 0,
        "STEP_TASKS_PER_NODE": tasks,
        "STEP_NODELIST": spec.get("nodelist", "localhost"),
    }
    return {f"SLURM_{name}": str(value) for name, value in given.items()}


def slowly(function: Any, seconds: float) -> Any:
    """The function, which takes so much longer."""

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments)

    return slow


def noted(function: Any, path: Path) -> Any:
    """The function, whose first call makes a file."""

    def notes(*arguments: Any) -> Any:
        path.touch()
        return function(*arguments)

    return notes


def rank_main(spec: dict[str, Any], folder: Path, rank: int) -> None:
    """A forked rank, to its end."""
    signal.alarm(LIMIT)
    with (folder / f"err-{rank}").open("w") as err:
        os.dup2(err.fileno(), 2)
    own = {name: spec[name].get(str(rank)) for name in ("environs", "delay", "argv", "reads", "idles") if name in spec}
    os.environ.update({**environment(spec, rank), **spec.get("environ", {}), **(own.get("environs") or {})})
    vars(timeouts).update(spec.get("constants", {}))
    COLLECTIVES.add(("__main__", "sum"))
    time.sleep(own.get("delay") or 0)
    argv = own.get("argv") or ["linear", "--output", str(folder / "run")]
    runs.World.wait_until_ready = noted(runs.World.wait_until_ready, folder / f"wait-{rank}")  # type: ignore[method-assign]
    runs.load_dataset = slowly(runs.load_dataset, own.get("reads") or 0)
    runs.plans.make = slowly(runs.plans.make, own.get("idles") or 0)
    code = 1
    try:
        for engine in registry.ENGINES.values():
            engine.classes["numpy"] = ""  # type: ignore[index]  # what trains is `train`
        code = runs.main("numpy", argv, lambda run: train(run, spec, folder))  # type: ignore[arg-type]
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def open_files(pid: int) -> int:
    """How many files, connections among them, the process has open."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


def launch(spec: dict[str, Any]) -> dict[str, Any]:
    """Starts the ranks, follows the orders, waits; exit code, stderr, steps, seconds and most open files by rank."""
    folder, size = Path(spec["folder"]), spec["size"]
    for path in [folder / "broken", *folder.glob("wait-*"), *folder.glob("act-*")]:
        path.unlink(missing_ok=True)
    np.zeros((2, size, WIDTH), np.int64).tofile(folder / "rows")
    for name in ("rounds", "steps"):
        np.zeros(size, np.int64).tofile(folder / name)
    pids = {}
    for rank in range(size):
        pids[rank] = os.fork()
        if not pids[rank]:
            rank_main(spec, folder, rank)
    files = [0] * size
    steps = np.memmap(folder / "steps", np.int64, "r", shape=(size,))
    prompt = [rank for rank in range(size) if str(rank) not in spec.get("delay", {})]

    def has_come(moment: int | str) -> bool:
        if isinstance(moment, int):
            return bool(steps.min() >= moment)
        return all((folder / f"{moment}-{rank}").exists() for rank in prompt)

    orders, began = list(spec.get("orders", ())), time.monotonic()
    codes: dict[int, int] = {}
    seconds: dict[int, float] = {}
    while len(codes) < size:
        time.sleep(0.002)
        if orders and has_come(orders[0][0]):
            _, victims, number, pause = orders.pop(0)
            time.sleep(pause)
            for victim in (pids.keys() if victims == "all" else {victims}) - codes.keys():
                os.kill(pids[victim], number)
            began = time.monotonic()
        if pids.keys() - codes.keys() == set(spec.get("stopped", ())):
            for rank in spec["stopped"]:
                os.kill(pids[rank], signal.SIGKILL)
        for rank in pids.keys() - codes.keys():
            files[rank] = max(files[rank], open_files(pids[rank]))
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                codes[rank], seconds[rank] = os.waitstatus_to_exitcode(status), time.monotonic() - began
                (folder / "broken").touch()
    return {
        "codes": [codes[rank] for rank in range(size)],
        "seconds": [seconds[rank] for rank in range(size)],
        "files": files,
        "steps": steps.tolist(),
        "err": [(folder / f"err-{rank}").read_text() for rank in range(size)],
    }


PROMISES: dict[str, dict[str, Any]] = {
    "a killed rank is named, and all have ended": {"acts": [[2, 20, "kill"]], "breaks": False},
    "the same of rank 0, on another host": {"acts": [[0, 20, "kill"]], "nodes": [0, 1, 1], "breaks": False},
    "a signal, and all have stopped in order": {"orders": [[20, 1, signal.SIGUSR2, 0]]},
    "without a key, a run is refused": {"environ": {"HOME": "/proc/none", "XDG_CONFIG_HOME": "", "PATH": ""}},
    "twenty steps, where others have taken six ports": {"steps": 20, "taken": 6},
}


def print_seconds() -> None:
    """What is promised, each once."""
    for number, (what, spec) in enumerate(PROMISES.items()):
        job = os.getpid() * 7 + number
        first = 10_000 + job * 8 % 20_000
        taken = [socket.create_server(("", port)) for port in range(first, first + spec.get("taken", 0))]
        with tempfile.TemporaryDirectory() as folder:
            ended = launch({"folder": folder, "size": 3, "job": job, **spec})
        print(f"{max(ended['seconds']):6.2f} s  {what} {ended['codes']}", flush=True)
        for each in taken:
            each.close()
    sys.path.append(str(Path(__file__).parents[2] / "labs"))
    from labtools.admission import Listener

    listener, began = Listener(("127.0.0.1", 0), 2, bytes(32)), time.monotonic()
    with socket.create_connection(listener.address) as stranger:  # type: ignore[arg-type]
        while stranger.recv(100):
            pass
    print(f"{time.monotonic() - began:6.2f} s  a notebook has dropped a silent stranger")


if __name__ == "__main__":
    if sys.argv[1:] == ["seconds"]:
        sys.exit(print_seconds())
    for line in sys.stdin:
        print(json.dumps(launch(json.loads(line))), flush=True)
