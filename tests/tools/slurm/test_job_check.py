"""Somebody's job script: each rule provoked by a change to a faultless script, and what only looks like a mistake.

A finding is its line and what is wrong, as in "3: 8 tasks a node, 4 GPUs", where it matters with what to write instead
behind an arrow. The reasons are texts for people: one test shows them all on the command line.
"""

import pytest

from hvdtrain.errors import JobError
from hvdtrain.tools import slurm
from hvdtrain.tools.slurm import job_check, script
from hvdtrain.tools.slurm.job_check import RULES, check_script
from hvdtrain.tools.slurm.sites import SITES
from hvdtrain.tools.slurm.step_rules import Finding
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
PYTHON = "python -m hvdtrain.torch digits"
FILLED = "is filled in by the job's shell"


def rendered(name: str) -> str:
    return slurm.render(SITES[name], slurm.Options(nodes=2), ("python", "train.py"))


CHANGED = {  # what is replaced in GOOD, by what: the findings
    "too many tasks": ("per-node=4", "per-node=8", "3: 8 tasks a node, 4 GPUs -> #SBATCH --ntasks-per-node=4"),
    "too few tasks": ("per-node=4", "per-node=1", "3: 1 task a node, 4 GPUs"),
    "tasks not given": ("#SBATCH --ntasks-per-node=4\n", "", "11: 1 task a node, 4 GPUs"),
    "tasks as a total": ("--ntasks-per-node=4", "-n 16", "3: 8 tasks a node, 4 GPUs -> #SBATCH --ntasks=8"),
    "GPUs as a total": ("--gres=gpu:4", "--gpus=4", "3: 4 tasks a node, 2 GPUs"),
    "GPUs of a type": ("--gres=gpu:4", "--gres=nvme:1,gpu:a100:2", "3: 4 tasks a node, 2 GPUs"),
    "all GPUs to one task": (
        "--ntasks-per-node=4\n#SBATCH --gres=gpu:4",
        "--ntasks-per-node=1\n#SBATCH --gpus-per-task=4",
        "3: 1 task a node, 4 GPUs -> #SBATCH --ntasks-per-node=4",
    ),
    "srun's own tasks": (
        "srun ",
        "srun --ntasks-per-node=2 ",
        "12: 2 tasks a node, 4 GPUs -> srun --ntasks-per-node=4",
    ),
    "no GPU": ("#SBATCH --gres=gpu:4\n", "", "11: no GPU is requested -> #SBATCH --gres=gpu:4"),
    "too many CPUs": ("cpus-per-task=24", "cpus-per-task=32", "5: 4 tasks x 32 CPUs -> #SBATCH --cpus-per-task=24"),
    "no CPUs": ("#SBATCH --cpus-per-task=24\n", "", "11: no --cpus-per-task (advice) -> #SBATCH --cpus-per-task=24"),
    "SRUN_CPUS_PER_TASK missing": (
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"\n',
        "",
        "11: SRUN_CPUS_PER_TASK is not set (advice)",
    ),
    "SRUN_CPUS_PER_TASK in a comment": (
        "export SRUN_CPUS_PER_TASK=",
        "# export SRUN_CPUS_PER_TASK=",
        "12: SRUN_CPUS_PER_TASK is not set (advice)",
    ),
    "late option": (
        "module load Python\n",
        "module load Python\n#SBATCH --ntasks-per-node=2\n",
        "11: #SBATCH after the first command",
    ),
    "partition": ("=booster", "=batch", "6: --partition=batch -> #SBATCH --partition=booster"),
    "no partition": ("#SBATCH --partition=booster\n", "", "1: no --partition -> #SBATCH --partition=booster"),
    "no signal": ("#SBATCH --signal=USR2@120\n", "", "11: no --signal (advice) -> #SBATCH --signal=USR2@120"),
    "no requeue": ("#SBATCH --requeue\n", "", "11: no --requeue (advice)"),
    "srun -n": (
        "srun ",
        "srun -n4 ",
        "12: srun -n 4 (advice) -> srun without -n takes all tasks of the job",
        "12: 2 tasks a node, 4 GPUs -> srun --ntasks=8",
    ),
    "tasks that contradict": (
        "#SBATCH --nodes=2\n",
        "#SBATCH --nodes=2\n#SBATCH --ntasks=4\n",
        "3: --ntasks=4, but 2 x 4 tasks a node (advice) -> #SBATCH --ntasks=8, or leave --ntasks out",
        "3: 2 tasks a node, 4 GPUs -> #SBATCH --ntasks=8",
    ),
    "time": ("=02:00:00", "=2h", "7: --time=2h"),
    "minutes for hours": ("=02:00:00", "=02:00", "7: --time=02:00 (advice) -> --time=02:00:00"),
    "no number of nodes": ("--nodes=2", "--nodes=two", "2: --nodes=two"),
    "Windows line ends": ("#SBATCH --nodes=2\n", "#SBATCH --nodes=2\r\n", "2: Windows line ends"),
    "no shebang": ("#!/bin/bash\n", "", "1: no #! line"),
    "a value with a space": (
        "#SBATCH --nodes=2",
        "#SBATCH --nodes=2\n#SBATCH --comment=my first run --exclusive",
        '3: --comment=my first run --exclusive -> #SBATCH --comment="my first run"',
    ),
    "an environment that tasks do not get": (
        "#SBATCH --nodes=2",
        "#SBATCH --nodes=2\n#SBATCH --export=NONE",
        "3: --export=NONE -> #SBATCH --export=ALL, or before srun: export SLURM_EXPORT_ENV=ALL",
    ),
    "a signal that bash keeps": (
        "--signal=USR2@120",
        "--signal=B:USR2@120",
        "8: --signal=B:USR2@120 -> #SBATCH --signal=USR2@120, which srun gives to its tasks",
    ),
    "no plugin": ("srun --mpi=pmix", "srun", "12: srun without --mpi (advice) -> srun --mpi=pmix"),
    "unknown plugin": ("--mpi=pmix", "--mpi=openmp", "12: srun --mpi=openmp (advice)"),
    "a comment behind": ("module load Python", "module load Python  # it's $SLURM_PROCID"),
    "a comment behind an option": ("--nodes=2", "--nodes=2  # it's two"),
    "options in pairs": ("--nodes=2\n#SBATCH --ntasks-per-node=4", "-N 2 --ntasks-per-node 4"),
    "a step on one node": ("srun ", "srun -N 1 -n 4 "),
    "a task count that agrees": ("srun ", "srun -n 8 "),
    "CPUs given to srun": ('export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"\nsrun', "srun -c 24"),
    "a GPU a task": (
        "--gres=gpu:4",
        "--gpus-per-task=1",
        "4: --gpus-per-task=1 (advice) -> #SBATCH --gpus-per-node=4, and srun --gpu-bind=none",
    ),
    "days": ("=02:00:00", "=1-12:30"),
    "blank lines among the options": ("#SBATCH --nodes=2", "\n  # two\n#SBATCH --nodes=2"),
}
INSERTED = {  # what stands above GOOD's module: the findings
    "rank exported": ("export RANK=$SLURM_PROCID", f"10: $SLURM_PROCID {FILLED}"),
    "rank behind a # that is no comment": ("n=${#hosts[@]} r=$SLURM_PROCID", f"10: $SLURM_PROCID {FILLED}"),
    "local rank exported": ('export LOCAL_RANK="${SLURM_LOCALID}"', f"10: $SLURM_LOCALID {FILLED}"),
    "rank by hand": ("export RANK=0", "10: RANK= is set for all ranks"),
    "a variable of an option that is not given": (
        "export WORKERS=$SLURM_GPUS",
        "10: $SLURM_GPUS may be empty (advice) -> #SBATCH --gpus=N",
    ),
    "fixed port": ("export MASTER_PORT=29500", "10: a fixed port (advice)"),
    "port too high": ("MASTER_PORT=$((10000 + $SLURM_JOB_ID))", "10: a port from the whole job id"),
    "port too high, braces": ("MASTER_PORT=$(expr ${SLURM_JOBID} + 10000)", "10: a port from the whole job id"),
    "port is the job id": ("MASTER_PORT=$SLURM_JOB_ID", "10: a port from the whole job id"),
    "octal port": (
        "MASTER_PORT=$((10000 + ${SLURM_JOB_ID: -4}))",
        "10: a port from the job id's last characters -> $((10000 + SLURM_JOB_ID % 10000))",
    ),
    "octal port by tail": (
        "MASTER_PORT=$((10000 + $(echo -n $SLURM_JOBID | tail -c 4)))",
        "10: a port from the job id's last characters",
    ),
    "space in #SBATCH": ("# SBATCH --mem=64G", "10: '# SBATCH' is not #SBATCH (advice) -> #SBATCH --mem=64G"),
    "typo in #SBATCH": ("#SBTACH -A abc", "10: '#SBTACH' is not #SBATCH -> #SBATCH -A abc"),
    "one GPU visible": ("export CUDA_VISIBLE_DEVICES=0", "10: CUDA_VISIBLE_DEVICES=0"),
    "memory": ("#SBATCH --mem=1.5T", "10: --mem=1.5T"),
    "hint undone": ("#SBATCH --hint=nomultithread\n#SBATCH --ntasks-per-core=1", "11: --ntasks-per-core beside --hint"),
    "a comment": ("# don't: export RANK=$SLURM_PROCID MASTER_PORT=29500",),
    "a here-document": ("cat > run.sh <<'END'\npython -m hvdtrain.torch $SLURM_PROCID\nEND",),
    "an option switched off": ("##SBATCH --mem=2x",),
    "a look at the nodes": ("srun -n2 --ntasks-per-node=1 hostname",),
    "a step for one task": ("srun -N1 -n1 tar xf data.tar",),
    "tools in Python": ("python -m venv env && pip install x",),
    "a port from the id": ("export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))",),
    "a decimal port": ("MASTER_PORT=$((10000 + 10#${SLURM_JOB_ID: -4}))",),
    "a port by expr": ("P=$(expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4))",),
    "all GPUs": ("export CUDA_VISIBLE_DEVICES=3,2,1,0",),
    "memory in GB": ("#SBATCH --mem=750GB",),
    "arithmetic and lists": ('n=$((1<<2)); [ ${#a[@]} -gt $# ] && echo "$n"',),
    "a here-string": ("read -r a <<< word",),
}
PLACED = {  # what stands in the place of GOOD's srun: the findings
    "no srun": (f"{PYTHON}", "12: python without srun -> srun python -m hvdtrain.torch ..."),
    "no srun before a file": (
        "cd work && CUDA_LAUNCH_BLOCKING=1 python3 train.py \\\n  --lr 1",
        "12: python3 without srun -> srun python3 train.py --lr ...",
    ),
    "rank exported, a small step before": (
        f"export RANK=$SLURM_PROCID\nsrun -N 1 -n 1 ./prepare.sh\n{SRUN}",
        f"12: $SLURM_PROCID {FILLED}",
    ),
    "rank on srun's line": (f"{SRUN} \\\n  --node $SLURM_NODEID", f"13: $SLURM_NODEID {FILLED}"),
    "rank in double quotes": (
        "srun --mpi=pmix bash -c \"\n  echo 'rank' $SLURM_PROCID\n  python train.py\"",
        f"13: $SLURM_PROCID {FILLED}",
    ),
    "fixed endpoint": (f"{SRUN} --rdzv_endpoint=$HOST:29500", "12: a fixed port (advice)"),
    "fixed endpoint in quotes": (f"{SRUN} '--rdzv-endpoint $HOST:13245'", "12: a fixed port (advice)"),
    "fixed port flag": (f"{SRUN} --master_port 12345", "12: a fixed port (advice)"),
    "a step that the script leaves": (f"{SRUN} > log 2>&1 &", "12: srun ... &"),
    "single quotes": ("srun --mpi=pmix bash -c 'RANK=$SLURM_PROCID exec python train.py'",),
    "single quotes over lines": ("srun --mpi=pmix bash -c '\n  export RANK=$SLURM_PROCID\n  python train.py'",),
    "an escape in double quotes": ('srun --mpi=pmix bash -c "RANK=\\$SLURM_PROCID python train.py"',),
    "an escape": ("srun --mpi=pmix bash -c RANK=\\$SLURM_PROCID\\ exec\\ python\\ train.py",),
    "a quote that never ends": (f'{SRUN}\necho "',),
    "a shift is no here-document": (f"n=$((1<<bits))\n{PYTHON}", "13: python without srun"),
    "quotes in quotes": (f'echo "$(echo "it\'s")"\n{PYTHON}', "13: python without srun"),
    "quotes in an expansion": (f'echo "${{x:-"it\'s"}}"\n{PYTHON}', "13: python without srun"),
    "an escape in $'...'": (f"echo $'it\\'s'\n{PYTHON}", "13: python without srun"),
    "a comment behind a semicolon": (f":;# it's\n{PYTHON}", "13: python without srun"),
    "an odd end of a here-document": (
        f"cat <<'E-F'\n{PYTHON} '\nE-F\n{SRUN} --master_port 1",
        "15: a fixed port (advice)",
    ),
    "a here-document that is filled in": (
        f"cat > a <<END\nexport RANK=$SLURM_PROCID\nEND\n{SRUN}",
        f"13: $SLURM_PROCID {FILLED}",
    ),
    "a command in quotes": (f'unset SRUN_CPUS_PER_TASK; log="$({SRUN} --master_port 1)"', "12: a fixed port (advice)"),
    "a loop in an if": (
        f"if true \\\n  && cd x\nthen for i in 1 2; do\n  {SRUN} --master_port 1\ndone; fi",
        "15: a fixed port (advice)",
    ),
    "a file descriptor": (
        f"srun --mpi=pmix -n 2>errors 4 {PYTHON}",
        "12: 2 tasks a node, 4 GPUs",
        "12: srun -n 4 (advice)",
    ),
    "a redirection in the command": (f"srun --mpi=pmix > log {PYTHON} & srun -n 4 x; wait",),
    "an array is no command": (f"words=(python {PYTHON})\n{SRUN}",),
    "a script in a here-document": (f"cat > a <<END\n#!/bin/bash\n#SBATCH -N 1\n# SBATCH -n 1\nEND\n{SRUN}",),
    "#SBATCH in a quote": (f"echo '\n#SBATCH --nodes=1\n'\n{SRUN}",),
    "a function of the step": (
        f"f() {{\n  export RANK=$SLURM_PROCID\n  {PYTHON}\n}}\nexport -f f\nsrun --mpi=none bash -c f",
    ),
    "a function of the job": (f"f() {{\n  export RANK=$SLURM_PROCID\n  {SRUN}\n}}\nf", f"13: $SLURM_PROCID {FILLED}"),
}
ELSEWHERE = {  # a script, its site, what is replaced in it, by what: the finding
    "an account of Jean Zay": (
        rendered("jean-zay"),
        "jean-zay",
        "#SBATCH --requeue ",
        "#SBATCH -A abc ",
        "14: --account=abc -> #SBATCH --account=abc@v100",
    ),
    "Jean Zay's hyper-threads": (
        rendered("jean-zay"),
        "jean-zay",
        "#SBATCH --hint=nomultithread ",
        "#SBATCH --exclusive ",
        "1: no --hint (advice) -> #SBATCH --hint=nomultithread",
    ),
    "Perlmutter's nodes without GPUs": (
        rendered("perlmutter"),
        "perlmutter",
        "--constraint=gpu ",
        "-C cpu ",
        "9: --constraint=cpu",
    ),
    "a torchrun for each rank": (
        TORCHRUN,
        None,
        "--ntasks-per-node=1 --cpus-per-task=96",
        "--ntasks-per-node=4 --cpus-per-task=24",
        "2: 4 torchruns a node -> #SBATCH --ntasks-per-node=1",
    ),
    "torchrun's port in the step": (
        TORCHRUN,
        None,
        "$MASTER_ADDR:$MASTER_PORT",
        "$MASTER_ADDR:29500",
        "7: a fixed port (advice)",
    ),
    "no GPUs of no known site": (
        TORCHRUN,
        None,
        "#SBATCH --gpus-per-node=a100:4\n",
        "",
        "5: no GPU is requested (advice) -> #SBATCH --gres=gpu:4",
    ),
    "one process for several GPUs": (
        "#!/bin/bash\n#SBATCH --gres=gpu:1 -c 8\npython train.py\n",
        None,
        "gpu:1",
        "gpu:2",
        "3: 1 process, 2 GPUs (advice) -> torchrun --standalone --nproc-per-node=2",
    ),
    "torchrun on one of two nodes": (
        TORCHRUN,
        None,
        "srun bash -c",
        "torchrun --nproc-per-node=4 a.py #",
        "6: torchrun without srun -> srun torchrun --nproc-per-node=4 a.py ...",
    ),
}


