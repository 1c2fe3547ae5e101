"""`python -m hvdtrain COMMAND`. A command is imported only when it is called, so that --help is quick."""

import importlib
import signal
import sys
from collections.abc import Sequence

from hvdtrain import installed
from hvdtrain.errors import HvdtrainError
from hvdtrain.terminal import Status
from hvdtrain.untrusted import one_line, quoted

COMMANDS = {
    "plan": ("hvdtrain.tools.plan", "the resolved plan of a recipe on N ranks, without running it"),
    "build": ("hvdtrain.tools.build", "build Horovod against this environment's frameworks, and prove it"),
    "doctor": ("hvdtrain.tools.doctor", "what is wrong with this machine or job step, and its fix"),
    "convert": ("hvdtrain.tools.convert", "a run's checkpoint for the other framework"),
    "export": ("hvdtrain.tools.export", "a run's model as one file, to load without hvdtrain"),
    "generate": ("hvdtrain.tools.generate", "how a run's language model continues a text, by a seed"),
    "slurm": ("hvdtrain.tools.slurm", "a site's job script: print, submit, or check one"),
    "watch": ("hvdtrain.tools.watch", "a run or a SLURM job at the terminal: progress, time left"),
    "supervise": ("hvdtrain.tools.supervise", "in a job's script, before srun: starts again when a node is lost"),
    "bench": ("hvdtrain.tools.bench", "measure this machine: step, engines, network, data, scaling"),
    "pack": ("hvdtrain.tools.pack", "images from a folder into a few large shards to train from"),
    "pack-text": ("hvdtrain.tools.pack_text", "text into files of token ids to train a language model from"),
    "report": ("hvdtrain.tools.report", "what a run was worth, in one HTML file: result, time, energy"),
    "predict": ("hvdtrain.tools.predict", "time, throughput and efficiency on N ranks, from two measured runs"),
    "lr-range": ("hvdtrain.tools.lr_range", "the loss while the LR rises, and the LR that this speaks for"),
}

HELP = """usage: python -m hvdtrain COMMAND [flags]
       python -m hvdtrain.torch RECIPE [flags]          train with PyTorch
       python -m hvdtrain.tensorflow RECIPE [flags]     train with TensorFlow
       python -m hvdtrain.lightning RECIPE [flags]      train with Lightning

commands:
{commands}

COMMAND --help lists its flags; --version shows what is installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv`, or else the command line, names; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in {"-h", "--help"}:
        print(HELP.format(commands="\n".join(f"  {name:10}{text}" for name, (_, text) in COMMANDS.items())))
        return 0 if argv else 2
    name, *rest = argv
    if name == "--version":
        print(installed.line())
        return 0
    if name not in COMMANDS:
        print(_unknown(name), file=sys.stderr)
        return 2
    try:
        with Status(name):  # the import may take seconds
            command = importlib.import_module(COMMANDS[name][0])
        return int(command.main(rest))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except HvdtrainError as error:
        print(f"{type(error).__name__}: {one_line(error)}", file=sys.stderr)
        return error.exit_code


def _unknown(name: str) -> str:
    from hvdtrain.core import values, wording

    meant = wording.closest(name, [*COMMANDS, "train"], wording.COMMAND_SYNONYMS)
    if meant == "train" or name.partition(":")[0] in values.known():
        chosen = "RECIPE" if meant == "train" else name
        return (
            f"unknown command {quoted(name)}; to train: python -m hvdtrain.torch {chosen} (or tensorflow, lightning)."
        )
    hint = f" Did you mean {meant}?" if meant else ""
    return f"unknown command {quoted(name)}.{hint} Commands: {', '.join(COMMANDS)}."
