"""`python tests/benchmarks/ladder.py`: images/s of every rung of cifar100's ladder on one GPU, and the time to 75 %.

It takes under 8 minutes. A rung is the recipe cifar100:NAME with the recipe's data pipeline: one reading thread, or the
data set on the device. "one batch" is the same step without it, interleaved with it. Each rung is a process of its own
with a time limit: one that fails costs a line, and the others are measured.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from hvdtrain import cli, terminal
from hvdtrain.core import flags
from hvdtrain.core import recipe as recipes
from hvdtrain.core.flags import Flag
from hvdtrain.errors import EngineUnavailable, RecipeError
from hvdtrain.terminal import Show, Status, hidden
from hvdtrain.tools.bench import measure
from hvdtrain.untrusted import quoted

RUNG = Path(__file__).with_name("ladder_rung.py")
TRAINED = "fast"
RUNGS = (
    "bs256", "bs256-amp", "bs256-amp-nhwc", "bs256-amp-nhwc-extra-opts", "bs256-bf16-nhwc-extra-opts",
    "bs256-bf16-nhwc-extra-opts-compile", "bs256-bf16-nhwc-extra-opts-compile-resident", TRAINED,
)  # fmt: skip

# A rung that compiles may have to do without what does not work on the machine; the rest is measured, and reported so.
WITHOUT = [[], ["graph"], ["compile"], ["compile", "graph"]]

# Seconds a rung may take, and those kept back for the last one, which trains.
SHORTEST, LIMIT, COMPILE_LIMIT, TRAIN_RESERVE = 5, 45, 130, 190

LONGEST = max(map(len, RUNGS))
TITLES = ("rung", "images/s", "range", "1 batch", "GiB", "matmul")
ROW = f"{{:{LONGEST}}}{{:>9}}{{:>6}}{{:>8}}{{:>5}}{{:>7}}"

Found = dict[str, Any]


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True)
class Options(measure.Kept):
    """Measures every rung of the ladder on one GPU, and trains cifar100:fast to its end."""

    data: Annotated[Path, Flag("folder that holds cifar-100-python")]
    device: Annotated[Literal["cuda", "cpu"], Flag("cpu: a trial of the program, tiny")] = "cuda"
    seconds: Annotated[float, Flag("for everything")] = 470.0
    rungs: Annotated[str, Flag("some of them, by comma; fast is also trained", metavar="NAME,NAME")] = ",".join(RUNGS)


def main(argv: Sequence[str]) -> int:
    """Measures; the exit code. Raises HvdtrainError."""
    options: Options = flags.parse(Options, "python tests/benchmarks/ladder.py", argv)
    if wrong := [name for name in options.rungs.split(",") if name not in RUNGS]:
        raise RecipeError(f"--rungs must be some of {', '.join(RUNGS)}; got {quoted(wrong[0])}.")
    with Status("ladder") as status:
        report = hidden if str(options.json) == "-" else status.print
        found = climb(options, status.update, report)
    answer(found).conclude(options)
    return 0


def climb(options: Options, show: Show = hidden, report: Callable[[str], None] = print) -> Found:
    """All rungs, one after the other, each reported as it ends. Raises EngineUnavailable."""
    compiled = {name: recipes.load(f"cifar100:{name}").compile for name in options.rungs.split(",")}
    deadline = time.monotonic() + options.seconds
    show("looking at the GPU")
    machine = started(options, "machine", [], 60)
    if "error" in machine:
        raise EngineUnavailable(f"no measurement is possible: {machine['error']}")
    report("\n".join([*(f"{name:22}{value}" for name, value in machine.items()), "", ROW.format(*TITLES)]))
    rungs: dict[str, Found] = {}
    usable = 0
    for number, (name, compiles) in enumerate(compiled.items(), 1):
        left = deadline - time.monotonic() - (0 if name == TRAINED else TRAIN_RESERVE)
        limit = left if name == TRAINED else min(COMPILE_LIMIT if compiles else LIMIT, left)
        ends = time.monotonic() + limit
        for without in WITHOUT[usable:] if compiles else [[]]:
            show(f"rung {number} of {len(compiled)}: {labelled(name, without)}")
            rungs[name] = {**started(options, name, without, ends - time.monotonic()), "without": without}
            report("\n".join(row(labelled(name, without), rungs[name], machine)))
            if rungs[name].get("images_per_second") or ends - time.monotonic() < SHORTEST:
                break
        if compiles:  # what failed once, or has not ended, is not tried again
            usable = WITHOUT.index(without if rungs[name].get("images_per_second") else ["compile"])
    return {"machine": {**measure.machine(), **machine}, "rungs": rungs}


def started(options: Options, name: str, without: list[str], limit: float) -> Found:
    """What the rung's process found; an `error` beside it, or alone, where it failed."""
    if limit < SHORTEST:
        return {"error": "left out, as the time is over"}
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        numbers = (options.device, str(limit - 3), name, ",".join(without))
        error = ""
        with log.open("w") as to_log:
            try:
                command = [sys.executable, str(RUNG), str(options.data), *numbers, str(result)]
                code = subprocess.run(command, stdout=to_log, stderr=to_log, timeout=limit, check=False).returncode
                error = last_line(log) if code else ""
            except subprocess.TimeoutExpired:
                error = f"not done after {limit:.0f} s"
        found = json.loads(result.read_text()) if result.exists() else {}
        return found | ({"error": error} if error else {})


