"""Somebody's job script: what it starts that trains, what of that is a mistake, and what is advice only."""

import pytest
from costs import growth
from marks import marked, rows

from hvdtrain.tools import slurm
from hvdtrain.tools.slurm.job_check import check_script, findings_of, read, report
from hvdtrain.tools.slurm.script import read as read_script
from hvdtrain.tools.slurm.steps import training_steps

TORCHRUN = "srun -c 8 torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=$HOST:$PORT train.py"
PYTHON = "srun -c 8 python train.py"
C10D = "--nproc-per-node=4 --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$HOST:$PORT"
TASKS_1_4 = "1 task a node, 4 GPUs"
NODE_ID = "$SLURM_NODEID is filled in by the job's shell"
# Options of jobs: one node, or two.
NODE, NODES = "-N 1 -c 8 --gres=gpu:4", "-N 2 -c 8 --gres=gpu:4"
FOUR, EIGHT, EACH = (f"-N {n} --ntasks-per-node={tasks} --gres=gpu:4" for n, tasks in ((1, 4), (2, 4), (2, 1)))
ONE_TASK, ALL_OF_TWO = f"{NODE} -n 1", f"{EIGHT} --exclusive"


def job(options: str, commands: str) -> str:
    return f"#!/bin/bash\n#SBATCH {options}\n{commands}\n"


