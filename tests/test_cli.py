"""The command lines in processes of their own: help, flags, errors on stderr, exit codes, which rank reports."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from core_fixtures import LAUNCHERS
from images import write_tree
from marks import marked
from paths import REPOSITORY
from ranks import lacking
from refusals import refusal
from surface import surface

from hvdtrain import __version__
from hvdtrain.core.values import known
from hvdtrain.errors import RecipeError
from hvdtrain.run.options import Options, parse_run

PROG = "python -m hvdtrain.torch"
TRAIN = """
import sys
from hvdtrain import errors
from hvdtrain.run import main
from hvdtrain.ranks import timeouts

timeouts.RANK_0_REPORT = timeouts.FAREWELL = 0.5

def train(prepared):
    print("training", prepared.engine, prepared.plan.local_batch, prepared.folder and prepared.folder.path)
    outcome = sys.argv[1]
    if hasattr(errors, outcome):
        raise getattr(errors, outcome)("two\\nlines.")
    if outcome == "full":
        raise OSError(28, "No space left on device", "metrics.jsonl")

sys.exit(main.main("torch", sys.argv[2:], train))
"""
HELP = """usage: python -m hvdtrain COMMAND [flags]
       python -m hvdtrain.torch RECIPE [flags]          train with PyTorch
       python -m hvdtrain.tensorflow RECIPE [flags]     train with TensorFlow
       python -m hvdtrain.lightning RECIPE [flags]      train with Lightning

commands:
  plan      the resolved plan of a recipe on N ranks, without running it
"""
USAGE = f"""usage: {PROG} RECIPE [flags]

recipes: {", ".join(known())};
         an entry of one, as cifar100:bs256; or a file ending in .yaml
flags:   {PROG} RECIPE --help
         lists those that the recipe can use, with its values
"""


def horovodrun(rank: int, local_rank: int, size: int = 4) -> dict[str, str]:
    """The variables that horovodrun gives a rank, two a host."""
    indices = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": 2, "CROSS_RANK": 0, "CROSS_SIZE": 2}
    return {f"HOROVOD_{key}": str(value) for key, value in indices.items()}


def srun(rank: int, local_rank: int) -> dict[str, str]:
    """The variables that srun gives a rank, two a host."""
    step = {"ID": "0", "NUM_TASKS": "4", "TASKS_PER_NODE": "2(x2)"}
    mine = {"PROCID": str(rank), "LOCALID": str(local_rank), "NODEID": str(rank // 2), "JOB_ID": "22"}
    return {f"SLURM_{k}": v for k, v in mine.items()} | {f"SLURM_STEP_{k}": v for k, v in step.items()}


def test_help_imports_nothing_heavy(python):
    code = "import sys; from hvdtrain import cli; print(cli.main(['--help'])); print(*sys.modules, file=sys.stderr)"
    done = python("-c", code)
    assert done.stdout.startswith(HELP)
    assert done.stdout.endswith("\n0\n")
    assert max(map(len, done.stdout.splitlines())) <= 80
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    third_party = {"numpy", "pydantic", "ruamel", "rich", "safetensors", "sklearn", "torch", "tensorflow"}
    assert "hvdtrain" in loaded
    assert not loaded & third_party


NO_TORCH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)

class Forbidden:
    def find_spec(self, name, *rest):
        if name == "torch":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Forbidden())
from hvdtrain.__main__ import run
run()
"""
COMMANDS = {  # argv: exit code, how stdout begins
    "help": (["--help"], 0, HELP),
    "-h": (["-h"], 0, HELP),
    "nothing": ([], 2, HELP),
    "version": (["--version"], 0, f"hvdtrain {__version__} ("),
    "plan": (["plan", "linear", "--ranks", "4"], 0, "recipe      linear: linear (2 parameters)"),
    "ranks first": (["plan", "--ranks=4", "linear"], 0, "recipe      linear: linear (2 parameters)"),
    "plan's help": (["plan", "-h"], 0, USAGE.replace("hvdtrain.torch", "hvdtrain plan").rstrip()),
    "plan without a recipe": (["plan"], 2, "usage: python -m hvdtrain plan RECIPE [flags]"),
    "plan without data or a framework": (
        ["-c", NO_TORCH, "plan", "imagenet", "--ranks", "8"],
        0,
        "recipe      imagenet: resnet50",
    ),
    "plan of ours without a framework": (
        ["-c", NO_TORCH, "plan", "synthetic:tiny"],
        0,
        "recipe      synthetic:tiny: resnet50",
    ),
}
REFUSED_COMMANDS = {  # argv: stderr
    "misspelt command": (["pln"], r"unknown command 'pln'\. Did you mean plan\? Commands: plan, build, .*\.\n"),
    "unknown command": (["--ranks"], r"unknown command '--ranks'\. Commands: plan, build, .*\.\n"),
    "command to train": (
        ["trian", "digits"],
        r"unknown command 'trian'; to train: python -m hvdtrain.torch RECIPE \(or tensorflow, lightning\)\.\n",
    ),
    "recipe for a command": (
        ["digits"],
        r"unknown command 'digits'; to train: python -m hvdtrain.torch digits \(or tensorflow, lightning\)\.\n",
    ),
    "unknown recipe": (
        ["plan", "lineer"],
        r"RecipeError: unknown recipe 'lineer'\. Did you mean linear\? Recipes: .*; or give a file .*\.yaml\.\n",
    ),
    "indivisible batch": (
        ["plan", "digits", "--ranks", "3"],
        r"PlanError: batch_size must be a multiple of 3 ranks, got 64; take 63 or 66\.\n",
    ),
    "ranks missing": (["plan", "linear", "--ranks"], r"RecipeError: --ranks needs a value; --help lists the flags\.\n"),
    "no ranks": (
        ["plan", "linear", "--ranks", "0"],
        r"RecipeError: --ranks must be greater than 0, got '0'; --help lists the flags\.\n",
    ),
    "ranks in superscript": (
        ["plan", "linear", "--ranks=²"],
        r"RecipeError: --ranks must be a whole number, got '²'; --help lists the flags\.\n",
    ),
    "plan of an unknown framework": (
        ["plan", "linear", "--framework", "jax"],
        r"RecipeError: --framework must be 'torch' or 'tensorflow', got 'jax'; --help lists the flags\.\n",
    ),
    "plan of a framework that is missing": (
        ["-c", NO_TORCH, "plan", "cscs:vgg16-synthetic"],
        r"EngineUnavailable: model vgg16 needs PyTorch, which /\S+ has not; install it: /\S+ -m pip install "
        r"'hvdtrain\[torch\]'\n",
    ),
}


