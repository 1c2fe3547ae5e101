"""No input that others wrote ends in a traceback, a hang or a memory bomb: known cases by name, and random ones."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from costs import growth

from hvdtrain import untrusted
from hvdtrain.core import recipe
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch import slurm, topology
from hvdtrain.run import options
from hvdtrain.tools import predict
from hvdtrain.tools.doctor import gather
from hvdtrain.tools.slurm.job_check import check_script

FUZZ = Path(__file__).parent / "support" / "fuzz.py"
CHEAP = ("recipe", "validate", "environment", "step", "nodes", "child", "library", "command_line")
MILLISECONDS_EACH = ("script", "slurm", "check", "points", "figures", "flags", "plan")
INPUTS = {**dict.fromkeys(CHEAP, 1000), **dict.fromkeys(MILLISECONDS_EACH, 200), "folders": 400}
RANDOM = [
    *(pytest.param(name, INPUTS[name] // 10, id=name) for name in (*CHEAP, "script", "slurm", "folders")),
    *(pytest.param(name, number, id=f"more {name}", marks=pytest.mark.slow) for name, number in INPUTS.items()),
]
LAUGHS = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
ENTRY = "default: {model: linear, dataset: linear, batch_size: 1, base_lr: 1, epochs: "
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "299999700", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP |= {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": ",".join(["1(x999999)"] * 300)}
HEAD = "#!/bin/bash\n"


def yaml(text: str) -> Callable[[], object]:
    def read() -> object:
        Path("mine.yaml").write_text(text)
        return recipe.load("mine.yaml")

    return read


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "aliases of aliases": (yaml(LAUGHS), "mine.yaml line 5 holds more than 10000 values, those of aliases too."),
    "an alias in itself": (yaml("a: &a [*a]"), "mine.yaml line 1 has an alias of what it stands in."),
    "brackets in brackets": (yaml("[" * 60_000), "mine.yaml line 1 goes more than 10 levels deep."),
    "more than a recipe": (
        yaml("# x\n" * 20_000),
        "cannot read recipe file mine.yaml: it must have at most 65,536 bytes; give a readable .yaml file.",
    ),
    "a number of 5,000 digits": (
        yaml(f"{ENTRY}{'9' * 5000}}}"),
        "mine.yaml is not YAML: a number has more than 4,300 digits.",
    ),
    "a number that is none": (yaml("a: !!int ''"), "mine.yaml is not YAML: a value is none of its tag."),
    "a chain of entries": (
        yaml(
            "\n".join(f"e{i}: {{extends: 'mine.yaml:e{i + 1}'}}" for i in range(900))
            + "\ndefault: {extends: mine.yaml:e0}"
        ),
        "mine.yaml extends more than 10 entries, one the other; name a nearer one.",
    ),
    "an escape code": (
        yaml('default: {model: "\\e[2J", dataset: linear, batch_size: 1, base_lr: 1, epochs: 1}'),
        "model must be one of linear, resnet50, resnet101, gpt, inception_v3, vgg16, or an import path such as "
        r"package.module:name, got '\x1b[2J'.",
    ),
    "a name with an escape code": (
        lambda: recipe.load("\x1b[2J.yaml"),
        r"a name must have up to 4096 characters, all printable, got '\x1b[2J.yaml'.",
    ),
    "a file that never ends": (
        lambda: (Path("zero.yaml").symlink_to("/dev/zero"), recipe.load("zero.yaml")),
        "cannot read recipe file zero.yaml: it is not a regular file; give a readable .yaml file.",
    ),
    "a pipe without a writer": (
        lambda: (os.mkfifo("pipe.yaml"), recipe.load("pipe.yaml")),
        "cannot read recipe file pipe.yaml: it is not a regular file; give a readable .yaml file.",
    ),
    "flag of 4,000 digits": (
        lambda: options.parse_run("x", ["linear", "--epochs", "9" * 4000]),
        f"--epochs must be at most 1000000000, got '{'9' * 37}...{'9' * 38}'; --help lists the flags.",
    ),
    "tasks of 300 million hosts": (
        lambda: topology.discover({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, "host"),
        "SLURM_STEP_TASKS_PER_NODE must add up to SLURM_STEP_NUM_TASKS=1, got 1(x999999),1(x999999),1(x999999),1(x99..."
        "9999),1(x999999),1(x999999),1(x999999); start every rank with srun, and set none of its variables by hand.",
    ),
    "a job id that leaves its folder": (
        lambda: topology.discover({"SLURM_JOB_ID": "../../x"}),
        "SLURM_JOB_ID must be a job's number, got '../../x'; unset it outside a job.",
    ),
    "a first host of brackets": (
        lambda: slurm.first_host("[" * 20_000),
        f"SLURM_STEP_NODELIST must name hosts, as node[01-04], got '{'[' * 37}...{'[' * 38}'.",
    ),
    "100 million nodes": (
        lambda: slurm.hosts("a[0-99999999]"),
        "a list of nodes must name at most 100000 hosts, as nid[001-004], got 'a[0-99999999]'.",
    ),
    "nodes in three dimensions": (
        lambda: slurm.hosts("a[0-99999]b[0-99999]c[0-99999]"),
        "a list of nodes must name at most 100000 hosts, as nid[001-004], got 'a[0-99999]b[0-99999]c[0-99999]'.",
    ),
    "16,384 forecasts": (
        lambda: predict.main(["--point", "4:9", "--point", "8:5", "--ranks", ",".join(map(str, range(1, 800)))]),
        "--ranks must be at most 32 numbers, got 799.",
    ),
    "no seconds worth the name": (
        lambda: predict.main(["--point", "4:1e-300", "--point", "8:1e-310"]),
        "--point must have 1 to 16384 ranks and 1e-09 to 1e+12 seconds, got '4:1e-300'.",
    ),
}


@pytest.mark.parametrize(("read", "message"), CASES.values(), ids=CASES.keys())
def test_refused_at_once_in_one_line(read, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HvdtrainError) as refused:
        read()
    assert str(refused.value) == message


SCRIPTS = {  # of so many lines, where they have lines
    "a quote that never ends": lambda n: 'echo "a\n' + "echo b\n" * n,
    "quotes in it": lambda n: 'echo "a\n' + "echo 'b' it's\n" * n,
    "quotes that end a line later": lambda n: 'echo "a\n' * (n + 1),
    "here-documents": lambda n: "cat <<EOF\nx\nEOF\n" * n,
    "here-documents without an end": lambda n: "cat <<EOF\n" * n,
    "nested commands": lambda n: "$(" * (n // 4) + ")" * (n // 4),
    "nested sums": lambda n: "$((" * (n // 4) + "SLURM_JOB_ID" + ")" * (n // 2),
    "sums of commands": lambda n: "$(( $(echo SLURM_JOB_ID " * (n // 2),
    "endpoints": lambda n: "--rdzv-endpoint=" * n,
    "steps and options": lambda n: "".join(f"#SBATCH --a{i}=1\n" for i in range(n // 2)) + "srun python x\n" * (n // 2),
    "one token": lambda n: "srun '" + "x" * 20 * n,
    "options alone": lambda n: "srun " + "- " * 10 * n,
    "redirections": lambda n: "<" * 10 * n + "(",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_the_check_of_a_job_script_grows_with_its_length(script):
    assert isinstance(check_script(HEAD + script(10_000)), list)
    assert growth(lambda lines: check_script(HEAD + script(lines)), 200) < 13


def test_the_tasks_of_many_hosts_are_never_written_out():
    # 3 x 999,999 hosts are true to their number: found, and at once.
    environ = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "1(x999999),2(x3),1(x999999)", "SLURM_STEP_NUM_TASKS": "2000004"}
    for node, tasks in ((0, 1), (999_998, 1), (999_999, 2), (1_000_001, 2), (1_000_002, 1), (2_000_000, 1)):
        assert topology.discover({**environ, "SLURM_NODEID": str(node)}, "host").local_size == tasks


DAMAGED = {
    "a long number": '{"rank": ' + "9" * 5000 + "}",
    "depth": "[" * 100_000,
    "text for a number": '{"size": "two"}',
    "text for a size": '{"seconds": {"x": 1}}',
    "cut short": "{",
    "a number": "1",
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_childs_damaged_line_has_no_values(line):
    assert gather.values_in(line) == {}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\x1b[2J\udcff", r"'a\x1b[2J\udcff'"),
        (10**9999, "a number of some 10000 digits"),
        ([10**9999], "[a number of some 10000 digits]"),
        ("x" * 10**6, f"'{'x' * 37}...{'x' * 38}'"),
        (Path("a"), "PosixPath('a')"),
        (None, "None"),
    ],
    ids=["an escape code", "a long number", "in a list", "a long text", "a path", "nothing"],
)
def test_a_value_is_shown_on_a_line(value, shown):
    assert untrusted.quoted(value) == shown


@pytest.mark.parametrize(("name", "count"), RANDOM)
def test_random_inputs(name, count):
    """To try input NUMBER again: python tests/support/fuzz.py READER NUMBER 1."""
    done = subprocess.run(warm.command("hvdtrain", FUZZ, name, 1, count), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["mib"] < 1024


TOOL = """
import threading, time
from hvdtrain import cli
{at_import}
def main(argv):
    print("begun", flush=True)
    try:
        {inside}
    finally:
        {after}
    return 0
"""
WAIT = "time.sleep(60)"
MOMENTS = {
    "while it is imported": (f"print('begun', flush=True); {WAIT}", "pass", "pass"),
    "while it works": ("", WAIT, "pass"),
    "while it puts in order what it leaves": ("", WAIT, WAIT),
    "while a thread of it continues": ("", f"threading.Thread(target=lambda: {WAIT}).start(); {WAIT}", "pass"),
    "after its end, while a thread continues": ("", f"threading.Thread(target=lambda: {WAIT}).start()", "pass"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_twice_ends_a_tool_without_a_traceback(moment, tmp_path):
    at_import, inside, after = MOMENTS[moment]
    (tmp_path / "slow.py").write_text(TOOL.format(at_import=at_import, inside=inside, after=after))
    (tmp_path / "sitecustomize.py").write_text("from hvdtrain import cli\ncli.COMMANDS['slow'] = ('slow', '')\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    tool = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain", "slow"],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert tool.stdout.readline() == "begun\n"
    time.sleep(0.2)
    tool.send_signal(signal.SIGINT)
    time.sleep(0.3)
    tool.send_signal(signal.SIGINT)
    _, printed = tool.communicate()
    assert tool.returncode == 130
    assert printed.strip() in {"interrupted", ""}
