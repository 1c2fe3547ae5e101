"""`python -m hvdtrain slurm --site NAME -- COMMAND`: a site's job script, printed or submitted, or one checked."""

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import tyro
from pydantic import Field

from hvdtrain.core import flags
from hvdtrain.core.recipe import nearest
from hvdtrain.errors import JobError, RecipeError
from hvdtrain.files import read_bytes
from hvdtrain.launch import pmi
from hvdtrain.tools.slurm import bash
from hvdtrain.tools.slurm.case import Finding
from hvdtrain.tools.slurm.job_check import LONGEST, MOST_BYTES, findings_of, read, report
from hvdtrain.tools.slurm.sites import SITES, TIME, Site, table
from hvdtrain.untrusted import printable
from hvdtrain.untrusted import quoted as shown

PROG = "python -m hvdtrain slurm"
AS_IN = f"give it after --, as in: {PROG} --site NAME -- python -m hvdtrain.torch linear"
NAME = r"(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})"
OF_A_RANK = re.compile(r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\b")
COMMENTS_AT = 48
Count = Annotated[int, Field(ge=1, le=1_000_000)]
OF_A_TRAINING = ("--signal", "--requeue", "--open-mode")
SAVES = "120 s before its time limit hvdtrain saves and requeues the job"
IGNORED = "120 s before its time limit; delete it if COMMAND ignores USR2"
TRAPPED = "120 s before its time limit, for programs that handle it"
REQUEUED = "it may be queued again, as when its first node fails"
EXPEDITED = "after a lost node it is first in the queue; after an error it may be held there"

MPI_WHY = "# --mpi says how ranks find each other: pmix for Open MPI, pmi2 for MPICH, cray_shasta for Cray-MPICH.\n"
ORDER_WHY = (
    "# CUDA_VISIBLE_DEVICES stands behind srun, which sets it anew: this order puts a task next to its own GPU.\n"
)
SUPERVISE_WHY = """\
# supervise starts srun again when a rank or a node is lost: on a spare node, else on fewer nodes. Where too few remain
# it queues the job again.
"""
SRUN = """\
# If one rank dies, srun stops the others too: they would wait for it until the time limit.
{mpi_why}{order_why}{supervise}srun --kill-on-bad-exit=1{mpi} {order}{command}
"""

ITSELF = """\
# This runs once, on the first node, and starts its steps with srun.
{command}
"""

KEY = """export HVDTRAIN_KEY="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')\""""

TORCHRUN = """\
# What stands between the single quotes runs once on each node: only there do SLURM_STEP_NODELIST and SLURM_NODEID
# describe the step. One torchrun a node starts one rank a GPU.
{order_why}{supervise}srun --kill-on-bad-exit=1{mpi} {order}bash -c '
  trap "" USR2  # torchrun would end at the signal of the time limit; its ranks get it all the same
  # The rendezvous is on the first node{suffix_note}.
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1){suffix}
  MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))  # the last four digits of the job id: jobs do not share a port
  export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / {gpus}))}}"  # torchrun would set 1
  # is_host names the node that opens the rendezvous: torchrun does not recognise a second name of it.
  exec torchrun --nnodes="$SLURM_STEP_NUM_NODES" --nproc-per-node={gpus} \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \\
    --rdzv-conf="is_host=$((SLURM_NODEID == 0))"{local_address} "$@"
' torchrun {command}
"""

TF_CONFIG = """\
# What stands between the single quotes runs once on each node: only there is SLURM_NODEID the number of the node.
# TF_CONFIG lists every worker for TensorFlow, and which of them this one is.
{order_why}{supervise}srun --kill-on-bad-exit=1{mpi} {order}bash -c '
  trap "" USR2  # a program that does not know the signal of the time limit would end at it
  port=$((10000 + SLURM_JOB_ID % 10000))  # the last four digits of the job id: jobs do not share a port
  workers=$(printf "\\"%s{suffix}:$port\\", " $(scontrol show hostnames "$SLURM_STEP_NODELIST"))
  cluster="{{\\"worker\\": [${{workers%, }}]}}"
  task="{{\\"type\\": \\"worker\\", \\"index\\": $SLURM_NODEID}}"
  export TF_CONFIG="{{\\"cluster\\": $cluster, \\"task\\": $task}}"
  exec "$@"
' tf-config {command}
"""


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Prints the job script that starts COMMAND (after --) on a site's nodes, or checks one.

    The arguments of COMMAND reach it unchanged, but for $NAME and ${NAME}, which the job's shell fills in: quote
    '$WORK' here for the job to have its own. `--launcher torchrun` takes `python -m MODULE` or `python FILE`.
    """

    site: Annotated[str | None, tyro.conf.arg(help=", ".join(SITES))] = None
    nodes: Count = 1
    spare: Annotated[
        int, Field(ge=0, le=1_000_000), tyro.conf.arg(help="nodes more, each of which replaces a lost one", metavar="N")
    ] = 0
    expedite: Annotated[
        bool, tyro.conf.arg(help="start again before all other jobs when the first node is lost; SLURM 25.11 and later")
    ] = False
    time: Annotated[str | None, tyro.conf.arg(help="HH:MM:SS; left out: the site's usual", metavar="TIME")] = None
    account: Annotated[str | None, tyro.conf.arg(help="the project that pays", metavar="NAME")] = None
    partition: Annotated[str | None, tyro.conf.arg(help="left out: the site's", metavar="NAME")] = None
    reservation: Annotated[str | None, tyro.conf.arg(help="of a course", metavar="NAME")] = None
    mpi: Annotated[str | None, tyro.conf.arg(help="srun's plugin: pmix, pmi2, ...", metavar="PLUGIN")] = None
    launcher: Annotated[
        Literal["srun", "torchrun", "tf-config"],
        tyro.conf.arg(help="srun: one task a GPU; torchrun: one task a node; tf-config: one GPU a node and TF_CONFIG"),
    ] = "srun"
    job_name: Annotated[str, tyro.conf.arg(metavar="NAME")] = "hvdtrain"
    gpus_per_node: Annotated[Count | None, tyro.conf.arg(help="left out: all of the site's", metavar="N")] = None
    cpus_per_task: Annotated[
        Count | None, tyro.conf.arg(help="left out: the GPU's fraction of a node", metavar="N")
    ] = None
    submit: Annotated[bool, tyro.conf.arg(help="give it to sbatch and print the job's number")] = False
    check: Annotated[Path | None, tyro.conf.arg(help="report what is wrong with this job script", metavar="FILE")] = (
        None
    )
    list: Annotated[bool, tyro.conf.arg(help="the sites and their shapes")] = False


def main(argv: Sequence[str]) -> int:
    """Prints, submits or checks a job script; 1 where a checked one has errors. Raises JobError."""
    end = argv.index("--") if "--" in argv else len(argv)
    command = tuple(argv[end + 1 :])
    try:
        options: Options = flags.parse(Options, PROG, argv[:end])
    except RecipeError as error:
        if command or "belongs to no flag" not in str(error):
            raise
        raise JobError(f"no -- before the command; {AS_IN}") from None
    if options.list:
        print(table())
        return 0
    if options.check:
        return _check(options.check, options.site)
    if options.site is None:
        raise JobError(f"--site is missing; give the site where the job will run: {', '.join(SITES)}.")
    script = render(site_named(options.site), options, command)
    print(submit(script) if options.submit else script, end="\n" if options.submit else "")
    return 0


def site_named(name: str) -> Site:
    """The profile of that name. Raises JobError."""
    if name not in SITES:
        raise JobError(f"unknown site {shown(name)}.{nearest(name, list(SITES))} Sites: {', '.join(SITES)}.")
    return SITES[name]


def render(site: Site, options: Options, command: Sequence[str], starts_steps: bool = False) -> str:
    """The text of the job script. Pure. Raises JobError where an option or the command breaks a rule.

    A command that starts its steps itself runs once, on the first node, and is not queued again near its end.
    """
    _refuse_bad_options(site, options, command)
    lines = ["#!/bin/bash", f"# {site.title}; made by `{PROG}`. Submit it with `sbatch FILE`."]
    lines += [f"# Its values: {site.source}."]
    rows = _directives(site, options, command)
    rows = [row for row in rows if not (starts_steps and row[0].startswith(OF_A_TRAINING))]
    lines += [_commented(f"#SBATCH {option}", why) for option, why in rows]
    if not options.account:
        reads = f"; here it reads like {site.account[1]}" if site.account[1] else ", where the centre requires one"
        lines.append(f"# Give your project with `sbatch --account=NAME FILE`{reads}.")
    lines += ["", *_environment(site, options, command), "", ""]
    return "\n".join(lines) + (
        ITSELF.format(command=quoted(command)) if starts_steps else _step(site, options, command)
    )


def quoted(arguments: Sequence[str]) -> str:
    """The arguments for a shell that gives them back unchanged, but for $NAME and ${NAME}, which it fills in."""
    return " ".join(_quoted(argument) for argument in arguments)


def submit(script: str) -> str:
    """Gives the script to sbatch; the number of the job. Raises JobError."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, text=True, errors="replace", capture_output=True, check=False
        )
    except OSError:
        raise JobError(
            "--submit needs sbatch on the PATH, got none; go to a login node of the cluster, or leave --submit out, "
            "take the printed script there and type: sbatch FILE"
        ) from None
    if done.returncode:
        reason = "; ".join(line.removeprefix("sbatch: ") for line in done.stderr.splitlines()) or "no reason given"
        raise JobError(f"sbatch refused the script: {reason}; change the flag it names.")
    return printable(done.stdout.strip().partition(";")[0])  # JOB;CLUSTER where there are several clusters


