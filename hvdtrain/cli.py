"""`python -m hvdtrain COMMAND`: each command is imported only when it is called, so that --help is quick."""

import importlib
import signal
import sys
from collections.abc import Sequence

from hvdtrain.errors import HvdtrainError
from hvdtrain.untrusted import one_line, quoted

COMMANDS = {
    "plan": ("hvdtrain.tools.plan", "the resolved plan of a recipe on N ranks, without running it"),
    "build": ("hvdtrain.tools.build", "build Horovod against this environment's frameworks, and prove it"),
    "doctor": ("hvdtrain.tools.doctor", "what is wrong with this machine or job step, and the command that fixes it"),
    "convert": ("hvdtrain.tools.convert", "a run's checkpoint for the other framework"),
    "slurm": ("hvdtrain.tools.slurm", "a site's job script: print, submit, or check one"),
    "watch": (
        "hvdtrain.tools.watch",
        "a run or a SLURM job at the terminal, until it ends: progress, time left",
    ),
    "supervise": ("hvdtrain.tools.supervise", "in a job's script, before srun: starts again when a node is lost"),
    "bench": (
        "hvdtrain.tools.bench",
        "measure this machine: the step, the engines, the network, the data, how it scales",
    ),
    "pack": ("hvdtrain.tools.pack", "images from a folder into a few large shards to train from"),
    "predict": ("hvdtrain.tools.predict", "time, throughput and efficiency on N ranks, from two measured runs"),
}

HELP = """usage: python -m hvdtrain COMMAND [flags]
       python -m hvdtrain.torch RECIPE [flags]          train with PyTorch
       python -m hvdtrain.tensorflow RECIPE [flags]     train with TensorFlow
       python -m hvdtrain.lightning RECIPE [flags]      train with Lightning

commands:
{commands}

COMMAND --help lists its flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, of the command line where argv is left out; its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in {"-h", "--help"}:
        print(HELP.format(commands="\n".join(f"  {name:10}{text}" for name, (_, text) in COMMANDS.items())))
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        print(f"unknown command {quoted(name)}; commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except HvdtrainError as error:
        print(f"{type(error).__name__}: {one_line(error)}", file=sys.stderr)
        return error.exit_code
