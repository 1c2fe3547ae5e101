"""Ranks without a framework, for tests of `ranks/`: starts what each line of stdin describes, a JSON object, and
prints how those ranks ended.

The ranks are forked from this process, so that they start at once. They go through `run.main` as those of a framework
do, and add numbers in a file that they share. In the JSON object are

- `steps`: how many each rank makes;
- `acts`: [rank, step, what the rank does to itself before that step];
- `orders`: [when, rank or "all", signal, seconds to wait]; `when` is a step that all ranks have made, or the moment at
  which the ranks without a delay "wait" for others, or are about to "act", or one of them has "named" another;
- `argv`, `delay`, `environs`: by rank; and `reads`, `idles`: seconds that its data take, and that it waits after them;
- `ahead`: how many steps a rank may be ahead of another, as with an asynchronous engine;
- `constants`: values for ranks/timeouts.py;
- `files`: whether the most open files of each rank are counted;
- `stopped`: ranks that may not end by themselves, which are `ended_here`.

A rank that stopped in order gives its last step as a negative number.
"""

import ctypes
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core.settings import COMPRESSIONS
from hvdtrain.engines import registry
from hvdtrain.errors import DataError
from hvdtrain.ranks import timeouts
from hvdtrain.ranks.stacks import COLLECTIVES, OPERATIONS
from hvdtrain.ranks.world import World
from hvdtrain.run import main as runs

LIMIT = 280
WIDTH = 256


class Together:
    """Adds over the ranks. Where a rank has ended it raises BrokenPipeError, or waits for ever."""

    def __init__(self, folder: Path, rank: int, size: int, breaks: bool) -> None:
        self.rank, self.round, self.broken = rank, 0, folder / "broken" if breaks else None
        self.ahead = 0
        self.rows = np.memmap(folder / "rows", np.int64, "r+", shape=(2, size, WIDTH))
        self.rounds = np.memmap(folder / "rounds", np.int64, "r+", shape=(size,))
        self.steps = np.memmap(folder / "steps", np.int64, "r+", shape=(size,))

    def sum(self, array: np.ndarray) -> np.ndarray:
        self.round += 1
        rows = self.rows[self.round % 2]  # no rank writes here again before all have read this round
        rows[self.rank, : array.size] = array
        self.rounds[self.rank] = self.round
        while self.rounds.min() < self.round - self.ahead:
            time.sleep(0.0002 * len(self.rounds))
            if self.broken and self.broken.exists() and self.rounds.min() < self.round - self.ahead:
                raise BrokenPipeError
        return rows[:, : array.size].sum(axis=0)


def loop(seconds: float) -> None:
    """Computes without an end, for so many seconds."""
    ends = time.monotonic() + seconds
    any(time.monotonic() > ends for _ in itertools.count())


def act(name: str) -> None:  # noqa: PLR0912
    match name:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            time.sleep(600)
        case "nap":
            time.sleep(1.5)
        case "stuck":  # in C, where Python runs no signal handler
            ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
        case "refuse":
            raise DataError("part 3 is damaged; copy it again.")
        case "escape":
            raise DataError("\x1b[31mred.")
        case "crash":
            raise RuntimeError("two\nlines")
        case "exit" | "exit 3":
            sys.exit(int(name[4:] or 0))
        case "close":
            os.closerange(3, 200)
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
        together.ahead = spec.get("ahead", 0)
        for step in range(1, spec.get("steps", 100_000) + 1):
            act(acts.get(step, ""))
            together.sum(np.ones(1, np.int64))
            together.steps[topology.rank] = step
            if world.stops_after_step():
                together.steps[topology.rank] = -step
                time.sleep(spec.get("checkpoint", 0) if topology.is_rank_0 else 0)
                raise world.stopped(step)
        act(acts.get(-1, ""))
    except SystemExit:
        (folder / "broken").touch()  # as a library is closed
        raise
    except BrokenPipeError as error:
        raise world.aborted(error) from None


def environment(spec: dict[str, Any], rank: int) -> dict[str, str]:
    """The variables of that rank's launcher."""
    nodes = spec.get("nodes") or [0] * spec["size"]
    local_rank = nodes[:rank].count(nodes[rank])
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
    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments)

    return slow


def noted(function: Any, path: Path) -> Any:
    """The function, which makes that file when it is called."""

    def notes(*arguments: Any) -> Any:
        path.touch()
        return function(*arguments)

    return notes


def rank_main(spec: dict[str, Any], folder: Path, rank: int) -> None:
    """A forked rank, which this ends."""
    signal.alarm(LIMIT)
    for name, number in (("out", 1), ("err", 2)):  # stdout is for `launch`
        with (folder / f"{name}-{rank}").open("w") as file:
            os.dup2(file.fileno(), number)
    own = {name: spec[name].get(str(rank)) for name in ("environs", "delay", "argv", "reads", "idles") if name in spec}
    os.environ.update({**environment(spec, rank), **spec.get("environ", {}), **(own.get("environs") or {})})
    vars(timeouts).update(spec.get("constants", {}))
    for table in (COLLECTIVES, OPERATIONS):
        table.add(("__main__", "sum"))
    time.sleep(own.get("delay") or 0)
    argv = own.get("argv") or ["linear", "--output", str(folder / "run")]
    World.wait_until_ready = noted(World.wait_until_ready, folder / f"wait-{rank}")  # type: ignore[method-assign]
    runs.load_dataset = slowly(runs.load_dataset, own.get("reads") or 0)
    runs.plans.make = slowly(runs.plans.make, own.get("idles") or 0)
    code = 1
    try:
        for engine in registry.ENGINES.values():
            engine.classes["numpy"] = ""  # type: ignore[index]  # what trains is `train`
        for name, row in COMPRESSIONS.items():
            COMPRESSIONS[name] = dataclasses.replace(row, frameworks=(*row.frameworks, "numpy"))  # type: ignore[arg-type]
        code = runs.main("numpy", argv, lambda run: train(run, spec, folder))  # type: ignore[arg-type]
    except SystemExit as error:
        code = error.code or 0
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
    """Starts the ranks, follows the orders, and waits. By rank: exit code, stderr, steps, the most open files."""
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
        if moment == "named":
            return any("keeps the others waiting" in path.read_text() for path in folder.glob("err-*"))
        return all((folder / f"{moment}-{rank}").exists() for rank in prompt)

    orders, codes, ended_here = list(spec.get("orders", ())), dict[int, int](), list[int]()
    while len(codes) < size:
        time.sleep(0.002)
        if orders and has_come(orders[0][0]):
            _, victims, number, pause = orders.pop(0)
            time.sleep(pause)
            for victim in (pids.keys() if victims == "all" else {victims}) - codes.keys():
                os.kill(pids[victim], number)
        if pids.keys() - codes.keys() == set(spec.get("stopped", ())):
            for rank in spec.get("stopped", ()):
                os.kill(pids[rank], signal.SIGKILL)
                ended_here.append(rank)
        for rank in pids.keys() - codes.keys():
            if "files" in spec:
                files[rank] = max(files[rank], open_files(pids[rank]))
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                codes[rank] = os.waitstatus_to_exitcode(status)
                (folder / "broken").touch()
    return {
        "codes": [codes[rank] for rank in range(size)],
        "files": files,
        "ended_here": ended_here,
        "steps": steps.tolist(),
        "err": [(folder / f"err-{rank}").read_text() for rank in range(size)],
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(launch(json.loads(line))), flush=True)