ROWS = {  # options, commands: what is wrong; of what is right, nothing
    "torchrun on each node": ("--nodes=2 --ntasks-per-node=1 --gres=gpu:4", TORCHRUN),
    "torchrun, one node, no srun": (ONE_TASK, "torchrun --nproc-per-node=4 train.py"),
    "torchrun, one node, its tasks are CPUs": ("-N 1 -n 4 -c 8 --gres=gpu:4", "torchrun --nproc-per-node=4 train.py"),
    "torchrun that counts GPUs": (NODE, "torchrun --nproc-per-node=gpu train.py"),
    "tasks are CPUs": ("-N 1 -n 16 --gres=gpu:1", "python train.py"),
    "GPUs of any type": ("-N 2 --ntasks-per-node=4 --gres=gpu:H100_80-gb.x:4", PYTHON),
    "a GPU type alone": ("-N 1 -n 1 --gres=gpu:a100", PYTHON),
    "a type of MIG": ("-N 1 -n 1 --gres=gpu:1g.5gb:1", PYTHON),
    "GPUs beside another resource": ("-N 1 -n 2 --gres=lscratch:100,gpu:v100x:2", PYTHON),
    "GPUs of two types": ("-N 1 -n 5 --gpus-per-node=volta:3,kepler:2", PYTHON),
    "GPUs requested twice, differently": ("-N 1 -n 4 --gres=gpu:4 --gpus-per-node=2", PYTHON),
    "GPUs as a total, short": ("-N 2 --ntasks-per-node=2 -G 4", PYTHON),
    "GPUs of a task": ("-N 2 -n 8 --gpus-per-task=l40s:1", PYTHON, "--gpus-per-task=l40s:1 (advice)"),
    "GPUs of a task, which all see": ("-N 2 -n 8 --gpus-per-task=1 --gpu-bind=none", PYTHON),
    "GPUs of a task, which all see, in many words": (
        "-N 2 -n 8 --gpus-per-task=1",
        "srun -c 8 --gpu-bind=verbose,none python train.py",
    ),
    "a GPU bound to each task": (
        "-N 2 -n 8 --gpus-per-node=4",
        "srun -c 8 --gpu-bind=single:1 python train.py",
        "--gpu-bind=single:1 (advice)",
    ),
    "the nearest GPU of each task": (
        "-N 2 -n 8 --gpus-per-node=4 --gpu-bind closest",
        PYTHON,
        "--gpu-bind=closest (advice)",
    ),
    "tasks of a GPU": ("-N 2 --ntasks-per-gpu=1 -G 8", PYTHON, "--ntasks-per-gpu=1 (advice)"),
    "a GPU of the only task": ("-N 1 -n 1 --gpus-per-task=1", PYTHON),
    "GPUs of a task that mpirun does not bind": ("-N 1 -n 4 -c 8 --gpus-per-task=1", "mpirun -n 4 python a.py"),
    "all GPUs of a task": ("-N 2 -n 2 --gpus-per-task=4", TORCHRUN),
    "values of their own": ("--nodes 2 --ntasks-per-node 4 --gres gpu:4", "srun --cpus-per-task 8 python train.py"),
    "tasks-per-node": ("--nodes=2 --tasks-per-node=4 --gres=gpu:4", PYTHON),
    "srun's own, short": ("-N 2 --gres=gpu:4 --exclusive", "srun -N 2 -n 8 python train.py"),
    "srun's own, of SLURM's variables": (
        "-N 2 -n 8 --gres=gpu:4 --exclusive",
        'srun -N $SLURM_NNODES -n "${SLURM_JOB_NUM_NODES}" torchrun $ARGS train.py',
    ),
    "one node of a larger number of tasks": ("-N 2 -n 8 --gres=gpu:4 --exclusive", "srun -N 1 -n 4 python train.py"),
    "--ntasks below a maximum for each node": (
        "--ntasks=4 --ntasks-per-node=4 --gres=gpu:4 --exclusive",
        "srun python train.py",
    ),
    "a number of nodes from the command line": ("--ntasks-per-node=4 --gres=gpu:4 --exclusive", "srun python train.py"),
    "a step in a container": (
        ALL_OF_TWO,
        "srun --container-image pytorch.sqsh python train.py\nsrun apptainer exec --nv a.sif bash -c 'python train.py'",
    ),
    "shifter": (
        "-N 2 --ntasks-per-node=4 --gpus-per-node=4",
        'srun -c 8 shifter --module=gpu bash -c "python train.py"',
    ),
    "a container on one node": (NODE, "singularity exec --nv a.sif torchrun --nproc_per_node 4 a.py"),
    "a wrapper": (EIGHT, "srun -c 8 ./with_env.sh numactl -l python train.py"),
    "uv": ("-N 1 -n 1 --gres=gpu:1", "srun -c 8 uv run --directory=x python main.py"),
    "a launcher in a variable": (
        "-N 2 --ntasks-per-node=1 --gres=gpu:4 --exclusive",
        'GPUS=4\nexport RUN="torchrun --nproc_per_node $GPUS \\\n  --nnodes 2"\nCMD="train.py --lr 1"\n'
        "srun bash -c '$RUN --node_rank $SLURM_PROCID $CMD'\nsrun bash -c \"$RUN --node_rank \\$SLURM_PROCID $CMD\"",
    ),
    "an array of arguments": (
        "-N 2 --exclusive --gres=gpu:4",
        'declare -a RUN=(\n  --nproc_per_node=4 # GPUs\n  --nnodes=2\n)\nsrun -l torchrun "${RUN[@]}" train.py',
    ),
    "braces in text": (
        "-N 1 -n 1 --gres=gpu:4",
        "srun -c 8 bash -c 'torchrun --log=${SLURM_STEP_ID} --nproc-per-node=4 train.py'",
    ),
    "a command in a here-document": (
        ALL_OF_TWO,
        "read -r -d '' CMD <<EOF\ncd x \\\n && python train.py\nEOF\nsrun bash -c \"${CMD}\"",
    ),
    "a variable with a default": (
        ONE_TASK,
        ": ${GPUS:=4}\ntorchrun --nproc_per_node=${GPUS:-8} --master_port=${PORT:-1} train.py",
    ),
    "a variable of two values": (
        ONE_TASK,
        "if true; then GPUS=2; else GPUS=4; fi\ntorchrun --nproc_per_node=$GPUS train.py",
    ),
    "trainings side by side": (
        "-N 1 -c 8 --gres=gpu:2",
        "torchrun --nproc-per-node=1 a.py &\ntorchrun --nproc-per-node=1 b.py &\nwait",
    ),
    "torchrun with one rank each": (EIGHT, "srun -c 8 torchrun --nproc_per_node=1 a.py"),
    "accelerate": (EACH, "srun -c 8 accelerate launch --num_processes 8 train.py"),
    "deepspeed on one node": (NODE, "deepspeed --num_gpus=4 train.py --deepspeed"),
    "deepspeed with hosts": (NODES, "deepspeed --hostfile=hosts train.py"),
    "mpirun": ("-N 2 --ntasks-per-node=4 -c 8 --gres=gpu:4", "mpirun -np 8 python train.py"),
    "mpirun of SLURM's number": (
        "-N 2 -n 8 -c 8 --gres=gpu:4",
        "mpirun -n $SLURM_NTASKS --bind-to none python train.py",
    ),
    "horovodrun": ("-N 2 -n 8 -c 8 --gres=gpu:4", "horovodrun -np 8 -H a:4,b:4 python train.py"),
    "Ray": (NODES, "srun -N1 -n1 ray start --head &\npython train.py"),
    "another tool before the step": (EIGHT, f"python prepare.py\npython -c pass\n{PYTHON}"),
    "a look at PyTorch": (EIGHT, f"srun -n 2 python -c 'import torch'\n{PYTHON}"),
    "one CPU a task": ("-N 1 -n 4 -c 1 --gres=gpu:4", "srun python train.py"),
    "CPUs of a GPU": ("-N 1 -n 4 --cpus-per-gpu=8 --gres=gpu:4", "srun python train.py"),
    "a port of nodes of its own": (ALL_OF_TWO, "export MASTER_PORT=29500\nsrun python train.py"),
    "a port of one node": (ONE_TASK, "torchrun --nproc-per-node=4 --master_port 1234 train.py"),
    "rank 0 of one": ("-N 1 -n 1 --gres=gpu:1", f"export RANK=$SLURM_PROCID LOCAL_RANK=0\n{PYTHON}"),
    "node 0 of one": (NODE, "torchrun --nproc-per-node=4 --node-rank=$SLURM_NODEID train.py"),
    "a rank that is printed": (FOUR, f'echo "rank $SLURM_PROCID"\n{PYTHON}'),
    "a rank that is tested": (FOUR, f'if [ "$SLURM_PROCID" -eq 0 ]; then echo a; fi\n{PYTHON}'),
    "components": ("-N 1 -n 1", f"#SBATCH hetjob\n#SBATCH -N 2 -n 8 --gres=gpu:4\n{PYTHON}"),
    "how to submit it": ("-N 1 -n 4 --gres=gpu:4\n# sbatch --nodes=2 job.sh", PYTHON),
    "one process that starts the others": (NODE, "python train.py --gpus 4"),
    "tasks that share a GPU": ("-n 2 --ntasks-per-gpu=2 --gres=gpu:l40s:1", PYTHON),
    "prose that looks like an option": ("-N 1 -n 4 --gres=gpu:4\n# Batch-size 4\n##SBATCH -N 2", PYTHON),
    "a variable of an option that is given": ("-N 1 -n 4 --gpus-per-node=4", f"N=$SLURM_GPUS_PER_NODE\n{PYTHON}"),
    "a variable with another value": (FOUR, f"N=${{SLURM_GPUS:-4}}\n{PYTHON}"),
    "a variable of the script's own": (FOUR, f"SLURM_GPUS=4; N=$SLURM_GPUS\n{PYTHON}"),
    "no GPU anywhere": ("-N 2 -n 4", PYTHON),
    "a batch array": ("--array=0-9 -c 4", "python train.py --seed $SLURM_ARRAY_TASK_ID"),
    "one task, no srun": ("--gres=gpu:1 -c 8", "python -m hvdtrain.torch linear"),
    "one torchrun, no srun": ("--gres=gpu:1 -c 8", "torchrun --standalone train.py"),
    "no srun on two nodes": (NODES, f"torchrun {C10D} a.py", "torchrun without srun"),
    "no srun, behind a look at the nodes": (
        NODES,
        f"HOST=$(srun -N1 -n1 hostname)\ntorchrun {C10D} a.py",
        "torchrun without srun",
    ),
    "no srun in a container": (
        "-N 4 -c 8 --gres=gpu:1",
        'apptainer exec --nv a.sif bash -c "cd x; torchrun --nproc_per_node 1 a.py"',
        "torchrun without srun",
    ),
    "accelerate without srun": (NODES, "accelerate launch a.py", "accelerate without srun"),
    "as many tasks as GPUs, and one process": ("-N 1 -n 4 -c 8 --gres=gpu:4", "python a.py", "python without srun"),
    "deepspeed without hosts": (NODES, "deepspeed a.py", "deepspeed without --hostfile"),
    "horovodrun without hosts": (NODES, "horovodrun -np 8 python a.py", "horovodrun without -H"),
    "mpirun with too few": (NODES, "mpirun -np 2 python a.py", "2 ranks, 8 GPUs"),
    "mpirun with one dash": (
        "-N 2 --ntasks-per-node=4 -c 8 --gres=gpu:4",
        "mpirun -np 8 -bind-to none python a.py",
        "-bind-to (advice)",
    ),
    "several torchruns": ("-N 2 -n 8 --gres=gpu:4", TORCHRUN, "4 torchruns a node"),
    "several accelerates": (
        "-N 2 --tasks-per-node 4 --gres gpu:a100:4",
        "srun -c 8 accelerate launch a.py",
        "4 accelerates a node",
    ),
    "too few ranks of torchrun": ("-c 8 --gres=gpu:4", "torchrun --nproc_per_node=2 a.py", "2 ranks a node, 4 GPUs"),
    "torchrun's one rank": ("-c 8 --gres=gpu:2", "python -m torch.distributed.run a.py", "1 rank a node, 2 GPUs"),
    "too many ranks of torchrun": ("-c 8 --gres=gpu:1", "torchrun --nproc_per_node 2 a.py", "2 ranks a node, 1 GPU"),
    "one task on each of two nodes": (EACH, PYTHON, TASKS_1_4),
    "one Horovod task": ("-N 1 -n 1 --gres=gpu:4", "srun --mpi=pmix -c 8 python hvd_train.py", TASKS_1_4),
    "a variable in #SBATCH": ("--nodes=$N -n 4 --gres=gpu:4", PYTHON, "--nodes=$N"),
    "a node's rank of the job's shell": (
        EACH,
        "srun -c 8 torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$SLURM_NODEID a.py",
        NODE_ID,
    ),
    "a node's rank by hand": (
        EACH,
        "srun -c 8 torchrun --nnodes=2 --nproc-per-node=4 --node_rank=0 a.py",
        "--node_rank=0",
    ),
    "mpirun with more ranks than tasks": (
        "-N 2 -c 8 --gpus-per-node=4",
        "mpirun -n 8 python a.py",
        "8 ranks, 2 tasks (advice)",
    ),
    "one task that may start others": ("-N 1 -n 1 --gres=gpu:4", PYTHON, f"{TASKS_1_4} (advice)"),
    "one task that knows its node": ("-N 2 -n 2 --gres=gpu:4", f"{PYTHON} --rank x", f"{TASKS_1_4} (advice)"),
    "a node's rank that c10d passes over": (
        EACH,
        f"srun -c 8 torchrun {C10D} --node-rank=$SLURM_NODEID a.py",
        f"{NODE_ID} (advice)",
    ),
    "an option in small letters": ("-N 1 -n 4 --gres=gpu:4\n#sbatch -N 2", PYTHON, "'#sbatch' is not #SBATCH (advice)"),
    "--ntasks counts": (
        "-N 2 -n 4 --ntasks-per-node=4 --gres=gpu:4",
        PYTHON,
        "2 tasks a node, 4 GPUs",
        "--ntasks=4, but 2 x 4 tasks a node (advice)",
    ),
    "more tasks than the job": (FOUR, "srun -n 8 -c 8 python a.py", "8 tasks a node, 4 GPUs", "srun -n 8"),
}
WHOLE = "-N 1 -n 4 -c 8 --gres=gpu:4 --exclusive"
BASHS, SENT, LEFT = f"{WHOLE} --signal=B:USR2@60", "--signal=B:USR2@60", "srun ... &"
KILL, ASIDE = "trap 'kill -USR2 $P' SIGUSR2", f"{PYTHON} & P=$!"
ROWS |= {  # what reaches a step and how it ends
    "a trap, and two waits": (BASHS, f"{KILL}\n{ASIDE}\nwait $P; wait $P"),
    "a wait in the trap": (BASHS, f"trap 'kill -USR2 $P; wait $P' USR2\n{ASIDE}\nwait $P"),
    "a trap by number, in a function": (
        f"{WHOLE} --signal=b:12@60",
        f"on() {{ scancel -s USR2 $J; wait; }}\ntrap -- on USR2\n{{ cd x; {PYTHON}; }} > log 2>&1 &\nwait",
    ),
    "srun in bash's place": (BASHS, f"exec {PYTHON}"),
    "a signal for the steps": (f"{WHOLE} --signal=R:USR2@60", PYTHON),
    "no trap": (BASHS, f"{ASIDE}\nwait $P; wait $P", SENT),
    "another signal's trap": (BASHS, f"trap 'kill -USR2 $P' USR1 EXIT\n{ASIDE}\nwait $P; wait $P", SENT),
    "a trap that ignores it": (BASHS, f"trap '' USR2\n{ASIDE}\nwait $P; wait $P", SENT),
    "a trap that was taken back": (BASHS, f"trap - USR2\n{ASIDE}\nwait $P; wait $P", SENT),
    "a trap that sends nothing": (BASHS, f"trap 'echo $P' USR2\n{ASIDE}\nwait $P; wait $P", SENT),
    "a trap behind srun": (BASHS, f"{KILL}\n{PYTHON}", SENT),
    "a wait that the trap ends": (BASHS, f"{KILL}\n{ASIDE}\nwait $P", "--signal=B:USR2@60 (advice)"),
    "no wait": (WHOLE, ASIDE, LEFT),
    "a wait before": (WHOLE, f"wait\n{ASIDE}", LEFT),
    "in a pipe, in a subshell": (WHOLE, f"(cd x && {PYTHON} | tee log) &\nsleep 1", LEFT),
    "one wait for several": (WHOLE, f"{ASIDE}\n{ASIDE}\nwait"),
    "one of two waited for": (WHOLE, f"{ASIDE}\n{ASIDE}\nwait $P", "srun ... & (advice)"),
    "all that jobs lists": (WHOLE, f"{ASIDE}\n{ASIDE}\nwait $(jobs -p)", "srun ... & (advice)"),
    "in a function": (WHOLE, f"end() {{ wait; }}\n{ASIDE}\nend"),
    "at the end of bash": (WHOLE, f"trap wait EXIT\n{ASIDE}"),
    "while it is there": (WHOLE, f"{ASIDE}\nwhile ps -p $P; do sleep 9; done"),
    "a trap, and a loop": (BASHS, f"{KILL}\n{ASIDE}\nwhile kill -0 $P; do wait $P; done"),
    "a comment behind a tab": (f"{WHOLE}\t# all", PYTHON),
    "both, by number": (WHOLE, f"{ASIDE}\n{PYTHON} & Q=$!\nwait $P $Q"),
    "all, by an array": (WHOLE, f'for i in 1 2; do {PYTHON} & p+=($!); done\nwait "${{p[@]}}"'),
    "all, in a loop": (WHOLE, f'for i in 1 2; do {PYTHON} & p+=($!); done\nfor i in ${{p[@]}}; do wait "$i"; done'),
    "none of a loop": (WHOLE, f"for i in 1 2; do {PYTHON} & done", LEFT),
    "beside another": (WHOLE, f"{ASIDE}\n{PYTHON}", "srun ... & (advice)"),
    "a variable alone": (f"{WHOLE} --export=DATA", PYTHON, "--export=DATA"),
    "all and a variable": (f"{WHOLE} --export=DATA,all", PYTHON),
    "all for srun": (f"{WHOLE} --export=NONE", "srun -c 8 --export=ALL python train.py"),
    "none for srun": (WHOLE, "srun -c 8 --export NONE python train.py", "--export=NONE"),
    "all again": (f"{WHOLE} --export=NONE", f"unset SLURM_EXPORT_ENV\n{PYTHON}"),
    "torchrun in bash's own": ("-N 1 -n 1 -c 8 --gres=gpu:4 --export=NONE", "torchrun --nproc-per-node=4 train.py"),
    "a name of two words": (f"{WHOLE} -J my run", PYTHON, "--job-name=my run"),
    "a name in quotes": (f"{WHOLE} -J 'my run'", PYTHON),
    "a space in a list": (f"{WHOLE} --export=ALL, A=1", PYTHON, "--export=ALL, A=1"),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_what_is_right_and_what_is_wrong(row):
    options, commands, *wrong = row
    case = read(job(options, commands))
    findings = findings_of(case)
    assert sorted(f"{it.wrong}{' (advice)' if it.note else ''}" for it in findings) == sorted(wrong)
    ready = report("job.sh", findings, case) == "job.sh: nothing wrong found; it is ready to submit."
    assert ready == (not wrong)


UNSEEN = {  # commands: what was read
    "no command": ("", "it has no command"),
    "another program": ("make -j 8\ncd x\n./a.out", "it starts a.out, which cannot be seen into"),
    "programs": ("make\ncmake .\ncp a b", "it runs make, cmake"),
    "a look around": ("echo a\nls", "it runs echo, ls"),
    "tools in Python": (
        "python -m pip install x; python -m venv v\nconda install python=3.9 accelerate",
        "it runs python, conda",
    ),
    "a command of ours": (
        "python -m hvdtrain bench scaling; srun python -m hvdtrain doctor",
        "it runs python, srun python",
    ),
    "preparation in Python": (
        "python prepare_data.py\nsrun python -m tools.preprocess x",
        "it runs python, srun python",
    ),
    "a script": ("srun bash train.sh", "it starts bash train.sh, which cannot be seen into"),
    "a script of a launcher": ("mpirun -np 4 ./train.sh a", "it starts train.sh a, which cannot be seen into"),
    "an argument": ('srun "$@"', "it starts $@, which cannot be seen into"),
    "a variable of another script": ("srun $LAUNCH train", "it starts $LAUNCH train, which cannot be seen into"),
    "a program in a step": ("srun hostname\nsrun cp train.py /tmp", "it runs srun hostname, srun cp"),
    "a file that names a script": ("chmod +x train.sh; cat train.py", "it runs chmod, cat"),
}


@pytest.mark.parametrize(("commands", "runs"), UNSEEN.values(), ids=UNSEEN.keys())
def test_what_is_not_understood_is_not_called_ready(commands, runs, tmp_path, capsys):
    path = tmp_path / "job.sh"
    path.write_text(job("-N 2 -n 8 --gres=gpu:4", commands))
    assert slurm.main(["--check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: no training step was understood: {runs}.\n"


KINDS = {  # a command: its launcher, the kind of program
    "srun python -u -m package.train": ("srun", "python"),
    "srun bash -lc 'source env; export A=1 && torchrun a.py'": ("srun", "torchrun"),
    "srun env TMPDIR=x $HOME/env/bin/python3.11 -m a.b": ("srun", "python"),
    "srun --mpi=pmi2 enroot start x python -m torch.distributed.launch a.py": ("srun", "torchrun"),
    "python -m accelerate.commands.launch a.py": ("", "accelerate"),
    "nsys profile -o x torchrun a.py": ("", "torchrun"),
    "time conda run -n env python a.py": ("", "python"),
    "srun python a.py --backend deepspeed": ("srun", "python"),
    "jsrun -n 4 python a.py": ("jsrun", "python"),
    "aprun -n 4 -N 1 python a.py": ("aprun", "python"),
    "srun $PROFILE fairseq-train data": ("srun", "python"),
    "x=$(srun python a.py)": ("srun", "python"),
    "srun bash -c '# python old.py\nexec ./run.sh'": ("srun", "script"),
    "exec srun ./run.sh": ("srun", "script"),
}


@pytest.mark.parametrize(("command", "started"), KINDS.items(), ids=KINDS.keys())
def test_what_a_command_starts(command, started):
    assert [(step.launcher, step.program.kind) for step in training_steps(read_script(job("-N 1", command)))] == [
        started
    ]


def test_variables_in_variables_end():
    doubled = "\n".join(f'A{n}="$A{n + 1}$A{n + 1}$A{n + 1}"' for n in range(40))
    assert training_steps(read_script(job("-N 1", f'A="$A $A"\n{doubled}\nsrun python $A $A0 train.py')))


HOSTILE = {  # of so many lines, where they have lines
    "steps in text": lambda n: "srun bash -c 'torchrun a.py; bash -c \"x y z\"'\n" * (n // 2),
    "long values": lambda n: 'A="' + "x " * 1900 + '"\n' + "srun $A python a.py\n" * n,
    "values in values": lambda n: 'A="$A $A"\n' + 'B="$A$A$A"\n' * (n // 2) + "srun $B train.py\n" * (n // 2),
    "nested values": lambda n: "A=$(" * 2 * n + ")" * 2 * n,
    "exported functions": lambda n: "f() { a; }\nexport -f f\n" * (n // 2) + "srun -n4 bash -c f\n" * (n // 2),
    "brackets": lambda n: "srun bash -c '" + "${a $(( $( " * 5 * n + "'\n",
    "resources": lambda n: "#SBATCH --gres=" + "gpu:a:1," * 5 * n + "\n" + "srun python a.py\n" * n,
    "tests of ranks": lambda n: "[ x $SLURM_PROCID ]; " * n + "\nsrun -n 8 python x.py",
    "words": lambda n: "srun " + "a " * 30 * n,
}


@pytest.mark.parametrize("commands", marked(rows(HOSTILE), slow={"long values", "values in values", "resources"}))
def test_what_is_understood_of_a_script_grows_with_its_length(commands):
    assert growth(lambda lines: check_script(f"#!/bin/bash\n#SBATCH -N 2\n{commands(lines)}"), 80) < 13