def shown(findings: list[Finding]) -> list[str]:
    return [f"{it.line}: {it.wrong}{' (advice)' if it.note else ''} -> {it.instead}" for it in findings]


def same(findings: list[Finding], expected: tuple[str, ...]) -> bool:
    """Whether these are the findings, with what to write instead where it is expected."""
    pairs = zip(shown(findings), sorted(expected), strict=False)
    return len(findings) == len(expected) and all(text in {full, full.partition(" -> ")[0]} for full, text in pairs)


SCRIPTS = {
    **{name: (GOOD, BOOSTER, *row) for name, row in CHANGED.items()},
    **{name: (GOOD, BOOSTER, "module load", f"{new}\nmodule load", *found) for name, (new, *found) in INSERTED.items()},
    **{name: (GOOD, BOOSTER, SRUN, *row) for name, row in PLACED.items()},
    **{name: (text, SITES.get(site), *row) for name, (text, site, *row) in ELSEWHERE.items()},
}


@pytest.mark.parametrize("row", SCRIPTS.values(), ids=SCRIPTS)
def test_a_rule(row):
    text, site, old, new, *expected = row
    assert text.count(old) == 1
    before = check_script(text, site)
    found = [finding for finding in check_script(text.replace(old, new), site) if finding not in before]
    assert same(sorted(found, key=lambda finding: shown([finding])), tuple(expected)), shown(found)


