"""Somebody's job script: each rule provoked by one change to a faultless script, with its message and its line."""

from unittest.mock import ANY

import pytest

from hvdtrain.errors import JobError
from hvdtrain.tools import slurm
from hvdtrain.tools.slurm import bash
from hvdtrain.tools.slurm.case import Finding, case_of
from hvdtrain.tools.slurm.job_check import RULES, check
from hvdtrain.tools.slurm.job_script import read
from hvdtrain.tools.slurm.sites import SITES
from hvdtrain.tools.slurm.steps import training_steps

GOOD = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=24
#SBATCH --partition=booster
#SBATCH --time=02:00:00
#SBATCH --signal=USR2@120
#SBATCH --requeue
module load Python
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
srun --mpi=pmix python -m hvdtrain.torch digits
"""
TORCHRUN = """\
#!/bin/bash
#SBATCH -N 2 --ntasks-per-node=1 --cpus-per-task=96
#SBATCH --gpus-per-node=a100:4
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))
srun bash -c 'torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$SLURM_NODEID \\
  --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" train.py'
"""
SRUN = "srun --mpi=pmix python -m hvdtrain.torch digits"
BOOSTER = SITES["juwels-booster"]
PORT = "$((10000 + SLURM_JOB_ID % 10000))"
SHELL = "there it is 0 for all: only inside the step has each rank its own"


def rendered(name: str) -> str:
    return slurm.render(SITES[name], slurm.Options(nodes=2), ("python", "train.py"))


def tasks(line: int, number: int, gpus: int, remedy: str) -> Finding:
    wrong = f"{number} task{'s' * (number > 1)} a node, {gpus} GPUs"
    then = "some would have to share one" if number > gpus else "GPUs would idle, and cost"
    return Finding(line, wrong, f"one task, that is one rank, drives one GPU: {then}", remedy)


def cpus_unset(line: int) -> Finding:
    why = "since SLURM 22.05 srun does not take --cpus-per-task from #SBATCH: each task may get one CPU"
    remedy = 'before it: export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
    return Finding(line, "SRUN_CPUS_PER_TASK is not set", why, remedy, note=True)


def without_srun(line: int, program: str, remedy: str) -> Finding:
    why = "the job's script runs once, on its first node; only srun starts all tasks on all nodes"
    return Finding(line, f"{program} without srun", why, remedy)


def not_sbatch(wrong: str, remedy: str, note: bool) -> Finding:
    why = "only a line that begins with exactly #SBATCH and a space is an option; this one is a comment"
    return Finding(10, f"'{wrong}' is not #SBATCH", why, remedy, note=note)


def does_not_return(option: str, remedy: str) -> Finding:
    why = "at its time limit hvdtrain could not save a checkpoint and come back by itself"
    return Finding(11, f"no {option}", why, remedy, note=True)


def rank_variable(line: int, name: str) -> Finding:
    remedy = f"srun bash -c '... ${name} ...' in single quotes, or read it in the program"
    return Finding(line, f"${name} is filled in by the job's shell", SHELL, remedy)


def port(line: int, wrong: str, why: str) -> Finding:
    return Finding(line, wrong, why, PORT, note=why == TAKEN)


TAKEN = "two jobs that share a node, or a job that starts again, find it taken"
TOO_HIGH = "ports end at 65535, job ids do not"
OCTAL = "in $(( )) digits after a 0 are octal: 0089 is an error, 0077 is 63; and a short id has no last four"

PROVOKED = {  # what is replaced in GOOD, by what, the findings
    "too many tasks": ("per-node=4", "per-node=8", tasks(3, 8, 4, "#SBATCH --ntasks-per-node=4")),
    "too few tasks": ("per-node=4", "per-node=1", tasks(3, 1, 4, "#SBATCH --ntasks-per-node=4")),
    "tasks not given": ("#SBATCH --ntasks-per-node=4\n", "", tasks(11, 1, 4, "#SBATCH --ntasks-per-node=4")),
    "tasks as a total": ("--ntasks-per-node=4", "-n 16", tasks(3, 8, 4, "#SBATCH --ntasks=8")),
    "GPUs as a total": ("--gres=gpu:4", "--gpus=4", tasks(3, 4, 2, "#SBATCH --ntasks-per-node=2")),
    "GPUs of a type": ("--gres=gpu:4", "--gres=nvme:1,gpu:a100:2", tasks(3, 4, 2, "#SBATCH --ntasks-per-node=2")),
    "all GPUs to one task": (
        "--ntasks-per-node=4\n#SBATCH --gres=gpu:4",
        "--ntasks-per-node=1\n#SBATCH --gpus-per-task=4",
        tasks(3, 1, 4, "#SBATCH --ntasks-per-node=4"),
    ),
    "srun's own tasks": ("srun ", "srun --ntasks-per-node=2 ", tasks(12, 2, 4, "srun --ntasks-per-node=4")),
    "no GPU": (
        "#SBATCH --gres=gpu:4\n",
        "",
        Finding(11, "no GPU is requested", "SLURM gives a job only the GPUs it requests", "#SBATCH --gres=gpu:4"),
    ),
    "too many CPUs": (
        "cpus-per-task=24",
        "cpus-per-task=32",
        Finding(
            5,
            "4 tasks x 32 CPUs",
            "a node of JSC JUWELS Booster has 96 CPUs to give: the job is refused or waits forever",
            "#SBATCH --cpus-per-task=24",
        ),
    ),
    "no CPUs": (
        "#SBATCH --cpus-per-task=24\n",
        "",
        Finding(
            11,
            "no --cpus-per-task",
            "each task gets one CPU, for training and for loading data",
            "#SBATCH --cpus-per-task=24",
            note=True,
        ),
    ),
    "SRUN_CPUS_PER_TASK missing": ('export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"\n', "", cpus_unset(11)),
    "SRUN_CPUS_PER_TASK in a comment": ("export SRUN_CPUS_PER_TASK=", "# export SRUN_CPUS_PER_TASK=", cpus_unset(12)),
    "no srun": (
        SRUN,
        "python -m hvdtrain.torch digits",
        without_srun(12, "python", "srun python -m hvdtrain.torch ..."),
    ),
    "no srun before a file": (
        SRUN,
        "cd work && CUDA_LAUNCH_BLOCKING=1 python3 train.py \\\n  --lr 1",
        without_srun(12, "python3", "srun python3 train.py --lr ..."),
    ),
    "rank exported": ("module load", "export RANK=$SLURM_PROCID\nmodule load", rank_variable(10, "SLURM_PROCID")),
    "rank exported, a small step before": (
        SRUN,
        f"export RANK=$SLURM_PROCID\nsrun -N 1 -n 1 ./prepare.sh\n{SRUN}",
        rank_variable(12, "SLURM_PROCID"),
    ),
    "rank behind a # that is no comment": (
        "module load",
        "n=${#hosts[@]} r=$SLURM_PROCID\nmodule load",
        rank_variable(10, "SLURM_PROCID"),
    ),
    "local rank exported": (
        "module load",
        'export LOCAL_RANK="${SLURM_LOCALID}"\nmodule load',
        rank_variable(10, "SLURM_LOCALID"),
    ),
    "rank on srun's line": (SRUN, f"{SRUN} \\\n  --node $SLURM_NODEID", rank_variable(13, "SLURM_NODEID")),
    "rank in double quotes": (
        SRUN,
        """srun --mpi=pmix bash -c "
  echo 'rank' $SLURM_PROCID
  python train.py\"""",
        rank_variable(13, "SLURM_PROCID"),
    ),
    "rank by hand": (
        "module load",
        "export RANK=0\nmodule load",
        Finding(
            10,
            "RANK= is set for all ranks",
            "every rank would have the same number",
            "leave it out: the launcher sets it for each rank",
        ),
    ),
    "a variable of an option that is not given": (
        "module load",
        "export WORKERS=$SLURM_GPUS\nmodule load",
        Finding(
            10,
            "$SLURM_GPUS may be empty",
            "SLURM sets it only where --gpus is given, in the script or to sbatch",
            "#SBATCH --gpus=N",
            note=True,
        ),
    ),
    "fixed port": ("module load", "export MASTER_PORT=29500\nmodule load", port(10, "a fixed port", TAKEN)),
    "fixed endpoint": (SRUN, f"{SRUN} --rdzv_endpoint=$HOST:29500", port(12, "a fixed port", TAKEN)),
    "fixed endpoint in quotes": (SRUN, f"{SRUN} '--rdzv-endpoint $HOST:13245'", port(12, "a fixed port", TAKEN)),
    "fixed port flag": (SRUN, f"{SRUN} --master_port 12345", port(12, "a fixed port", TAKEN)),
    "port too high": (
        "module load",
        "MASTER_PORT=$((10000 + $SLURM_JOB_ID))\nmodule load",
        port(10, "a port from the whole job id", TOO_HIGH),
    ),
    "port too high, braces": (
        "module load",
        "MASTER_PORT=$(expr ${SLURM_JOBID} + 10000)\nmodule load",
        port(10, "a port from the whole job id", TOO_HIGH),
    ),
    "port is the job id": (
        "module load",
        "MASTER_PORT=$SLURM_JOB_ID\nmodule load",
        port(10, "a port from the whole job id", TOO_HIGH),
    ),
    "octal port": (
        "module load",
        "MASTER_PORT=$((10000 + ${SLURM_JOB_ID: -4}))\nmodule load",
        port(10, "a port from the job id's last characters", OCTAL),
    ),
    "octal port by tail": (
        "module load",
        "MASTER_PORT=$((10000 + $(echo -n $SLURM_JOBID | tail -c 4)))\nmodule load",
        port(10, "a port from the job id's last characters", OCTAL),
    ),
    "late option": (
        "module load Python\n",
        "module load Python\n#SBATCH --ntasks-per-node=2\n",
        Finding(
            11,
            "#SBATCH after the first command",
            "SLURM reads options only above the first command, line 10: this one is ignored",
            "move the line above it",
        ),
    ),
    "space in #SBATCH": (
        "#SBATCH --requeue",
        "#SBATCH --requeue\n# SBATCH --mem=64G",
        not_sbatch("# SBATCH", "#SBATCH --mem=64G", note=True),
    ),
    "typo in #SBATCH": (
        "#SBATCH --requeue",
        "#SBATCH --requeue\n#SBTACH -A abc",
        not_sbatch("#SBTACH", "#SBATCH -A abc", note=False),
    ),
    "partition": (
        "=booster",
        "=batch",
        Finding(
            6,
            "--partition=batch",
            "the nodes of JSC JUWELS Booster have booster, develbooster, largebooster",
            "#SBATCH --partition=booster",
        ),
    ),
    "no partition": (
        "#SBATCH --partition=booster\n",
        "",
        Finding(
            1, "no --partition", "the job would not get the nodes of JSC JUWELS Booster", "#SBATCH --partition=booster"
        ),
    ),
    "no signal": ("#SBATCH --signal=USR2@120\n", "", does_not_return("--signal", "#SBATCH --signal=USR2@120")),
    "no requeue": ("#SBATCH --requeue\n", "", does_not_return("--requeue", "#SBATCH --requeue")),
    "one GPU visible": (
        "module load",
        "export CUDA_VISIBLE_DEVICES=0\nmodule load",
        Finding(
            10,
            "CUDA_VISIBLE_DEVICES=0",
            "4 tasks of a node would share 1 GPU",
            "leave it out: SLURM sets it to the GPUs of the job",
        ),
    ),
    "srun -n": (
        "srun ",
        "srun -n4 ",
        [
            Finding(
                12,
                "srun -n 4",
                "the job has 8 tasks; the step would leave some of them idle, or not start",
                "srun without -n takes all tasks of the job",
                note=True,
            ),
            tasks(12, 2, 4, "srun --ntasks=8"),
        ],
    ),
    "tasks that contradict": (
        "#SBATCH --nodes=2\n",
        "#SBATCH --nodes=2\n#SBATCH --ntasks=4\n",
        [
            Finding(
                3,
                "--ntasks=4, but 2 x 4 tasks a node",
                "where both are given SLURM takes --ntasks, and --ntasks-per-node is an upper limit only",
                "#SBATCH --ntasks=8, or leave --ntasks out",
                note=True,
            ),
            tasks(3, 2, 4, "#SBATCH --ntasks=8"),
        ],
    ),
    "memory": (
        "#SBATCH --requeue",
        "#SBATCH --requeue\n#SBATCH --mem=1.5T",
        Finding(
            10,
            "--mem=1.5T",
            "memory is a whole number with K, M, G or T directly behind it; without a letter it is MiB",
            "--mem=64G",
        ),
    ),
    "time": (
        "=02:00:00",
        "=2h",
        Finding(
            7, "--time=2h", "a time reads like hours:minutes:seconds, or days-hours:minutes:seconds", "--time=02:00:00"
        ),
    ),
    "minutes for hours": (
        "=02:00:00",
        "=02:00",
        Finding(
            7,
            "--time=02:00",
            "two numbers are minutes:seconds, so the job would end after minutes",
            "--time=02:00:00",
            note=True,
        ),
    ),
    "no number of nodes": (
        "--nodes=2",
        "--nodes=two",
        Finding(2, "--nodes=two", "it must be a whole number of at least 1", "--nodes=1"),
    ),
    "Windows line ends": (
        "#SBATCH --nodes=2\n",
        "#SBATCH --nodes=2\r\n",
        Finding(2, "Windows line ends", "sbatch refuses them, and bash would take them for text", "dos2unix FILE"),
    ),
    "no shebang": (
        "#!/bin/bash\n",
        "",
        Finding(1, "no #! line", "sbatch refuses a script that does not name its shell", "#!/bin/bash"),
    ),
    "hint undone": (
        "#SBATCH --requeue",
        "#SBATCH --requeue\n#SBATCH --hint=nomultithread\n#SBATCH --ntasks-per-core=1",
        Finding(
            11,
            "--ntasks-per-core beside --hint",
            "SLURM then silently drops --hint=nomultithread",
            "leave --ntasks-per-core out",
        ),
    ),
    "a value with a space": (
        "#SBATCH --nodes=2",
        "#SBATCH --nodes=2\n#SBATCH --comment=my first run --exclusive",
        Finding(
            3,
            "--comment=my first run --exclusive",
            "its value ends at the space: SLURM takes my, and passes over the rest of the line",
            '#SBATCH --comment="my first run"',
        ),
    ),
    "an environment that tasks do not get": (
        "#SBATCH --nodes=2",
        "#SBATCH --nodes=2\n#SBATCH --export=NONE",
        Finding(
            3,
            "--export=NONE",
            "srun's tasks get nothing else: no PATH of an environment, no module, nothing that the script exports",
            "#SBATCH --export=ALL, or before srun: export SLURM_EXPORT_ENV=ALL",
        ),
    ),
    "a step that the script leaves": (
        SRUN,
        f"{SRUN} > log 2>&1 &",
        Finding(
            12,
            "srun ... &",
            "the job ends with its script, which does not wait for this step, and the step with it",
            "wait, as the script's last line",
        ),
    ),
    "a signal that bash keeps": (
        "--signal=USR2@120",
        "--signal=B:USR2@120",
        Finding(
            8,
            "--signal=B:USR2@120",
            "B: sends it to the script's bash alone, which no trap passes on; without one bash ends, and all steps",
            "#SBATCH --signal=USR2@120, which srun gives to its tasks",
        ),
    ),
    "no plugin": (
        "srun --mpi=pmix",
        "srun",
        Finding(
            12,
            "srun without --mpi",
            "where the site's default is not the MPI's own, every rank would be rank 0 of 1",
            "srun --mpi=pmix",
            note=True,
        ),
    ),
    "unknown plugin": (
        "--mpi=pmix",
        "--mpi=openmp",
        Finding(
            12,
            "srun --mpi=openmp",
            "SLURM's own plugins are pmix, pmi2, cray_shasta, none",
            "see: srun --mpi=list",
            note=True,
        ),
    ),
}


@pytest.mark.parametrize(("old", "new", "found"), PROVOKED.values(), ids=PROVOKED.keys())
def test_a_rule(old, new, found):
    assert GOOD.count(old) == 1
    assert check(GOOD.replace(old, new), BOOSTER) == sorted(
        found if isinstance(found, list) else [found], key=lambda finding: (finding.line, finding.wrong)
    )


ELSEWHERE = {  # a script, what is replaced in it, by what, its site, the finding
    "an account of Jean Zay": (
        rendered("jean-zay"),
        "#SBATCH --requeue ",
        "#SBATCH -A abc ",
        "jean-zay",
        Finding(14, "--account=abc", "an account names the kind of node too", "#SBATCH --account=abc@v100"),
    ),
    "Jean Zay's hyper-threads": (
        rendered("jean-zay"),
        "#SBATCH --hint=nomultithread ",
        "#SBATCH --exclusive ",
        "jean-zay",
        Finding(
            1, "no --hint", "without it a CPU is half a core, a hyper-thread", "#SBATCH --hint=nomultithread", note=True
        ),
    ),
    "Perlmutter's nodes without GPUs": (
        rendered("perlmutter"),
        "--constraint=gpu ",
        "-C cpu ",
        "perlmutter",
        Finding(
            9,
            "--constraint=cpu",
            "the nodes of NERSC Perlmutter have gpu, gpu&hbm40g, gpu&hbm80g",
            "#SBATCH --constraint=gpu",
        ),
    ),
    "a torchrun for each rank": (
        TORCHRUN,
        "--ntasks-per-node=1 --cpus-per-task=96",
        "--ntasks-per-node=4 --cpus-per-task=24",
        None,
        Finding(
            2,
            "4 torchruns a node",
            "torchrun starts the ranks of its node itself: 4 of them start 4 times as many",
            "#SBATCH --ntasks-per-node=1",
        ),
    ),
    "torchrun's port in the step": (
        TORCHRUN,
        "$MASTER_ADDR:$MASTER_PORT",
        "$MASTER_ADDR:29500",
        None,
        port(7, "a fixed port", TAKEN),
    ),
    "no GPUs of no known site": (
        TORCHRUN,
        "#SBATCH --gpus-per-node=a100:4\n",
        "",
        None,
        Finding(
            5,
            "no GPU is requested",
            "most sites give a job only the GPUs it requests",
            "#SBATCH --gres=gpu:4",
            note=True,
        ),
    ),
    "one process for several GPUs": (
        "#!/bin/bash\n#SBATCH --gres=gpu:1 -c 8\npython train.py\n",
        "gpu:1",
        "gpu:2",
        None,
        Finding(
            3,
            "1 process, 2 GPUs",
            "it uses one, unless it starts a process for each, or spreads its model over them",
            "torchrun --standalone --nproc-per-node=2",
            note=True,
        ),
    ),
    "torchrun on one of two nodes": (
        TORCHRUN,
        "srun bash -c",
        "torchrun --nproc-per-node=4 a.py #",
        None,
        without_srun(6, "torchrun", "srun torchrun --nproc-per-node=4 a.py ..."),
    ),
}


@pytest.mark.parametrize(("script", "old", "new", "name", "finding"), ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_a_rule_elsewhere(script, old, new, name, finding):
    assert script.count(old) == 1
    site = SITES[name] if name else None
    assert check(script, site) == []
    assert [found for found in check(script.replace(old, new), site) if found not in check(script, site)] == [finding]


def test_every_rule_is_provoked():
    whys = {
        finding.why
        for *_, found in [*PROVOKED.values(), *ELSEWHERE.values()]
        for finding in (found if isinstance(found, list) else [found])
    }
    scripts = [(GOOD.replace(old, new), BOOSTER) for old, new, _ in PROVOKED.values()]
    scripts += [(script.replace(old, new), SITES.get(name)) for script, old, new, name, _ in ELSEWHERE.values()]
    for rule in RULES:
        reasons = {finding.why for text, site in scripts for finding in rule(case_of(text, site))}
        assert reasons and reasons <= whys, rule.__name__


INNOCENT = {  # what is replaced in GOOD, by what: still faultless
    "single quotes": (SRUN, "srun --mpi=pmix bash -c 'RANK=$SLURM_PROCID exec python train.py'"),
    "single quotes over lines": (SRUN, "srun --mpi=pmix bash -c '\n  export RANK=$SLURM_PROCID\n  python train.py'"),
    "an escape in double quotes": (SRUN, r'srun --mpi=pmix bash -c "RANK=\$SLURM_PROCID python train.py"'),
    "an escape": (SRUN, r"srun --mpi=pmix bash -c RANK=\$SLURM_PROCID\ exec\ python\ train.py"),
    "a comment": ("module load", "# don't: export RANK=$SLURM_PROCID MASTER_PORT=29500\nmodule load"),
    "a comment behind": ("module load Python", "module load Python  # it's $SLURM_PROCID"),
    "a here-document": (
        "module load",
        "cat > run.sh <<'END'\npython -m hvdtrain.torch $SLURM_PROCID\nEND\nmodule load",
    ),
    "an option switched off": ("#SBATCH --requeue", "#SBATCH --requeue\n##SBATCH --mem=2x"),
    "a comment behind an option": ("--nodes=2", "--nodes=2  # it's two"),
    "options in pairs": ("--nodes=2\n#SBATCH --ntasks-per-node=4", "-N 2 --ntasks-per-node 4"),
    "a step on one node": ("srun ", "srun -N 1 -n 4 "),
    "a task count that agrees": ("srun ", "srun -n 8 "),
    "CPUs given to srun": ('export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"\nsrun', "srun -c 24"),
    "a look at the nodes": ("module load", "srun -n2 --ntasks-per-node=1 hostname\nmodule load"),
    "a step for one task": ("module load", "srun -N1 -n1 tar xf data.tar\nmodule load"),
    "tools in Python": ("module load", "python -m venv env && pip install x\nmodule load"),
    "a port from the id": ("module load", f"export MASTER_PORT={PORT}\nmodule load"),
    "a decimal port": ("module load", "MASTER_PORT=$((10000 + 10#${SLURM_JOB_ID: -4}))\nmodule load"),
    "a port by expr": ("module load", "P=$(expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4))\nmodule load"),
    "all GPUs": ("module load", "export CUDA_VISIBLE_DEVICES=3,2,1,0\nmodule load"),
    "a GPU a task": ("--gres=gpu:4", "--gpus-per-task=1"),
    "days": ("=02:00:00", "=1-12:30"),
    "memory": ("#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH --mem=750GB"),
    "arithmetic and lists": ("module load", 'n=$((1<<2)); [ ${#a[@]} -gt $# ] && echo "$n"\nmodule load'),
    "a here-string": ("module load", "read -r a <<< word\nmodule load"),
    "blank lines among the options": ("#SBATCH --nodes=2", "\n  # two\n#SBATCH --nodes=2"),
    "a quote that never ends": (SRUN, f'{SRUN}\necho "'),
}


@pytest.mark.parametrize(("old", "new"), INNOCENT.values(), ids=INNOCENT.keys())
def test_what_is_right_gives_no_finding(old, new):
    assert GOOD.count(old) == 1
    assert check(GOOD.replace(old, new), BOOSTER) == []


PYTHON = "python -m hvdtrain.torch digits"
BARE, FIXED, FILLED = "python without srun", "a fixed port", "$SLURM_PROCID is filled in by the job's shell"
UNSET = "SRUN_CPUS_PER_TASK is not set"
GRAMMAR = {  # what stands in the place of GOOD's srun: the findings, which patterns miss or make up
    "a shift is no here-document": (f"n=$((1<<bits))\n{PYTHON}", [(13, BARE)]),
    "quotes in quotes": (f'echo "$(echo "it\'s")"\n{PYTHON}', [(13, BARE)]),
    "quotes in an expansion": (f'echo "${{x:-"it\'s"}}"\n{PYTHON}', [(13, BARE)]),
    "an escape in $'...'": (f"echo $'it\\'s'\n{PYTHON}", [(13, BARE)]),
    "a comment behind a semicolon": (f":;# it's\n{PYTHON}", [(13, BARE)]),
    "an odd end of a here-document": (f"cat <<'E-F'\n{PYTHON} '\nE-F\n{SRUN} --master_port 1", [(15, FIXED)]),
    "a here-document that is filled in": (f"cat > a <<END\nexport RANK=$SLURM_PROCID\nEND\n{SRUN}", [(13, FILLED)]),
    "a command in quotes": (f'unset SRUN_CPUS_PER_TASK; log="$({SRUN} --master_port 1)"', [(12, FIXED)]),
    "a loop in an if": (
        f"if true \\\n  && cd x\nthen for i in 1 2; do\n  {SRUN} --master_port 1\ndone; fi",
        [(15, FIXED)],
    ),
    "a file descriptor": (
        f"srun --mpi=pmix -n 2>errors 4 {PYTHON}",
        [(12, "2 tasks a node, 4 GPUs"), (12, "srun -n 4")],
    ),
    "a redirection in the command": (f"srun --mpi=pmix > log {PYTHON} & srun -n 4 x; wait", []),
    "an array is no command": (f"words=(python {PYTHON})\n{SRUN}", []),
    "a script in a here-document": (f"cat > a <<END\n#!/bin/bash\n#SBATCH -N 1\n# SBATCH -n 1\nEND\n{SRUN}", []),
    "#SBATCH in a quote": (f"echo '\n#SBATCH --nodes=1\n'\n{SRUN}", []),
    "a function of the step": (
        f"f() {{\n  export RANK=$SLURM_PROCID\n  {PYTHON}\n}}\nexport -f f\nsrun --mpi=none bash -c f",
        [],
    ),
    "a function of the job": (f"f() {{\n  export RANK=$SLURM_PROCID\n  {SRUN}\n}}\nf", [(13, FILLED)]),
}


@pytest.mark.parametrize(("new", "found"), GRAMMAR.values(), ids=GRAMMAR.keys())
def test_what_only_a_grammar_reads_right(new, found):
    assert [(finding.line, finding.wrong) for finding in check(GOOD.replace(SRUN, new), BOOSTER)] == found


@pytest.mark.parametrize("quoted", [f'x="$({SRUN})"', f"x=`{SRUN}`"])
def test_a_step_in_a_substitution(quoted):
    script = read(GOOD.replace(SRUN, quoted))
    assert [(step.line, step.own["mpi"].value) for step in training_steps(script)] == [(12, "pmix")]


def test_a_script_that_takes_too_long_to_read(monkeypatch):
    monkeypatch.setattr(bash, "PARSE_SECONDS", -1)
    why = "it is no bash that can be read in reasonable time, so no command of it is checked"
    assert check("#!/bin/bash\n" + "echo a\n" * 1000) == [
        Finding(ANY, "cannot be read as a script", why, "bash -n FILE")
    ]


BROKEN = {  # what replaces GOOD's srun: the line and bash's message
    "a quote that never ends": (f'{SRUN}\necho "', 13, "unexpected EOF while looking for matching `\"'"),
    "a here-document that never ends": (
        f"{SRUN}\ncat <<END", 13, "here-document delimited by end-of-file (wanted `END')"
    ),
    "a fi too many": (f"{SRUN}\nfi", 13, "syntax error near unexpected token `fi'"),
    "an if that never ends": (f"if true; then\n{SRUN}", 14, "syntax error: unexpected end of file"),
}  # fmt: skip


@pytest.mark.parametrize(("new", "line", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_script_that_bash_refuses(new, line, message, tmp_path, capsys):
    path = tmp_path / "job.sh"
    path.write_text(GOOD.replace(SRUN, new))
    assert slurm.main(["--check", str(path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "To fix:",
        f"{path}:{line}: {message}",
        "    why      bash cannot read the script to its end",
        "    instead  correct it, until this prints nothing: bash -n FILE",
        "1 to fix, 0 to consider.",
    ]


def test_a_worker_of_tf_config_needs_no_plugin():
    options = slurm.Options(nodes=2, launcher="tf-config")
    assert check(slurm.render(SITES["capella"], options, ("python", "-m", "hvdtrain.tensorflow", "linear"))) == []


def test_a_site_is_not_guessed():
    assert check(GOOD.replace("=booster", "=batch").replace("task=24", "task=99")) == []


@pytest.mark.parametrize("command", ["python -m hvdtrain.torch linear", "torchrun --standalone train.py"])
def test_one_task_needs_no_srun(command):
    assert check(f"#!/bin/bash\n#SBATCH --gres=gpu:1 -c 8\n{command}\n") == []


def test_the_lines_of_commands():
    script = read('#!/bin/bash\n#SBATCH -N 2\n\na "1\n2" && b \\\n  c 2>&1 > e\ncat <<-END | d\n  e\n  END\nf\n')
    assert [(command.line, command.words) for command in script.shell.commands] == [
        (4, ("a", "1\n2")),
        (5, ("b", "c")),
        (7, ("cat",)),
        (7, ("d",)),
        (10, ("f",)),
    ]


def test_the_findings_on_the_command_line(python, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(GOOD.replace("per-node=4", "per-node=8").replace("#SBATCH --requeue\n", ""))
    done = python("-m", "hvdtrain", "slurm", "--check", str(path))
    assert done.returncode == 1
    assert (
        done.stdout
        == f"""\