def _check(path: Path, name: str | None) -> int:
    site = site_named(name) if name and name != "generic" else None
    try:
        text = read_bytes(path, MOST_BYTES).decode()  # as bytes: reading as text would hide Windows line ends
    except UnicodeDecodeError:
        raise JobError(f"--check must name a job script that can be read, got {path}: it is not text.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JobError(f"--check must name a job script that can be read, got {path}: {reason}.") from None
    why, instead = "bash cannot read the script to its end", "correct it, until this prints nothing: bash -n FILE"
    refused = [Finding(line, printable(message, LONGEST), why, instead) for line, message in bash.syntax_errors(text)]
    case = read(text, site)
    findings = sorted([*findings_of(case), *refused], key=lambda finding: finding.line)
    print(report(str(path), findings, case))
    return int(any(not finding.note for finding in findings))


def _refuse_bad_options(site: Site, options: Options, command: Sequence[str]) -> None:
    if not command:
        raise JobError(f"no command to run; {AS_IN}")
    if wrong := next((argument for argument in command if not _is_text(argument)), None):
        raise JobError(f"the command must be text of at most {MOST_BYTES:,} characters, got {shown(wrong)}.")
    if found := OF_A_RANK.search(" ".join(command)):
        raise JobError(
            f"the command's ${found.group(1)} would be filled in by the job's shell, the same for every rank; "
            "read it in the program, or in a script of your own that the command starts."
        )
    for name in ("account", "partition", "reservation", "job_name"):
        value = getattr(options, name)
        if value is not None and not re.fullmatch(r"[\w.@%+,-]+", value):
            raise JobError(
                f"--{name.replace('_', '-')} must be one word of letters, digits and .@%+,-_, got {shown(value)}."
            )
    if options.time is not None and not TIME.fullmatch(options.time):
        raise JobError(f"--time must read like 02:00:00 or 1-12:00:00 (a day and a half), got {shown(options.time)}.")
    pmi.check_name(options.mpi)
    pattern, example = site.account
    if options.account and not re.fullmatch(pattern, options.account):
        raise JobError(f"--account must read like {example} at this site, got {shown(options.account)}.")
    _refuse_bad_shape(site, options)


def _is_text(argument: str) -> bool:
    """Whether it may stand in a script: what a terminal would act on, or no file can hold, may not."""
    return len(argument) <= MOST_BYTES and argument.replace("\n", "").replace("\t", "").isprintable()


def _refuse_bad_shape(site: Site, options: Options) -> None:
    if site is SITES["generic"]:
        return
    gpus, cpus = _shape(site, options)
    if gpus > site.gpus:
        raise JobError(f"--gpus-per-node must lie in [1, {site.gpus}] at {site.title}, got {gpus}.")
    tasks = gpus if options.launcher == "srun" else 1
    if tasks * cpus > site.cpus:
        raise JobError(f"{tasks} tasks x {cpus} CPUs exceed the {site.cpus} CPUs of a node; lower --cpus-per-task.")


def _shape(site: Site, options: Options) -> tuple[int, int]:
    """GPUs a node and CPUs a task."""
    gpus = options.gpus_per_node or (1 if options.launcher == "tf-config" else site.gpus)
    per_gpu = site.cpus // site.gpus
    return gpus, options.cpus_per_task or (per_gpu * gpus if options.launcher != "srun" else per_gpu)


def _directives(site: Site, options: Options, command: Sequence[str]) -> list[tuple[str, str]]:
    """The options of sbatch, each with a comment or an empty one."""
    gpus, cpus = _shape(site, options)
    tasks, why_tasks = {
        "srun": (gpus, "one task, that is one rank, a GPU"),
        "torchrun": (1, "one torchrun a node; it starts a rank a GPU itself"),
        "tf-config": (1, "one worker a node"),
    }[options.launcher]
    memory = f"{site.memory_gib * gpus // site.gpus}G" if site.memory_gib else None
    if options.launcher == "tf-config":
        memory = site.tf_memory
    partition = options.partition or site.partition
    otherwise = IGNORED if options.launcher == "srun" else TRAPPED
    at_signal = SAVES if any("hvdtrain" in argument for argument in command) else otherwise
    rows = [
        (f"--job-name={options.job_name}", ""),
        (f"--nodes={options.nodes + options.spare}", f"{options.spare} of them spare" if options.spare else ""),
        (f"--ntasks-per-node={tasks}", why_tasks),
        (f"--gres=gpu:{gpus}", "GPUs of each node") if site.gres else ("", ""),
        (f"--cpus-per-task={cpus}", f"of the node's {site.cpus}, to load and prepare data"),
        (f"--mem={memory}", "of each node") if memory else ("", ""),
        (f"--partition={partition}", "") if partition else ("", ""),
        (f"--constraint={site.constraint}", "nodes with GPUs") if site.constraint else ("", ""),
        (f"--hint={site.hint}", "a CPU is a whole core, not half of one") if site.hint else ("", ""),
        *site.directives,
        (f"--time={options.time or site.time}", "the job is stopped after this long"),
        (f"--account={options.account}", "the project that pays") if options.account else ("", ""),
        (f"--reservation={options.reservation}", "nodes kept free for it") if options.reservation else ("", ""),
        ("--output=%x-%j.out", "the log: name and number of the job"),
        ("--open-mode=append", "a requeued job continues its log instead of emptying it"),
        ("--signal=USR2@120", at_signal),
        (f"--requeue{'=expedite' * options.expedite}", EXPEDITED if options.expedite else REQUEUED),
    ]
    return [row for row in rows if row[0]]


def _environment(site: Site, options: Options, command: Sequence[str]) -> list[str]:
    """Modules and variables, as lines of the script."""
    tensorflow = options.launcher == "tf-config" or any("tensorflow" in argument for argument in command)
    framework = site.frameworks.get("tensorflow" if tensorflow else "torch")
    modules = [*site.modules, *([framework] if framework else [])]
    lines = [f"module load {' '.join(modules)}"] if modules else ["# Load here the modules your Python needs."]
    lines.append('# A Python environment of your own is switched on here: . "$HOME/venv/bin/activate"')
    why = "since SLURM 22.05 srun does not look above for it"
    lines.append(_commented('export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"', why))
    if any("hvdtrain" in argument for argument in command):
        lines += ["# The ranks of this job know one another by a key that other users of the nodes cannot read.", KEY]
    whole_node = _shape(site, options)[0] == site.gpus
    for name, value, why in site.environment:
        if name == "CUDA_VISIBLE_DEVICES" and not whole_node:
            continue
        text = f'"{value}"' if "$" in value else value
        lines.append(_commented(f"export {name}={text}", why))
    return lines


def _step(site: Site, options: Options, command: Sequence[str]) -> str:
    """The srun line, which starts the command on every node."""
    gpus = _shape(site, options)[0]
    plugin = options.mpi or (site.mpi if options.launcher == "srun" else None)
    spare = f" --spare={options.spare}" if options.spare else ""
    ordered = site.gpu_order and gpus == site.gpus
    values = {
        "mpi": f" --mpi={plugin}" if plugin else "",
        "mpi_why": MPI_WHY if plugin else "",
        "order": f"\\\n  env CUDA_VISIBLE_DEVICES={site.gpu_order} " if ordered else "",
        "order_why": ORDER_WHY if ordered else "",
        "gpus": gpus,
        "supervise": f"python -m hvdtrain supervise{spare} -- \\\n  ",
        "suffix": site.host_suffix,
        "suffix_note": f", by the name of its fast network: the hostname and {site.host_suffix}"
        if site.host_suffix
        else "",
        "local_address": f' --local-addr="${{SLURMD_NODENAME}}{site.host_suffix}"' if site.host_suffix else "",
        "command": quoted(_for_torchrun(command) if options.launcher == "torchrun" else command),
    }
    step = {"srun": SRUN, "torchrun": TORCHRUN, "tf-config": TF_CONFIG}[options.launcher].format(**values)
    return SUPERVISE_WHY + step


def _for_torchrun(command: Sequence[str]) -> tuple[str, ...]:
    """The command as torchrun wants it: `-m MODULE` or `FILE` without python; else any program."""
    is_python = re.fullmatch(r"python[\d.]*", Path(command[0]).name)
    if is_python and len(command) > 1 and (command[1] == "-m" or not command[1].startswith("-")):
        return tuple(command[1:])
    return ("--no-python", *command)


def _commented(text: str, why: str) -> str:
    return f"{text:<{COMMENTS_AT}}  # {why}" if why else text


def _quoted(argument: str) -> str:
    if not re.search(rf"\${NAME}", argument):
        return shlex.quote(argument)
    escaped = re.sub(rf'[\\"`]|\$(?!{NAME})', r"\\\g<0>", argument)
    return f'"{escaped}"'