def test_the_scripts_that_are_changed_are_faultless():
    assert [check_script(text, site) for text, site, *_ in SCRIPTS.values()] == [[]] * len(SCRIPTS)


def test_every_rule_is_provoked():
    cases = [job_check.read(text.replace(old, new), site) for text, site, old, new, *_ in SCRIPTS.values()]
    assert [rule.__name__ for rule in RULES if not any(list(rule(case)) for case in cases)] == []


@pytest.mark.parametrize("quoted", [f'x="$({SRUN})"', f"x=`{SRUN}`"])
def test_a_step_in_a_substitution(quoted):
    found = training_steps(script.read(GOOD.replace(SRUN, quoted)))
    assert [(step.line, step.of_srun["mpi"].value) for step in found] == [(12, "pmix")]


def test_a_script_that_takes_too_long_to_read(monkeypatch):
    monkeypatch.setattr(script, "PARSE_SECONDS", -1)
    (finding,) = check_script("#!/bin/bash\n" + "echo a\n" * 1000)
    assert finding.wrong == "cannot be read as a script"


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


def test_a_site_is_not_guessed():
    assert check_script(GOOD.replace("=booster", "=batch").replace("task=24", "task=99")) == []


def test_the_lines_of_commands():
    read = script.read('#!/bin/bash\n#SBATCH -N 2\n\na "1\n2" && b \\\n  c 2>&1 > e\ncat <<-END | d\n  e\n  END\nf\n')
    assert [(command.line, command.words) for command in read.commands] == [
        (4, ("a", "1\n2")),
        (5, ("b", "c")),
        (7, ("cat",)),
        (7, ("d",)),
        (10, ("f",)),
    ]


def test_the_findings_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "job.sh"
    path.write_text(GOOD.replace("per-node=4", "per-node=8").replace("#SBATCH --requeue\n", ""))
    assert slurm.main(["--check", str(path)]) == 1
    assert (
        capsys.readouterr().out
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


@pytest.mark.parametrize(("text", "site", "code", "last"), CODES.values(), ids=CODES.keys())
def test_the_exit_code(text, site, code, last, tmp_path, capsys):
    path = tmp_path / "job.sh"
    path.write_bytes(text.encode())
    assert slurm.main(["--check", str(path), *(["--site", site] if site else [])]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last.format(path)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "job.sh"
    path.write_bytes(b"\xff\xfe#")
    with pytest.raises(JobError, match=f"got {path}: it is not text"):
        slurm.main(["--check", str(path)])
