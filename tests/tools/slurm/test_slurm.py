"""Job scripts: the sites' shapes, the checked-in scripts, quoting, refusals, submission."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from paths import REPOSITORY

from hvdtrain.errors import HvdtrainError, JobError
from hvdtrain.tools import slurm
from hvdtrain.tools.slurm import Options, quoted, render
from hvdtrain.tools.slurm.job_check import check
from hvdtrain.tools.slurm.sites import SITES

# A first job of seconds; 64 examples a step can be shared by as many ranks.
LINEAR = ("python", "-m", "hvdtrain.torch", "linear", "--batch-size", "64", "--epochs", "5")
SHOW = ("python", "-c", 'import os; print(os.environ["TF_CONFIG"])')
EXAMPLES = [(name, launcher) for name, site in SITES.items() for launcher in site.launchers]
GENERIC = SITES["generic"]


def command_of(launcher: str) -> tuple[str, ...]:
    return SHOW if launcher == "tf-config" else LINEAR


def rendered(name: str, launcher: str) -> str:
    return render(SITES[name], Options(nodes=2, launcher=launcher), command_of(launcher))


@pytest.mark.parametrize(("name", "launcher"), EXAMPLES)
def test_the_script_kept_under_slurm_is_what_is_rendered(name, launcher):
    path = REPOSITORY / "slurm" / name / f"{launcher}.sbatch"
    flags = ["--site", name, "--nodes", "2", "--launcher", launcher, "--", *command_of(launcher)]
    remedy = f"python -m hvdtrain slurm {shlex.join(flags)} > {path.relative_to(REPOSITORY)}"
    assert path.is_file(), f"make it: {remedy}"
    assert path.read_bytes().decode() == rendered(name, launcher), f"make it anew: {remedy}"


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "tf-config"])
def test_a_job_may_be_expedited(launcher):
    options = Options(nodes=2, launcher=launcher, expedite=True, gpus_per_node=1, cpus_per_task=4)
    text = render(GENERIC, options, command_of(launcher))
    assert re.findall(r"^#SBATCH (--requeue\S*)", text, re.MULTILINE) == ["--requeue=expedite"]
    assert check(text) == []


def test_no_script_is_kept_that_no_site_renders():
    kept = {path.relative_to(REPOSITORY / "slurm").as_posix() for path in REPOSITORY.glob("slurm/*/*.sbatch")}
    assert kept == {f"{name}/{launcher}.sbatch" for name, launcher in EXAMPLES}


@pytest.mark.parametrize(("name", "launcher"), EXAMPLES)
def test_check_calls_the_script_kept_under_slurm_faultless(name, launcher, capsys):
    path = REPOSITORY / "slurm" / name / f"{launcher}.sbatch"
    assert slurm.main(["--check", str(path), "--site", name]) == 0
    ready = "nothing wrong found; it is ready to submit."
    prints = "no training step was understood: it runs srun bash."
    assert capsys.readouterr().out == f"{path}: {prints if launcher == 'tf-config' else ready}\n"


@pytest.mark.parametrize(("name", "launcher"), EXAMPLES)
def test_our_own_scripts_are_faultless(name, launcher):
    script = rendered(name, launcher)
    assert check(script, None if name == "generic" else SITES[name]) == []
    assert check(script) in ([], [note for note in check(script) if note.note and "--mpi" in note.wrong])
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert max(map(len, script.splitlines())) <= 120


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "tf-config"])
@pytest.mark.parametrize("name", SITES)
def test_every_script_carries_what_keeps_a_job_alive(name, launcher):
    lines = [line.partition("  #")[0].rstrip() for line in rendered(name, launcher).splitlines()]
    wanted = {"#SBATCH --signal=USR2@120", "#SBATCH --requeue", "#SBATCH --open-mode=append"}
    assert wanted | {'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'} <= set(lines)
    (step,) = (number for number, line in enumerate(lines) if line.lstrip().startswith("srun"))
    assert lines[step - 1] == "python -m hvdtrain supervise -- \\"
    assert lines[step].split()[1] == "--kill-on-bad-exit=1"


SHAPES = {  # what the srun form requests, of each site
    "piz-daint": "ntasks-per-node=1 cpus-per-task=12 constraint=gpu hint=nomultithread switches=1 time=00:15:00",
    "juwels-booster": "ntasks-per-node=4 gres=gpu:4 cpus-per-task=24 partition=booster time=02:00:00",
    "jean-zay": "ntasks-per-node=4 gres=gpu:4 cpus-per-task=10 hint=nomultithread time=01:00:00",
    "jean-zay-gpu-p2": "ntasks-per-node=8 gres=gpu:8 cpus-per-task=3 partition=gpu_p2 hint=nomultithread time=01:00:00",
    "capella": "ntasks-per-node=4 gres=gpu:4 cpus-per-task=14 mem=750G time=01:00:00",
    "alpha": "ntasks-per-node=8 gres=gpu:8 cpus-per-task=6 mem=900G time=01:00:00",
    "perlmutter": "ntasks-per-node=4 gres=gpu:4 cpus-per-task=32 constraint=gpu time=00:30:00",
    "cori-gpu": "ntasks-per-node=8 gres=gpu:8 cpus-per-task=10 constraint=gpu time=00:30:00",
    "generic": "ntasks-per-node=4 gres=gpu:4 cpus-per-task=8 time=01:00:00",
}
FORMS = {  # the other forms
    ("capella", "torchrun"): "ntasks-per-node=1 gres=gpu:4 cpus-per-task=56 mem=750G time=01:00:00",
    ("alpha", "torchrun"): "ntasks-per-node=1 gres=gpu:8 cpus-per-task=48 mem=900G time=01:00:00",
    ("capella", "tf-config"): "ntasks-per-node=1 gres=gpu:1 cpus-per-task=14 mem=64000M time=01:00:00",
    ("alpha", "tf-config"): "ntasks-per-node=1 gres=gpu:1 cpus-per-task=6 mem=64000M time=01:00:00",
    ("juwels-booster", "torchrun"): "ntasks-per-node=1 gres=gpu:4 cpus-per-task=96 partition=booster time=02:00:00",
}
COMMON = {"job-name=hvdtrain", "nodes=2", "output=%x-%j.out", "open-mode=append", "signal=USR2@120", "requeue"}


def requested(script: str) -> set[str]:
    return set(re.findall(r"^#SBATCH --(\S+)", script, re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "launcher", "shape"),
    [(name, "srun", shape) for name, shape in SHAPES.items()] + [(*form, shape) for form, shape in FORMS.items()],
)
def test_what_a_site_is_asked_for(name, launcher, shape):
    assert requested(rendered(name, launcher)) == COMMON | set(shape.split())


def test_every_site_has_its_shape_tested():
    assert set(SHAPES) == set(SITES)


LINES = {  # site: lines its srun form has, without their comments
    "piz-daint": (  # no --mpi: its SLURM knows but one
        "module load daint-gpu PyTorch",
        'export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"',
        "export NCCL_DEBUG=INFO",
        "export NCCL_IB_HCA=ipogif0",
        "  srun --kill-on-bad-exit=1 python -m hvdtrain.torch linear --batch-size 64 --epochs 5",
    ),
    "juwels-booster": (
        "export CUDA_VISIBLE_DEVICES=0,1,2,3",
        "  srun --kill-on-bad-exit=1 --mpi=pmix python -m hvdtrain.torch linear --batch-size 64 --epochs 5",
    ),
    "capella": ("module load release/24.04 GCC/12.3.0 OpenMPI/4.1.5 PyTorch/2.1.2-CUDA-12.1.1",),
    "alpha": ("# Give your project with `sbatch --account=NAME FILE`, where the centre requires one.",),
    "jean-zay": ("# Give your project with `sbatch --account=NAME FILE`; here it reads like abc@v100.",),
    "perlmutter": (
        "module load pytorch",
        "export FI_MR_CACHE_MONITOR=userfaultfd",
        "export HDF5_USE_FILE_LOCKING=FALSE",
        "  srun --kill-on-bad-exit=1 --mpi=cray_shasta \\",
        "  env CUDA_VISIBLE_DEVICES=3,2,1,0 python -m hvdtrain.torch linear --batch-size 64 --epochs 5",
    ),
}


@pytest.mark.parametrize(("name", "lines"), LINES.items(), ids=LINES.keys())
def test_modules_variables_and_plugin_of_a_site(name, lines):
    assert set(lines) <= {line.partition("  #")[0].rstrip() for line in rendered(name, "srun").splitlines()}


OPTIONS = {  # options: what the script then requests, and no more of that name
    "nodes": (Options(nodes=16), "nodes=16"),
    "spare nodes": (Options(nodes=3, spare=2), "nodes=5"),
    "time": (Options(time="1-12:00:00"), "time=1-12:00:00"),
    "account": (Options(account="m1234_g"), "account=m1234_g"),
    "partition": (Options(partition="develbooster"), "partition=develbooster"),
    "reservation": (Options(reservation="course-24"), "reservation=course-24"),
    "job name": (Options(job_name="cifar"), "job-name=cifar"),
    "one GPU, tasks": (Options(gpus_per_node=1), "ntasks-per-node=1"),
    "one GPU": (Options(gpus_per_node=1), "gres=gpu:1"),
    "CPUs": (Options(cpus_per_task=6), "cpus-per-task=6"),
}


@pytest.mark.parametrize(("options", "wanted"), OPTIONS.values(), ids=OPTIONS.keys())
def test_an_option_reaches_the_script(options, wanted):
    name = wanted.partition("=")[0]
    found = [
        option
        for option in requested(render(SITES["juwels-booster"], options, LINEAR))
        if option.startswith(f"{name}=")
    ]
    assert found == [wanted]


def test_part_of_a_node_takes_its_part():
    one = render(SITES["capella"], Options(gpus_per_node=2), LINEAR)
    assert {"mem=375G", "gres=gpu:2", "ntasks-per-node=2", "cpus-per-task=14"} <= requested(one)
    for name in ("juwels-booster", "perlmutter"):
        assert "CUDA_VISIBLE_DEVICES" in render(SITES[name], Options(), LINEAR)
        assert "CUDA_VISIBLE_DEVICES" not in render(SITES[name], Options(gpus_per_node=1), LINEAR)


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "tf-config"])
def test_the_plugin_that_was_asked_for(launcher):
    script = render(SITES["piz-daint"], Options(mpi="pmi2", launcher=launcher), LINEAR)
    assert "\n  srun --kill-on-bad-exit=1 --mpi=pmi2 " in script


def test_the_module_is_of_the_framework_that_trains():
    script = render(SITES["perlmutter"], Options(), ("python", "-m", "hvdtrain.tensorflow", "digits"))
    assert "module load tensorflow\n" in script


@pytest.mark.parametrize(
    ("command", "comment"),
    [
        pytest.param(LINEAR, "hvdtrain saves and requeues the job", id="hvdtrain"),
        pytest.param(("python", "train.py"), "delete it if COMMAND ignores USR2", id="another program"),
    ],
)
def test_the_signal_is_explained_for_the_command(command, comment):
    assert re.search(rf"--signal=USR2@120 +# .*{comment}\n", render(GENERIC, Options(), command))


AWKWARD = {
    "plain": ["python", "-m", "hvdtrain.torch", "imagenet:amp", "--lr=0.2"],
    "space": ["echo", "two words"],
    "single quote": ["echo", "it's"],
    "double quote": ["echo", 'say "so"'],
    "operators": ["echo", "a; rm -rf /tmp/none && b | c > d & (e) `f`"],
    "substitution": ["echo", "$(hostname) $((1 + 1)) $1 $? $"],
    "glob": ["echo", "*.py [a-z] ~ {1,2} !x #y"],
    "backslash": ["echo", r"a\b\\c\n"],
    "line break": ["echo", "one\ntwo"],
    "empty": ["echo", ""],
    "dash": ["--", "-n", "--x=y z"],
}


@pytest.mark.parametrize("arguments", AWKWARD.values(), ids=AWKWARD.keys())
def test_arguments_reach_the_command_unchanged(arguments):
    assert through_bash(quoted(arguments)) == arguments


EXPANDED = {  # argument: what it becomes where WORK is "/my work"
    "$WORK": "/my work",
    "${WORK}/data": "/my work/data",
    "--data-dir=$WORK/x y": "--data-dir=/my work/x y",
    '"$WORK" `id` $(id) \\': '"/my work" `id` $(id) \\',
    "$NONE": "",
}


@pytest.mark.parametrize(("argument", "becomes"), EXPANDED.items(), ids=EXPANDED.keys())
def test_a_variable_is_filled_in_by_the_job_and_nothing_else_is(argument, becomes):
    assert through_bash(quoted([argument])) == [becomes]


def through_bash(text: str) -> list[str]:
    code = f"show() {{ printf '%s\\0' \"$@\"; }}; show {text}"
    environ = {"PATH": os.defpath, "WORK": "/my work"}
    done = subprocess.run(["bash", "-c", code], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


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
def test_every_launcher_is_supervised(launcher, spare, flag):
    script = render(GENERIC, Options(nodes=3, spare=spare, launcher=launcher), LINEAR)
    assert f"\npython -m hvdtrain supervise{flag} -- \\\n  srun --kill-on-bad-exit=1" in script
    assert check(script) == []


PORTS = {"22": 10022, "40089": 10089, "9": 10009, "12340000": 10000, "59999": 19999}  # a leading 0 is not octal


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
@pytest.mark.parametrize("node", [0, 1, 2])
def test_the_tf_config_of_a_node(tmp_path, job, port, node):
    script = render(GENERIC, Options(nodes=3, launcher="tf-config"), ("show", "it's", "$SLURM_JOB_ID"))
    config, *arguments = run_step(script, tmp_path, node, job)
    assert json.loads(config) == {
        "cluster": {"worker": [f"nid00{number}:{port}" for number in (1, 2, 3)]},
        "task": {"type": "worker", "index": node},
    }
    assert arguments == ["it's", job]


REFUSED = {  # argv: the one line
    "no site": (["--", "python"], f"--site is missing; give the site where the job will run: {', '.join(SITES)}."),
    "unknown site": (
        ["--site", "capela", "--", "python"],
        f"unknown site 'capela'. Did you mean capella? Sites: {', '.join(SITES)}.",
    ),
    "no command": (
        ["--site", "capella"],
        "no command to run; give it after --, as in: python -m hvdtrain slurm --site NAME -- python -m hvdtrain.torch "
        "linear",
    ),
    "no -- before the command": (
        ["--site", "capella", "python", "-m", "hvdtrain.torch", "linear"],
        "no -- before the command; give it after --, as in: python -m hvdtrain slurm --site NAME -- python -m "
        "hvdtrain.torch linear",
    ),
    "an argument too many before the command": (
        ["--site", "capella", "2", "--", "python"],
        "'2' belongs to no flag; see python -m hvdtrain slurm --help.",
    ),
    "a rank's variable": (
        ["--site", "capella", "--", "python", "x.py", "--out=${SLURM_PROCID}"],
        "the command's $SLURM_PROCID would be filled in by the job's shell, the same for every rank; read it in the "
        "program, or in a script of your own that the command starts.",
    ),
    "no node": (
        ["--site", "capella", "--nodes", "0", "--", "x"],
        "--nodes must be at least 1, got '0'; --help lists the flags.",
    ),
    "no GPU": (
        ["--site", "capella", "--gpus-per-node", "0", "--", "x"],
        "--gpus-per-node must be at least 1, got '0'; --help lists the flags.",
    ),
    "too many GPUs": (
        ["--site", "capella", "--gpus-per-node", "5", "--", "x"],
        "--gpus-per-node must lie in [1, 4] at ZIH Capella, got 5.",
    ),
    "too many CPUs": (
        ["--site", "capella", "--cpus-per-task", "15", "--", "x"],
        "4 tasks x 15 CPUs exceed the 56 CPUs of a node; lower --cpus-per-task.",
    ),
    "time": (
        ["--site", "capella", "--time", "2h", "--", "x"],
        "--time must read like 02:00:00 or 1-12:00:00 (a day and a half), got '2h'.",
    ),
    "account of another form": (
        ["--site", "jean-zay", "--account", "abc", "--", "x"],
        "--account must read like abc@v100 at this site, got 'abc'.",
    ),
    "a job name that would write a line": (
        ["--site", "capella", "--job-name", "a\nrm x", "--", "x"],
        r"an argument must be printable and have at most 4096 characters, got 'a\nrm x'.",
    ),
    "a job name of two words": (
        ["--site", "capella", "--job-name", "a b", "--", "x"],
        "--job-name must be one word of letters, digits and .@%+,-_, got 'a b'.",
    ),
    "a command that a terminal would act on": (
        ["--site", "capella", "--", "python", "\x1b[31m"],
        r"the command must be text of at most 524,288 characters, got '\x1b[31m'.",
    ),
    "more nodes than there are": (
        ["--site", "capella", "--nodes", "9" * 30, "--", "x"],
        f"--nodes must be at most 1000000, got '{'9' * 30}'; --help lists the flags.",
    ),
    "plugin": (
        ["--site", "capella", "--mpi", "openmp", "--", "x"],
        "--mpi must be pmix, pmi2, cray_shasta, pspmi or none, got 'openmp'; see: srun --mpi=list",
    ),
    "launcher": (
        ["--site", "capella", "--launcher", "mpirun", "--", "x"],
        "--launcher must be 'srun', 'torchrun' or 'tf-config', got 'mpirun'; --help lists the flags.",
    ),
    "unknown flag": (
        ["--sites", "capella", "--", "x"],
        "unknown flag '--sites'. Did you mean --site? See python -m hvdtrain slurm --help.",
    ),
    "no file": (
        ["--check", "/nowhere/job.sh"],
        "--check must name a job script that can be read, got /nowhere/job.sh: No such file or directory.",
    ),
}


@pytest.mark.parametrize(("argv", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_in_one_line(argv, message):
    with pytest.raises(HvdtrainError) as refusal:
        slurm.main(argv)
    assert str(refusal.value) == message


def test_the_command_line_prints_a_script(python):
    argv = ["--site", "juwels-booster", "--nodes", "16", "--", "python", "-m", "hvdtrain.torch", "imagenet"]
    done = python("-m", "hvdtrain", "slurm", *argv)
    assert done.stdout == render(SITES["juwels-booster"], Options(nodes=16), argv[5:])
    assert (done.returncode, done.stderr) == (0, "")


def test_the_list_of_sites(capsys):
    assert slurm.main(["--list"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "site"
    assert [row.split()[0] for row in rows] == list(SITES)
    assert re.split(r"  +", rows[1]) == [
        "juwels-booster",
        "4",
        "4 x 24",
        "02:00:00",
        "pmix",
        "booster",
        "JSC JUWELS Booster",
    ]


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


def test_submit_says_what_sbatch_said(tmp_path, monkeypatch):
    sbatch(tmp_path, 'cat > /dev/null; echo "sbatch: error: invalid partition specified: x" >&2; exit 1')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(JobError) as refusal:
        slurm.main(["--site", "generic", "--partition", "x", "--submit", "--", *LINEAR])
    assert str(refusal.value) == (
        "sbatch refused the script: error: invalid partition specified: x; change the flag it names."
    )


def test_submit_without_sbatch(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError) as refusal:
        slurm.main(["--site", "generic", "--submit", "--", *LINEAR])
    assert str(refusal.value) == (
        "--submit needs sbatch on the PATH, got none; go to a login node of the cluster, or leave --submit out, "
        "take the printed script there and type: sbatch FILE"
    )