def last_line(log: Path) -> str:
    """A traceback's last line that names an error, else the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or ["it printed nothing"])[-1][:200]


def labelled(name: str, without: list[str]) -> str:
    """`fast (without compile)`."""
    return f"{name} (without {' and '.join(without)})" if without else name


def row(label: str, found: Found, machine: Found) -> list[str]:
    """A rung's line; a label or an error that is too long for it has lines of its own."""
    if not found.get("images_per_second"):
        return measure.folded(f"{label} failed: {found['error']}")
    rate = measure.spread(found["images_per_second"])
    reach = max(rate.high - rate.median, rate.median - rate.low) / rate.median
    of_matmul = rate.median * found["flops_per_image"] / machine["matmul_flops"]
    alone = f"{found['one_batch']:,.0f}" if "one_batch" in found else ""
    cells = (f"{rate.median:,.0f}", f"±{reach:.0%}", alone, f"{found['peak_gib']:.1f}", f"{of_matmul:.1%}")
    above, label = ([label], "") if len(label) > LONGEST else ([], label)
    return [*above, ROW.format(label, *cells)]


def answer(found: Found) -> measure.Answer:
    """The training's result, and how much faster the last rung is than the first."""
    rates = {name: rung["images_per_second"] for name, rung in found["rungs"].items() if rung.get("images_per_second")}
    sentence = "No rung could be measured."
    if rates:
        first, *_, last = [*rates, *rates]
        ratio = measure.spread(rates[last]).median / measure.spread(rates[first]).median
        sentence = f"{last} trains {measure.times(ratio)} {first}." if last != first else f"Only {first} was measured."
    fast = found["rungs"].get(TRAINED, {})
    lines = ["", *trained(fast)] if fast.get("images_per_second") and "epochs" in fast else []
    return measure.Answer("ladder", lines, sentence, found, measure.over_rounds(rates, "images/s"))


def trained(found: Found) -> list[str]:
    """What the training reached, and when."""
    compiling, best = found["first_steps_seconds"], max(epoch["accuracy"] for epoch in found["epochs"])
    last = found["epochs"][-1]
    reached = [epoch["seconds"] for epoch in found["epochs"] if epoch["accuracy"] >= found["target"]]
    when = f"{found['target']:.0%} was not reached{': ' + found['error'] if 'error' in found else ''}"
    if reached:
        when = f"{found['target']:.0%} after {reached[0]:.1f} s, {reached[0] - compiling:.1f} s without the first steps"
    return [
        f"trained {len(found['epochs'])} epochs: validation accuracy {last['accuracy']:.4f}, best {best:.4f}",
        f"wall time {last['seconds']:.1f} s with every validation",
        f"{compiling:.1f} s of it the first, compiling steps",
        *measure.folded(when),
    ]


if __name__ == "__main__":
    terminal.listen()
    cli.COMMANDS["ladder"] = ("__main__", "")  # errors and Ctrl-C are one line, as of every command
    sys.exit(cli.main(["ladder", *sys.argv[1:]]))
