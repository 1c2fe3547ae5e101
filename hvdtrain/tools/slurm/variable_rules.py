"""What is wrong with the ranks and ports that a job script sets: variables that are the same for all."""

import re
from collections.abc import Iterator

from hvdtrain.tools.slurm.case import Case, Finding, Rule

RANK_VARIABLE = re.compile(r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\b")
RANK_BY_HAND = re.compile(r"(?:^|[\s;])((?:LOCAL_)?RANK=)[\"']?\d")
NODE_BY_HAND = re.compile(r"--(?:node|machine)[-_]rank[= ]\d+\b")
IN_A_TEST = re.compile(r"\[\s+\S*$|\[\s.{0,100}[=<>!]\s*\S*$|\blog\s.*$|\(\(\s*\S*$")
LONGEST_TEST = 1000  # characters, as every variable is looked for behind one
FIXED_PORT = re.compile(
    r"(?:MASTER|RDZV|MAIN_PROCESS)_PORT=[\"']?\d+(?=[\"'\s;]|$)|--(?:master|main[-_]process)[-_]port[= ]\d+\b|"
    r"--rdzv[-_]endpoint[= ][^\s%]{0,255}:\d+\b"
)
JOB = r"\$?\{?SLURM_JOB_?ID\b"
PORT_OVERFLOWS = re.compile(rf"(?:\d\s*\+\s*|MASTER_PORT=){JOB}(?!:)\}}?(?!\}}|\s*%)|{JOB}\}}?\s*\+\s*\d")
LAST_DIGITS = re.compile(rf"{JOB}:\s*-\d")
SETS = {
    "SLURM_GPUS": "gpus",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_GPUS_PER_TASK": "gpus-per-task",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
}
SET_BY_OPTION = re.compile(rf"\$\{{?({'|'.join(SETS)})(?![\w:]|-)")
PORT = "$((10000 + SLURM_JOB_ID % 10000))"
SAME = "every rank would have the same number"


def _rank_variables(case: Case) -> Iterator[Finding]:
    """Variables of a rank that the job's own shell fills in."""
    if _has_one_task(case):
        return
    numbered = bool(case.trainings) and all(step.numbers_ranks for step in case.trainings)
    text = case.script.shell.expanded
    for line, found in case.searched(RANK_VARIABLE):
        begin = max(text.rfind("\n", 0, found.start()) + 1, found.start() - LONGEST_TEST)
        if not IN_A_TEST.search(text, begin, found.start()):
            yield Finding(
                line,
                f"${found[1]} is filled in by the job's shell",
                "there it is 0 for all: only inside the step has each rank its own",
                f"srun bash -c '... ${found[1]} ...' in single quotes, or read it in the program",
                note=numbered,
            )
    for line, found in case.searched(RANK_BY_HAND):
        instead = "leave it out: the launcher sets it for each rank"
        yield Finding(line, f"{found[1]} is set for all ranks", SAME, instead, note=numbered)
    for step in case.trainings:
        found_in = NODE_BY_HAND.search(" ".join(step.program.words)) if step.launcher and step.is_torchrun else None
        if found_in and (step.nodes or 1) > 1 and not step.numbers_ranks:
            why, instead = "every node would have the same number", "--rdzv-backend=c10d, which needs no number"
            yield Finding(step.line, found_in[0], why, instead)


def _unset(case: Case) -> Iterator[Finding]:
    """Variables that SLURM sets only where their option is given."""
    given = {option.name for option in case.script.options}
    told = set(case.script.shell.values)
    for line, found in case.searched(SET_BY_OPTION):
        name = found[1]
        if name not in told and SETS[name] not in given:
            told.add(name)
            why = f"SLURM sets it only where --{SETS[name]} is given, in the script or to sbatch"
            yield Finding(line, f"${name} may be empty", why, f"#SBATCH --{SETS[name]}=N", note=True)


def _has_one_task(case: Case) -> bool:
    """Whether there is but one task, number 0, or one torchrun."""
    return bool(case.steps) and all(
        step.nodes == 1 and (not step.launcher or step.tasks_per_node == 1) for step in case.steps
    )


def _ports(case: Case) -> Iterator[Finding]:
    """Ports that two jobs share, that do not exist, or that some job ids break."""
    text = case.script.shell.text
    alone = case.is_exclusive or all(step.nodes == 1 for step in (case.job, *case.steps))
    fixed = None if alone else FIXED_PORT.search(text)
    if fixed:
        why = "two jobs that share a node, or a job that starts again, find it taken"
        yield Finding(case.line_of(fixed.start()), "a fixed port", why, PORT, note=True)
    for found in PORT_OVERFLOWS.finditer(text):
        why = "ports end at 65535, job ids do not"
        yield Finding(case.line_of(found.start()), "a port from the whole job id", why, PORT)
    for position in _octal_ports(text):
        why = "in $(( )) digits after a 0 are octal: 0089 is an error, 0077 is 63; and a short id has no last four"
        yield Finding(case.line_of(position), "a port from the job id's last characters", why, PORT)


def _octal_ports(text: str) -> Iterator[int]:
    """Where arithmetic begins that takes the job id's last digits, of each line the first."""
    # Steps and no single pattern: that would try every pair of brackets.
    for line in re.finditer(r"[^#\n]+", text.replace("\\\n", "  ")):
        start = line[0].find("$((")
        inside = line[0][start + 3 :]
        if start >= 0 and (LAST_DIGITS.search(inside) or any(map(_cuts_job_id, inside.split(")")))):
            yield line.start() + start


def _cuts_job_id(part: str) -> bool:
    """Whether a command in it takes characters of the job id."""
    begin = part.find("$(")
    job = re.compile(JOB).search(part, begin) if begin >= 0 else None
    return bool(job and re.compile("tail -c|cut -c").search(part, job.end()))


RULES: tuple[Rule, ...] = (_rank_variables, _unset, _ports)
