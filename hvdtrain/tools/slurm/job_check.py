"""What is wrong with somebody's job script: findings with their line, the reason, and what to write instead."""

import bisect
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from hvdtrain.errors import JobError
from hvdtrain.launch import pmi
from hvdtrain.tools.slurm.job_script import SBATCH, JobScript, Option, Step, program, read, training_steps
from hvdtrain.tools.slurm.sites import TIME, Site
from hvdtrain.untrusted import printable, whole_number

LAUNCHERS = {"srun", "mpirun", "mpiexec", "mpiexec.hydra", "horovodrun"}
STARTS_PYTHON = re.compile(r"python[\d.]*|torchrun")
RANK_VARIABLE = re.compile(r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\b")
RANK_BY_HAND = re.compile(r"(?:^|[\s;])((?:LOCAL_)?RANK=)[\"']?\d")
FIXED_PORT = re.compile(
    r"MASTER_PORT=[\"']?\d+(?=[\"'\s;]|$)|--master[-_]port[= ]\d+\b|--rdzv[-_]endpoint[= ][^\s%]{0,255}:\d+\b"
)
JOB = r"\$?\{?SLURM_JOB_?ID\b"
PORT_OVERFLOWS = re.compile(rf"(?:\d\s*\+\s*|MASTER_PORT=){JOB}(?!:)\}}?(?!\}}|\s*%)|{JOB}\}}?\s*\+\s*\d")
LAST_DIGITS = re.compile(rf"{JOB}:\s*-\d")
ALMOST_SBATCH = re.compile(r"\s*#\s*[SBATCH]{5,7}[ \t:]*-")
SRUN_CPUS = re.compile("SRUN_CPUS_PER_TASK=")
DEVICES = re.compile(r"\bCUDA_VISIBLE_DEVICES=[\"']?([\d,]+)")
NTASKS = ("ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core")
MOST_BYTES = 2**19
MOST_LINES = 100_000
MOST_OF_A_RULE = 1000
LONGEST = 300  # characters of a finding, which quotes the script
PORT = "$((10000 + SLURM_JOB_ID % 10000))"
WHOLE = {"nodes", "ntasks", "ntasks-per-node", "cpus-per-task"}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong; `note` where it is advice only."""

    line: int
    wrong: str
    why: str
    instead: str
    note: bool = False


@dataclass(frozen=True)
class Case:
    """A script, its training steps, and the site it is for, if that is known."""

    text: str
    script: JobScript
    site: Site | None
    steps: tuple[Step, ...]

    def searched(self, pattern: re.Pattern[str]) -> Iterator[tuple[int, re.Match[str]]]:
        """What matches in all that the job's own shell fills in, with its line."""
        return ((self.line_of(found.start()), found) for found in pattern.finditer(self.script.shell.expanded))

    def line_of(self, position: int) -> int:
        """The line of the script in which that character of the text stands."""
        return 1 + bisect.bisect_left(self._line_ends, position)

    @functools.cached_property
    def _line_ends(self) -> list[int]:
        return [found.start() for found in re.finditer("\n", self.script.shell.text)]


def check(text: str, site: Site | None = None) -> list[Finding]:
    """What is wrong with the job script, in the order of its lines. Raises JobError for one that is too long."""
    if len(text) > MOST_BYTES or text.count("\n") > MOST_LINES:
        raise JobError(f"a job script must have at most {MOST_BYTES:,} bytes in {MOST_LINES:,} lines.")
    case = case_of(text, site)
    found = {_shortened(finding) for rule in RULES for finding in itertools.islice(rule(case), MOST_OF_A_RULE)}
    if unread := case.script.shell.unread:
        why = "it is no bash that can be read in reasonable time, so no command of it is checked"
        found.add(Finding(unread, "cannot be read as a script", why, "bash -n FILE"))
    return sorted(found, key=lambda finding: (finding.line, finding.wrong))


def _shortened(found: Finding) -> Finding:
    wrong, instead = (printable(text, LONGEST) for text in (found.wrong, found.instead))
    return replace(found, wrong=wrong, instead=instead)


def case_of(text: str, site: Site | None) -> Case:
    """The script read, for the rules."""
    script = read(text)
    return Case(text, script, site, training_steps(script))


def report(name: str, findings: list[Finding]) -> str:
    """The findings as text; one friendly line where there are none."""
    if not findings:
        return f"{name}: nothing wrong found; it is ready to submit."
    lines = []
    for found in findings:
        lines.append(f"{name}:{found.line}: {'note: ' if found.note else ''}{found.wrong}")
        lines += [f"    why      {found.why}", f"    instead  {found.instead}"]
    errors = sum(not found.note for found in findings)
    return "\n".join([*lines, f"{errors} to fix, {len(findings) - errors} to consider."])


def _file(case: Case) -> Iterator[Finding]:
    """Line ends and the first line."""
    if "\r\n" in case.text:
        line = case.text[: case.text.index("\r\n")].count("\n") + 1
        yield Finding(
            line, "Windows line ends", "sbatch refuses them, and bash would take them for text", "dos2unix FILE"
        )
    if not case.text.startswith("#!"):
        yield Finding(1, "no #! line", "sbatch refuses a script that does not name its shell", "#!/bin/bash")


def _directives(case: Case) -> Iterator[Finding]:
    """#SBATCH lines that SLURM passes over."""
    first = case.script.first
    for line in case.script.shell.comments:
        text = case.script.lines[line - 1]
        if SBATCH.match(text):
            if line > first:
                why = f"SLURM reads options only above the first command, line {first}: this one is ignored"
                yield Finding(line, "#SBATCH after the first command", why, "move the line above it")
        elif ALMOST_SBATCH.match(text.upper()):
            why = "only a line that begins with exactly #SBATCH and a space is an option; this one is a comment"
            yield Finding(line, f"{text.split('-')[0].strip()!r} is not #SBATCH", why, _corrected(text))


def _corrected(text: str) -> str:
    return re.sub(r"^[^-]*", "#SBATCH ", text)


def _malformed(case: Case) -> Iterator[Finding]:
    """Values that sbatch refuses or reads otherwise than they look."""
    for option in case.script.options:
        name, value = option.name, option.value
        if name in WHOLE and not re.fullmatch(r"[1-9]\d*" if name != "nodes" else r"[1-9]\d*(-\d+)?", value):
            yield Finding(option.line, f"--{name}={value}", "it must be a whole number of at least 1", f"--{name}=1")
        if name in {"mem", "mem-per-cpu", "mem-per-gpu"} and not re.fullmatch(r"\d+([KMGT]B?)?", value, re.IGNORECASE):
            why = "memory is a whole number with K, M, G or T directly behind it; without a letter it is MiB"
            yield Finding(option.line, f"--{name}={value}", why, f"--{name}=64G")
        if name == "time" and not TIME.fullmatch(value):
            why = "a time reads like hours:minutes:seconds, or days-hours:minutes:seconds"
            yield Finding(option.line, f"--time={value}", why, "--time=02:00:00")
        if name == "time" and re.fullmatch(r"0\d:\d\d", value):
            why = "two numbers are minutes:seconds, so the job would end after minutes"
            yield Finding(option.line, f"--time={value}", why, f"--time={value}:00", note=True)


def _task_counts(case: Case) -> Iterator[Finding]:
    """--ntasks against nodes x tasks a node, and srun -n against both."""
    job = Step(0, (), {}, {option.name: option for option in case.script.options})
    per_node, tasks = job.number("ntasks-per-node"), job.number("ntasks")
    promised = per_node * job.nodes if per_node else None
    if tasks and promised and tasks != promised:
        yield Finding(
            job.options["ntasks"].line,
            f"--ntasks={tasks}, but {job.nodes} x {per_node} tasks a node",
            "where both are given SLURM takes --ntasks, and --ntasks-per-node is an upper limit only",
            f"#SBATCH --ntasks={promised}, or leave --ntasks out",
        )
    total = tasks or promised
    for step in case.steps:
        own = step.own.get("ntasks")
        if own and total and whole_number(own.value) not in {None, total} and "nodes" not in step.own:
            why = f"the job has {total} tasks; the step would leave some of them idle, or not start"
            yield Finding(step.line, f"srun -n {own.value}", why, "srun without -n takes all tasks of the job")


def _tasks_and_gpus(case: Case) -> Iterator[Finding]:
    """One task a GPU; one a node under torchrun."""
    for step in case.steps:
        gpus, tasks = step.gpus_per_node(case.site), step.tasks_per_node
        given = _ntasks(step.own) or _ntasks(step.options)
        line = given.line if given else step.line
        if gpus == 0:
            request = f"#SBATCH --gres=gpu:{case.site.gpus if case.site else 1}"
            yield Finding(step.line, "no GPU is requested", "SLURM gives a job only the GPUs it requests", request)
        elif step.is_torchrun and tasks and tasks > 1:
            why = f"torchrun starts the ranks of its node itself: {tasks} of them start {tasks} times as many"
            yield Finding(line, f"{tasks} torchruns a node", why, "#SBATCH --ntasks-per-node=1")
        elif not step.is_torchrun and gpus and tasks and tasks != gpus:
            outcome = "GPUs would idle, and cost" if tasks < gpus else "some would have to share one"
            why = f"one task, that is one rank, drives one GPU: {outcome}"
            right = f"--ntasks={gpus * step.nodes}" if given and given.name == "ntasks" else f"--ntasks-per-node={gpus}"
            where = "srun" if given and given.name in step.own else "#SBATCH"
            yield Finding(line, f"{_counted(tasks, 'task')} a node, {_counted(gpus, 'GPU')}", why, f"{where} {right}")


def _ntasks(options: Mapping[str, Option]) -> Option | None:
    """The first of them that sets the number of tasks."""
    return min((options[name] for name in NTASKS if name in options), key=lambda option: option.line, default=None)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _cpus(case: Case) -> Iterator[Finding]:
    """CPUs a task against the node's, and srun's way of learning them."""
    exported = next((line for line, _ in case.searched(SRUN_CPUS)), None)
    for step in case.steps:
        option, tasks, cpus = step.options.get("cpus-per-task"), step.tasks_per_node, step.number("cpus-per-task")
        if option is None:
            usual = f"--cpus-per-task={case.site.cpus // case.site.gpus}" if case.site else "--cpus-per-task=N"
            why = "each task gets one CPU, for training and for loading data"
            yield Finding(step.line, "no --cpus-per-task", why, f"#SBATCH {usual}")
        elif "cpus-per-task" not in step.own and (exported is None or exported > step.line):
            yield Finding(
                step.line,
                "SRUN_CPUS_PER_TASK is not set",
                "since SLURM 22.05 srun does not take --cpus-per-task from #SBATCH: each task would get one CPU",
                'before it: export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
            )
        tasks = min(tasks, step.gpus_per_node(case.site) or tasks) if tasks else None  # what is right once that is
        if option and cpus and tasks and case.site and tasks * cpus > case.site.cpus:
            why = f"a node of {case.site.title} has {case.site.cpus} CPUs to give: the job is refused or waits forever"
            fit = max(1, case.site.cpus // tasks)
            yield Finding(option.line, f"{tasks} tasks x {cpus} CPUs", why, f"#SBATCH --cpus-per-task={fit}")


def _no_launcher(case: Case) -> Iterator[Finding]:
    """A training started as one process."""
    job = Step(0, (), {}, {option.name: option for option in case.script.options})
    if job.nodes == 1 and job.tasks_per_node == 1:
        return
    commands = case.script.shell.commands
    launched = any(program(command.words) in LAUNCHERS for command in commands)
    for command in commands:
        name, words = program(command.words), command.words
        ours = STARTS_PYTHON.fullmatch(name) and re.search(r"\bhvdtrain\.(torch|tensorflow)", " ".join(words))
        if ours or (not launched and _starts_ranks(words)):
            why = "the job's script runs once, on its first node; only srun starts all tasks on all nodes"
            yield Finding(command.line, f"{name} without srun", why, f"srun {' '.join(words[:3])} ...")


def _starts_ranks(call: tuple[str, ...]) -> bool:
    script = any(word.endswith(".py") for word in call[1:3])
    return program(call) == "torchrun" or bool(STARTS_PYTHON.fullmatch(program(call)) and script)


def _rank_variables(case: Case) -> Iterator[Finding]:
    """Variables of a rank that the job's own shell fills in."""
    for line, found in case.searched(RANK_VARIABLE):
        yield Finding(
            line,
            f"${found[1]} is filled in by the job's shell",
            "there it is 0 for all: only inside the step has each rank its own",
            f"srun bash -c '... ${found[1]} ...' in single quotes, or read it in the program",
        )
    for line, found in case.searched(RANK_BY_HAND):
        why = "every rank would have the same number"
        yield Finding(line, f"{found[1]} is set for all ranks", why, "leave it out: the launcher sets it for each rank")


def _ports(case: Case) -> Iterator[Finding]:
    """Ports that two jobs share, that do not exist, or that some job ids break."""
    text = case.script.shell.text
    fixed = "two jobs that share a node, or a job that starts again, find it taken"
    for found in FIXED_PORT.finditer(text):
        yield Finding(case.line_of(found.start()), "a fixed port", fixed, PORT)
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


def _site_names(case: Case) -> Iterator[Finding]:
    """Partition, constraint, hint and account as the site has them."""
    site, script = case.site, case.script
    if site is None:
        return
    for name, known in (("partition", site.partitions), ("constraint", site.constraints)):
        option = script.option(name)
        if option and known and option.value not in known:
            why = f"the nodes of {site.title} have {', '.join(known)}"
            yield Finding(option.line, f"--{name}={option.value}", why, f"#SBATCH --{name}={known[0]}")
        if option is None and getattr(site, name):
            why = f"the job would not get the nodes of {site.title}"
            yield Finding(1, f"no --{name}", why, f"#SBATCH --{name}={getattr(site, name)}")
    hint = script.option("hint")
    if site.hint and hint is None:
        why = "without it a CPU is half a core, a hyper-thread"
        yield Finding(1, "no --hint", why, f"#SBATCH --hint={site.hint}", note=True)
    account = script.option("account")
    if account and not re.fullmatch(site.account[0], account.value):
        why = "an account names the kind of node too"
        yield Finding(account.line, f"--account={account.value}", why, f"#SBATCH --account={site.account[1]}")


def _hint_undone(case: Case) -> Iterator[Finding]:
    hint, per_core = case.script.option("hint"), case.script.option("ntasks-per-core")
    if hint and per_core:
        why = f"SLURM then silently drops --hint={hint.value}"
        yield Finding(per_core.line, "--ntasks-per-core beside --hint", why, "leave --ntasks-per-core out")


def _devices(case: Case) -> Iterator[Finding]:
    """A list of GPUs shorter than the tasks of a node."""
    tasks = max((step.tasks_per_node or 0 for step in case.steps), default=0)
    for line, found in case.searched(DEVICES):
        visible = len(found[1].strip(",").split(","))
        if tasks > visible:
            why = f"{tasks} tasks of a node would share {_counted(visible, 'GPU')}"
            yield Finding(line, found[0], why, "leave it out: SLURM sets it to the GPUs of the job")


def _plugin(case: Case) -> Iterator[Finding]:
    """srun's PMI plugin, without which an MPI program is a world of its own."""
    for step in case.steps:
        option = step.own.get("mpi")
        uses_mpi = any("hvdtrain" in word or "horovod" in word for word in step.call) and not step.is_wrapped
        usual = case.site.mpi if case.site else "pmix"
        if option and not pmi.NAMES.fullmatch(option.value):
            why = "SLURM's own plugins are pmix, pmi2, cray_shasta, none"
            yield Finding(step.line, f"srun --mpi={option.value}", why, "see: srun --mpi=list", note=True)
        elif uses_mpi and usual and option is None:
            why = "where the site's default is not the MPI's own, every rank would be rank 0 of 1"
            yield Finding(step.line, "srun without --mpi", why, f"srun --mpi={usual}", note=True)


def _comes_back(case: Case) -> Iterator[Finding]:
    """What hvdtrain needs to resume after the time limit."""
    if not any("hvdtrain" in word for step in case.steps for word in step.call):
        return
    for name, option in (("signal", "--signal=USR2@120"), ("requeue", "--requeue")):
        if case.script.option(name) is None:
            why = "at its time limit hvdtrain could not save a checkpoint and come back by itself"
            yield Finding(case.steps[0].line, f"no --{name}", why, f"#SBATCH {option}", note=True)


Rule = Callable[[Case], Iterator[Finding]]
RULES: tuple[Rule, ...] = (
    _file,
    _directives,
    _malformed,
    _task_counts,
    _tasks_and_gpus,
    _cpus,
    _no_launcher,
    _rank_variables,
    _ports,
    _site_names,
    _hint_undone,
    _devices,
    _plugin,
    _comes_back,
)
