"""Job scripts: the sites' shapes, the checked-in scripts, quoting, refusals, submission."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from paths import REPOSITORY
from refusals import refusal
from site_scripts import SCRIPTS

from hvdtrain.errors import HvdtrainError, JobError
from hvdtrain.tools import slurm
from hvdtrain.tools.slurm import Options, quoted, render
from hvdtrain.tools.slurm.job_check import check_script
from hvdtrain.tools.slurm.script import syntax_errors
from hvdtrain.tools.slurm.sites import SITES

# A first job of seconds; 64 examples a step can be shared by as many ranks.
LINEAR = ("python", "-m", "hvdtrain.torch", "linear", "--batch-size", "64", "--epochs", "5")
SHOW = ("python", "-c", 'import os; print(os.environ["TF_CONFIG"])')
GENERIC = SITES["generic"]


def command_of(launcher: str) -> tuple[str, ...]:
    return SHOW if launcher == "tf-config" else LINEAR


def rendered(name: str, launcher: str) -> str:
    return render(SITES[name], Options(nodes=2, launcher=launcher), command_of(launcher))


@pytest.mark.parametrize(("name", "launcher"), SCRIPTS)
def test_the_script_kept_under_slurm_is_what_is_rendered(name, launcher):
    path = REPOSITORY / "slurm" / name / f"{launcher}.sbatch"
    flags = ["--site", name, "--nodes", "2", "--launcher", launcher, "--", *command_of(launcher)]
    remedy = f"python -m hvdtrain slurm {shlex.join(flags)} > {path.relative_to(REPOSITORY)}"
    assert path.is_file(), f"make it: {remedy}"
    assert path.read_bytes().decode() == rendered(name, launcher), f"make it anew: {remedy}"


def test_no_script_is_kept_that_no_site_renders():
    kept = {path.relative_to(REPOSITORY / "slurm").as_posix() for path in REPOSITORY.glob("slurm/*/*.sbatch")}
    assert kept == {f"{name}/{launcher}.sbatch" for name, launcher in SCRIPTS}


@pytest.mark.parametrize(("name", "launcher"), SCRIPTS)
def test_our_own_scripts_are_faultless(name, launcher):
    script = rendered(name, launcher)
    assert check_script(script, None if name == "generic" else SITES[name]) == []
    assert all(finding.note and "--mpi" in finding.wrong for finding in check_script(script))
    assert syntax_errors(script) == []
    assert max(map(len, script.splitlines())) <= 120


def requested(script: str) -> set[str]:
    return set(re.findall(r"^#SBATCH --(\S+)", script, re.MULTILINE))


OPTIONS = {  # what the script then requests, and no more of those names
    "nodes=16": Options(nodes=16),
    "nodes=5": Options(nodes=3, spare=2),
    "time=1-12:00:00": Options(time="1-12:00:00"),
    "account=m1234_g": Options(account="m1234_g"),
    "partition=develbooster": Options(partition="develbooster"),
    "reservation=course-24": Options(reservation="course-24"),
    "job-name=cifar": Options(job_name="cifar"),
    "ntasks-per-node=1 gres=gpu:1": Options(gpus_per_node=1),
    "cpus-per-task=6": Options(cpus_per_task=6),
    "requeue=expedite": Options(expedite=True),
}


@pytest.mark.parametrize(("wanted", "options"), OPTIONS.items(), ids=OPTIONS)
def test_an_option_reaches_the_script(wanted, options):
    names = tuple(each.partition("=")[0] for each in wanted.split())
    script = render(SITES["juwels-booster"], options, LINEAR)
    assert {option for option in requested(script) if option.partition("=")[0] in names} == set(wanted.split())


def test_part_of_a_node_takes_its_part():
    one = render(SITES["capella"], Options(gpus_per_node=2), LINEAR)
    assert {"mem=375G", "gres=gpu:2", "ntasks-per-node=2", "cpus-per-task=14"} <= requested(one)
    for name in ("juwels-booster", "perlmutter"):
        assert "CUDA_VISIBLE_DEVICES" in render(SITES[name], Options(), LINEAR)
        assert "CUDA_VISIBLE_DEVICES" not in render(SITES[name], Options(gpus_per_node=1), LINEAR)


def test_the_module_and_the_comments_are_of_what_trains():
    script = render(SITES["perlmutter"], Options(), ("python", "-m", "hvdtrain.tensorflow", "digits"))
    assert "module load tensorflow\n" in script
    assert re.search(r"--signal=USR2@120 +# .*hvdtrain saves and requeues the job\n", script)
    another = render(GENERIC, Options(), ("python", "train.py"))
    assert re.search(r"--signal=USR2@120 +# .*delete it if COMMAND ignores USR2\n", another)


AWKWARD = {  # argument: what the command gets where WORK is "/my work"; the argument itself where it is empty
    "two words": "",
    "it's": "",
    'say "so"': "",
    "a; rm -rf /tmp/none && b | c > d & (e) `f`": "",
    "$(hostname) $((1 + 1)) $1 $? $": "",
    "*.py [a-z] ~ {1,2} !x #y": "",
    r"a\b\\c\n": "",
    "one\ntwo": "",
    "": "",
    "-n": "",
    "--x=y z": "",
    "$WORK": "/my work",
    "${WORK}/data": "/my work/data",
    "--data-dir=$WORK/x y": "--data-dir=/my work/x y",
    '"$WORK" `id` $(id) \\': '"/my work" `id` $(id) \\',
}


def test_arguments_reach_the_command_unchanged_but_for_variables():
    code = f"show() {{ printf '%s\\0' \"$@\"; }}; show {quoted([*AWKWARD, '$NONE'])}"
    environ = {"PATH": os.defpath, "WORK": "/my work"}
    done = subprocess.run(["bash", "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == [*(becomes or argument for argument, becomes in AWKWARD.items()), ""]


TORCHRUN_ARGUMENTS = {
    "module": (LINEAR, "-m hvdtrain.torch linear --batch-size 64 --epochs 5"),
    "file": (("python3", "train.py", "--lr", "1"), "train.py --lr 1"),
    "python's flag": (("python", "-u", "train.py"), "--no-python python -u train.py"),
    "program": (("./train", "$WORK"), '--no-python ./train "$WORK"'),
}


@pytest.mark.parametrize(("command", "arguments"), TORCHRUN_ARGUMENTS.values(), ids=TORCHRUN_ARGUMENTS.keys())
def test_torchrun_takes_no_python(command, arguments):
    assert render(GENERIC, Options(launcher="torchrun"), command).endswith(f"\n' torchrun {arguments}\n")


def run_step(script: str, folder: Path, node: int, job: str, **changed: str) -> list[str]:
    """What a task of the step is started with; supervise, srun, scontrol and torchrun are stand-ins that only print it.

    What it starts gets at once the signal of the time limit, which must not end it.
    """
    stand_ins = {
        "python": 'while [[ $1 != -- ]]; do shift; done; exec "${@:2}"',
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "scontrol": 'printf "%s\\n" nid001 nid002 nid003',
        "torchrun": 'kill -USR2 $$; printf "%s\\n" "$OMP_NUM_THREADS" "$CUDA_VISIBLE_DEVICES" "$@"',
        "show": 'kill -USR2 $$; printf "%s\\n" "$TF_CONFIG" "$@"',
    }
    for name, body in stand_ins.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environ = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": job,
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NODELIST": "nid[001-003]",
        "SLURMD_NODENAME": f"nid00{node + 1}",
        "SLURM_CPUS_PER_TASK": "96",
        **changed,
    }
    done = subprocess.run(["bash"], input=script, env=environ, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "tf-config"])
@pytest.mark.parametrize(("spare", "flag"), [(0, ""), (2, " --spare=2")])
def test_every_launcher_is_supervised_and_has_the_requested_plugin(launcher, spare, flag):
    script = render(GENERIC, Options(nodes=3, spare=spare, launcher=launcher, mpi="pmi2"), LINEAR)
    assert f"\npython -m hvdtrain supervise{flag} -- \\\n  srun --kill-on-bad-exit=1 --mpi=pmi2 " in script
    assert check_script(script) == []


PORTS = {"9": 10009, "40089": 10089, "12340000": 10000}  # a leading 0 is not octal


@pytest.mark.parametrize(("job", "port"), PORTS.items())
@pytest.mark.parametrize("node", [0, 2])
def test_the_torchrun_of_a_node(tmp_path, job, port, node):
    script = render(SITES["juwels-booster"], Options(nodes=3, launcher="torchrun"), LINEAR)
    assert run_step(script, tmp_path, node, job) == [
        "24",
        "0,1,2,3",
        "--nnodes=3",
        "--nproc-per-node=4",
        "--rdzv-backend=c10d",
        f"--rdzv-id={job}",
        f"--rdzv-endpoint=nid001i:{port}",
        f"--rdzv-conf=is_host={int(node == 0)}",
        f"--local-addr=nid00{node + 1}i",
        *LINEAR[1:],
    ]


def test_the_torchrun_of_a_node_in_the_order_of_its_gpus(tmp_path):
    script = render(SITES["perlmutter"], Options(nodes=3, launcher="torchrun"), LINEAR)
    assert run_step(script, tmp_path, 0, "22", OMP_NUM_THREADS="7")[:2] == ["7", "3,2,1,0"]


@pytest.mark.parametrize(("job", "port"), PORTS.items())
@pytest.mark.parametrize("node", [0, 2])
def test_the_tf_config_of_a_node(tmp_path, job, port, node):
    script = render(GENERIC, Options(nodes=3, launcher="tf-config"), ("show", "it's", "$SLURM_JOB_ID"))
    config, *arguments = run_step(script, tmp_path, node, job)
    assert json.loads(config) == {
        "cluster": {"worker": [f"nid00{number}:{port}" for number in (1, 2, 3)]},
        "task": {"type": "worker", "index": node},
    }
    assert arguments == ["it's", job]


TO = ["--site", "capella"]
REFUSED = {  # argv: the key of the one line
    "no site": (["--", "python"], "--site is missing"),
    "unknown site": (["--site", "capela", "--", "x"], "unknown site 'capela'. Did you mean capella?"),
    "no command": (TO, "no command to run; give it after --"),
    "no -- before the command": ([*TO, "python", "-m", "hvdtrain.torch", "linear"], "no -- before the command"),
    "an argument too many before the command": ([*TO, "2", "--", "x"], "'2' belongs to no flag"),
    "a rank's variable": ([*TO, "--", "python", "x.py", "--out=${SLURM_PROCID}"], "the command's $SLURM_PROCID would"),
    "no node": ([*TO, "--nodes", "0", "--", "x"], "--nodes must be at least 1"),
    "no GPU": ([*TO, "--gpus-per-node", "0", "--", "x"], "--gpus-per-node must be at least 1"),
    "too many GPUs": ([*TO, "--gpus-per-node", "5", "--", "x"], "--gpus-per-node must lie in [1, 4] at ZIH Capella"),
    "too many CPUs": ([*TO, "--cpus-per-task", "15", "--", "x"], "4 tasks x 15 CPUs exceed the 56 CPUs of a node"),
    "time": ([*TO, "--time", "2h", "--", "x"], "--time must read like 02:00:00"),
    "account of another form": (
        ["--site", "jean-zay", "--account", "abc", "--", "x"],
        "--account must read like abc@v100 at this site, got 'abc'.",
    ),
    "a job name that would write a line": ([*TO, "--job-name", "a\nrm x", "--", "x"], r"got 'a\nrm x'."),
    "a job name of two words": ([*TO, "--job-name", "a b", "--", "x"], "--job-name must be one word"),
    "a command that a terminal would act on": ([*TO, "--", "python", "\x1b[31m"], r"got '\x1b[31m'."),
    "more nodes than there are": ([*TO, "--nodes", "9" * 30, "--", "x"], "--nodes must be at most 1000000"),
    "plugin": ([*TO, "--mpi", "openmp", "--", "x"], "--mpi must be pmix, pmi2, cray_shasta, pspmi or none"),
    "launcher": ([*TO, "--launcher", "mpirun", "--", "x"], "--launcher must be 'srun', 'torchrun' or 'tf-config'"),
    "unknown flag": (["--sites", "capella", "--", "x"], "unknown flag '--sites'. Did you mean --site?"),
    "no file": (["--check", "/nowhere/job.sh"], "got /nowhere/job.sh: No such file or directory."),
}


@pytest.mark.parametrize(("argv", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_in_one_line(argv, message):
    refused = refusal(HvdtrainError, slurm.main, argv)
    assert message in refused and "\n" not in refused


def test_the_command_line_prints_a_script(capsys):
    argv = ["--site", "juwels-booster", "--nodes", "16", "--", "python", "-m", "hvdtrain.torch", "imagenet"]
    assert slurm.main(argv) == 0
    assert capsys.readouterr() == (render(SITES["juwels-booster"], Options(nodes=16), argv[5:]), "")


def test_the_list_of_sites(capsys):
    assert slurm.main(["--list"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "site"
    assert [row.split()[0] for row in rows] == list(SITES)
    assert " ".join(rows[1].split()) == "juwels-booster 4 4 x 24 02:00:00 pmix booster JSC JUWELS Booster"


def sbatch(folder: Path, body: str) -> None:
    (folder / "sbatch").write_text(f"#!/bin/bash\n{body}\n")
    (folder / "sbatch").chmod(0o755)


def test_submit_pipes_the_script_and_prints_the_job(tmp_path, monkeypatch, capsys):
    sbatch(tmp_path, f'echo "$@" > {tmp_path}/argv; cat > {tmp_path}/script; echo "42;daint"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert slurm.main(["--site", "piz-daint", "--nodes", "2", "--submit", "--", *LINEAR]) == 0
    assert capsys.readouterr().out == "42\n"
    assert (tmp_path / "argv").read_text() == "--parsable\n"
    assert (tmp_path / "script").read_text() == rendered("piz-daint", "srun")


def test_why_a_script_was_not_submitted(tmp_path, monkeypatch):
    argv = ["--site", "generic", "--partition", "x", "--submit", "--", *LINEAR]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal(JobError, slurm.main, argv).startswith("--submit needs sbatch on the PATH, got none")
    sbatch(tmp_path, 'echo "sbatch: error: invalid partition specified: x" >&2; exit 1')
    message = "sbatch refused the script: error: invalid partition specified: x; change the flag it names."
    assert refusal(JobError, slurm.main, argv) == message