@pytest.fixture
def command(warm_python):
    return lambda argv: warm_python(*(argv if argv[:1] == ["-c"] else ("-m", "hvdtrain", *argv)))


@pytest.mark.parametrize(("argv", "code", "out"), COMMANDS.values(), ids=COMMANDS)
def test_commands(argv, code, out, command):
    done = command(argv)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith(out)


@pytest.mark.parametrize(("argv", "err"), REFUSED_COMMANDS.values(), ids=REFUSED_COMMANDS)
def test_refused_commands(argv, err, command):
    done = command(argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(err, done.stderr), done.stderr


def unread(folder, command, unbuffered=""):
    """Exit code and stderr of a command whose stdout nobody reads, as behind `| head -0`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command,
        env={**clean, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": unbuffered},
        cwd=folder,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    return done.returncode, done.stderr


UNREAD = {
    "nothing": ([], 2),
    "plan": (["plan", "linear"], 0),
    "plan's help": (["plan", "--help"], 0),
    "a flag's help": (["plan", "linear", "--help"], 0),
}


@pytest.mark.parametrize(
    ("argv", "code", "unbuffered"),
    marked(
        [
            pytest.param(*row, unbuffered, id=f"{name}-{'un' if unbuffered else ''}buffered")
            for name, row in UNREAD.items()
            for unbuffered in ("", "1")
        ],
        # The output takes the same way whatever the command prints.
        fast={"nothing-buffered", "nothing-unbuffered", "plan-unbuffered"},
    ),
)
def test_a_command_whose_reader_leaves_ends_as_ever(tmp_path, argv, code, unbuffered):
    assert unread(tmp_path, [sys.executable, "-m", "hvdtrain", *argv], unbuffered) == (code, "")


def test_a_command_whose_reader_leaves_does_its_work(tmp_path):
    write_tree(tmp_path / "tree", 1, 1)
    assert unread(tmp_path, warm.command("hvdtrain", "-m", "hvdtrain", "pack", "tree", "dest")) == (0, "")
    assert (tmp_path / "dest" / "index.npz").exists()


@pytest.mark.xdist_group("torch")  # whose warm process it shares
@pytest.mark.skipif(bool(lacking("torch")), reason=lacking("torch"))
def test_a_run_whose_reader_leaves_trains_on(tmp_path):
    argv = ["-m", "hvdtrain.torch", "linear", "--output", "mine", "--max-steps", "20", "--tracker", "none"]
    code, err = unread(tmp_path, warm.command("torch", *argv))
    assert code == 0 and not re.search("Error|Traceback", err), err  # libraries of the warm process may warn
    status = json.loads((tmp_path / "mine" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 20)


def test_output_is_expanded_and_a_variable_that_is_not_set_refused(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/ada")
    monkeypatch.delenv("NO_SUCH", raising=False)
    _, options = parse_run(PROG, ["linear", "--output", "${SCRATCH}/a"])
    assert options.output == Path("/scratch/ada/a")
    assert refusal(RecipeError, parse_run, PROG, ["linear", "--output", "$NO_SUCH/a"]) == (
        "--output needs the environment variable $NO_SUCH, which is not set; export it."
    )


FLAGS = {
    "none": ("", {}),
    "dash": ("--base-lr 2e-3", {"base_lr": 0.002}),
    "underscore": ("--base_lr 2e-3", {"base_lr": 0.002}),
    "equals": ("--base_lr=2e-3 --epochs=3", {"base_lr": 0.002, "epochs": 3}),
    "alias": ("--lr 0.25", {"base_lr": 0.25}),
    "the last wins": ("--lr 0.25 --base-lr 0.125", {"base_lr": 0.125}),
    "switch on": ("--momentum 0.9 --nesterov", {"momentum": 0.9, "nesterov": True}),
    "switch off": ("--no-nesterov", {"nesterov": False}),
    "list": ("--lr-schedule step --lr-milestones 3 4", {"lr_schedule": "step", "lr_milestones": (3, 4)}),
    "batch given the other way": ("--batch-size-per-rank 10", {"batch_size": None, "batch_size_per_rank": 10}),
    "the recipe's own value": ("--batch-size 100", {"batch_size": 100}),
}


@pytest.mark.parametrize(("argv", "expected"), FLAGS.values(), ids=FLAGS)
def test_flags_change_the_recipe(argv, expected):
    loaded, options = parse_run(PROG, ["linear", *argv.split()])
    plain = parse_run(PROG, ["linear"])[0]
    assert loaded == plain.model_copy(update=expected)
    assert options == Options()


def test_options():
    options = parse_run(PROG, ["linear", "--output", "a/b", "--resume", "never", "--engine=local"])[1]
    assert (str(options.output), options.resume, options.engine) == ("a/b", "never", "local")


REFUSED = {
    "misspelt": ("linear --epoch 3", f"unknown flag '--epoch'. Did you mean --epochs? See {PROG} linear --help."),
    "misspelt, underscore": (
        "linear --batch_sise=3",
        f"unknown flag '--batch_sise'. Did you mean --batch-size? See {PROG} linear --help.",
    ),
    "the field's word": (
        "linear --leraning_rate 3",
        f"unknown flag '--leraning_rate'. Did you mean --base-lr? See {PROG} linear --help.",
    ),
    **{
        flag: (f"linear --{flag}", f"unknown flag '--{flag}'. Did you mean {key}? See {PROG} linear --help.")
        for flag, key in {
            "early-stopping": "--stop-patience",
            "pretrained": "--init-from",
            "gradient-checkpointing": "--checkpoint-activations",
            "monitor": "--best",
        }.items()
    },
    "an argument too many": ("linear --nesterov True", f"'True' belongs to no flag; see {PROG} linear --help."),
    "fraction": ("linear --epochs 1.5", "--epochs must be a whole number, got '1.5'; --help lists the flags."),
    "no value": ("linear --lr", "--lr/--base-lr needs a value; --help lists the flags."),
    "no folder": ("linear --output", "--output needs a value; --help lists the flags."),
    "number or None": (
        "linear --clip-norm off",
        "--clip-norm must be a number or None, got 'off'; --help lists the flags.",
    ),
    "choice": (
        "linear --precision float8",
        "--precision must be 'float32', 'bfloat16', 'float16' or 'float64', got 'float8'; --help lists the flags.",
    ),
    "negative": ("linear --epochs -3", "--epochs must be greater than 0, got '-3'; --help lists the flags."),
    "NaN": ("linear --lr nan", "--lr/--base-lr must be a finite number, got 'nan'; --help lists the flags."),
    "batch given twice": (
        "linear --batch-size 100 --batch-size-per-rank 10",
        "the batch must be given once: batch_size (global) or batch_size_per_rank, "
        "got batch_size=100, batch_size_per_rank=10.",
    ),
    "flag first": (
        "--epochs 3 linear",
        f"the recipe comes first, got '--epochs'; as in: {PROG} cifar100 --epochs",
    ),
}


@pytest.mark.parametrize(("argv", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_flags(argv, message, monkeypatch):
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert refusal(RecipeError, parse_run, PROG, argv.split()) == message


def test_usage_without_a_recipe(capsys):
    for argv, code in (([], 2), (["-h"], 0), (["--help"], 0)):
        with pytest.raises(SystemExit) as stop:
            parse_run(PROG, argv)
        assert (stop.value.code, capsys.readouterr()) == (code, (USAGE, ""))


VERSION = """
import sys
sys.argv = ["prog", "--version"]
import runpy
try:
    runpy.run_module(f"hvdtrain.{framework}", run_name="__main__")
except SystemExit as stop:
    assert not stop.code
print(*{"numpy", "pydantic", "torch", "tensorflow"} & set(sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "lightning"])
def test_the_version_is_known_without_a_framework(framework, python):
    done = python("-c", f"framework = {framework!r}{VERSION}")
    assert re.fullmatch(rf"hvdtrain {re.escape(__version__)} \(.+\)\n", done.stdout)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("launcher", [horovodrun, srun], ids=["horovodrun", "srun"])
def test_what_is_wrong_on_every_rank_is_reported_once(launcher, warm_python):
    for rank in (0, 1, 2):
        done = warm_python("-c", TRAIN, "none", "lineer", environ=launcher(rank, rank % 2))
        assert (done.returncode, done.stdout) == (2, "")
        reported = r"RecipeError \(rank 0 on [^ ]+\): unknown recipe 'lineer'\..*\n" if rank == 0 else ""
        assert re.fullmatch(reported, done.stderr)


ERRORS = {  # raised in training: exit code, does a second rank of the host report it too
    "RecipeError": (2, False),
    "DataError": (2, True),
    "ReplicaError": (1, False),
    "DivergedError": (1, False),
}


@pytest.mark.parametrize(("kind", "expected"), ERRORS.items(), ids=ERRORS)
def test_an_error_in_training(kind, expected, warm_python):
    code, second_reports = expected
    first, second = (warm_python("-c", TRAIN, kind, "linear", environ=horovodrun(rank, rank)) for rank in (0, 1))
    assert first.stdout == "training horovod 25 runs/linear/" + first.stdout[-20:]
    assert second.stdout == "training horovod 25 None\n"
    assert (first.returncode, second.returncode) == (code, code)
    assert re.fullmatch(rf"{kind} \(rank 0 on [^ ]+\): two lines\.\n", first.stderr)
    assert bool(second.stderr) == second_reports


FULL = "metrics.jsonl: No space left on device; free space, then start again."
ENDS = {  # how training ends: exit code, stderr, the error in status.json; a run that ends well leaves it to the loop
    "none": (0, "", None),
    "DivergedError": (1, "DivergedError: two lines.\n", "two\nlines."),
    "full": (2, f"OutputError: {FULL}\n", FULL),
}


@pytest.mark.parametrize(("outcome", "ending"), ENDS.items(), ids=ENDS)
def test_how_one_process_ends(outcome, ending, warm_python, tmp_path):
    code, err, error = ending
    done = warm_python("-c", TRAIN, outcome, "linear", "--output", "mine")
    assert (done.returncode, done.stdout, done.stderr) == (code, "training local 100 mine\n", err)
    status = json.loads((tmp_path / "mine" / "status.json").read_text())
    assert error is None or (status["state"], status["error"]) == ("failed", error)


SURROUNDINGS = {
    "engine local among four": (
        ["linear", "--engine", "local"],
        horovodrun(0, 0),
        r"WorldError \(rank 0 on [^ ]+\): engine local trains one rank alone, but horovodrun started 4; "
        r"drop --engine local, or start one process\.\n",
    ),
    "a launcher that contradicts itself": (
        ["linear"],
        horovodrun(5, 0),
        r"TopologyError: HOROVOD_RANK must lie in \[0, HOROVOD_SIZE=4\), got 5; .*\n",
    ),
    "no images": (["imagenet"], {}, r"DataError: .*\n"),
    "an output below a file": (
        ["linear", "--output", f"{sys.executable}/sub"],
        {},
        r"OutputError: cannot write to the run folder .*/sub: Not a directory; give a writable --output\.\n",
    ),
    "more ranks than the batch": (
        ["linear", "--batch-size", "2"],
        horovodrun(0, 0),
        r"PlanError \(rank 0 on [^ ]+\): batch_size must be a multiple of 4 ranks, got 2; take 4\.\n",
    ),
}


@pytest.mark.parametrize(("argv", "environ", "message"), SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_bad_surroundings_stop_before_training(argv, environ, message, warm_python):
    done = warm_python("-c", TRAIN, "none", *argv, environ=environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(message, done.stderr), done.stderr


def test_what_a_user_could_do_before_he_can_do_now():
    before = (REPOSITORY / "tests/support/surface.txt").read_text().splitlines()
    now = surface()
    assert [entry for entry in before if entry not in now] == []