To fix:
{path}:3: 8 tasks a node, 4 GPUs
    why      one task, that is one rank, drives one GPU: some would have to share one
    instead  #SBATCH --ntasks-per-node=4
To consider:
{path}:11: no --requeue
    why      at its time limit hvdtrain could not save a checkpoint and come back by itself
    instead  #SBATCH --requeue
1 to fix, 1 to consider.
"""
    )


CODES = {  # script, site: exit code, the last line
    "faultless": (GOOD, "juwels-booster", 0, "{}: nothing wrong found; it is ready to submit."),
    "of no known site": (GOOD, "generic", 0, "{}: nothing wrong found; it is ready to submit."),
    "advice alone": (GOOD.replace("#SBATCH --requeue\n", ""), None, 0, "0 to fix, 1 to consider."),
    "another site's": (GOOD, "capella", 1, "1 to fix, 0 to consider."),
    "Windows": (GOOD.replace("\n", "\r\n"), None, 1, "1 to fix, 0 to consider."),
}


@pytest.mark.parametrize(("script", "site", "code", "last"), CODES.values(), ids=CODES.keys())
def test_the_exit_code(script, site, code, last, tmp_path, capsys):
    path = tmp_path / "job.sh"
    path.write_bytes(script.encode())
    assert slurm.main(["--check", str(path), *(["--site", site] if site else [])]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last.format(path)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "job.sh"
    path.write_bytes(b"\xff\xfe#")
    with pytest.raises(JobError) as refusal:
        slurm.main(["--check", str(path)])
    assert str(refusal.value) == f"--check must name a job script that can be read, got {path}: it is not text."
