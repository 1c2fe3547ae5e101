"""What is wrong with a job script: each finding with its line, the reason, and what to write instead."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.errors import JobError
from hvdtrain.tools.slurm import script as scripts
from hvdtrain.tools.slurm import step_rules
from hvdtrain.tools.slurm.script import SBATCH, program, program_of, split, words_of
from hvdtrain.tools.slurm.sites import TIME, Site
from hvdtrain.tools.slurm.step_rules import Case, Finding, Rule
from hvdtrain.tools.slurm.steps import LAUNCHERS, QUIET, TrainingStep, job_options, training_steps
from hvdtrain.untrusted import printable

MOST_BYTES = 2**19
MOST_LINES = 100_000
MOST_OF_A_RULE = 1000
LONGEST = 300  # characters of a finding, which quotes the script
MOST_NAMED = 4  # programs
SYNTAX = {"[", ":", "if", "exit", "wait", "trap", "shopt", "set", "unset", "declare", "read", "let", "return", "shift"}
MISTYPED = re.compile(r"\s*#[SBATCH]{5,7}[ \t:]*-")
SWITCHED_OFF = re.compile(r"#[ \t]+SBATCH[ \t:]*-|#sbatch[ \t]+-")
UNFILLED = "; SLURM fills in no variables in #SBATCH"
WHOLE = {"nodes", "ntasks", "ntasks-per-node", "cpus-per-task"}
MEMORY = {"mem", "mem-per-cpu", "mem-per-gpu"}
RANK_VARIABLE = re.compile(r"\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\b")
RANK_BY_HAND = re.compile(r"(?:^|[\s;])((?:LOCAL_)?RANK=)[\"']?\d")
NODE_BY_HAND = re.compile(r"--(?:node|machine)[-_]rank[= ]\d+\b")
IN_A_TEST = re.compile(r"\[\s+\S*$|\[\s.{0,100}[=<>!]\s*\S*$|\blog\s.*$|\(\(\s*\S*$")
LONGEST_TEST = 1000  # characters before a variable, in which a test is searched for
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


def check_script(text: str, site: Site | None = None) -> list[Finding]:
    """The findings of a job script, in the order of its lines. Raises JobError where it is too long."""
    return findings_of(read(text, site))


def read(text: str, site: Site | None = None) -> Case:
    """The script in the form that the rules take. Raises JobError where it is too long."""
    if len(text) > MOST_BYTES or text.count("\n") > MOST_LINES:
        raise JobError(f"a job script must have at most {MOST_BYTES:,} bytes in {MOST_LINES:,} lines.")
    script = scripts.read(text)
    return Case(text, script, site, training_steps(script), TrainingStep(0, (), {}, job_options(script)))


def findings_of(case: Case) -> list[Finding]:
    """The findings of all rules, in the order of the lines."""
    found = {
        replace(it, wrong=printable(it.wrong, LONGEST), instead=printable(it.instead, LONGEST))
        for rule in RULES
        for it in itertools.islice(rule(case), MOST_OF_A_RULE)
    }
    if unread := case.script.unread:
        why = "it is no bash that can be read in reasonable time, so no command of it is checked"
        found.add(Finding(unread, "cannot be read as a script", why, "bash -n FILE"))
    return sorted(found, key=lambda finding: (finding.line, finding.wrong))


def report(name: str, findings: Sequence[Finding], case: Case) -> str:
    """The mistakes, then the advice; one line where there is neither, and what the script runs where nothing trains."""
    mistakes, advice = ([it for it in findings if it.note == note] for note in (False, True))
    unseen = f"no training step was understood: {_what_it_runs(case)}." if not case.trainings else ""
    if not findings:
        return f"{name}: {unseen or 'nothing wrong found; it is ready to submit.'}"
    lines = []
    for heading, those in (("To fix:", mistakes), ("To consider:", advice)):
        lines += [heading] if those else []
        for found in those:
            lines.append(f"{name}:{found.line}: {found.wrong}")
            lines += [f"    why      {found.why}", f"    instead  {found.instead}"]
    lines += [f"{name}: {unseen}"] if unseen else []
    return "\n".join([*lines, f"{len(mistakes)} to fix, {len(advice)} to consider."])


def _what_it_runs(case: Case) -> str:
    if case.steps:
        names = dict.fromkeys(" ".join(Path(word).name for word in step.program.words[:2]) for step in case.steps)
        return f"it starts {_listed(list(names))}, which cannot be seen into"
    commands = [command.words for command in case.script.commands]
    # With the program that it launches.
    started = ((words[0], *(program_of(words)[:1] if program(words) in LAUNCHERS else ())) for words in commands)
    names = dict.fromkeys(" ".join(program([word]) for word in words) for words in started)
    telling = [name for name in names if name not in QUIET | SYNTAX] or list(names)
    return f"it runs {_listed(telling)}" if telling else "it has no command"


def _listed(names: Sequence[str]) -> str:
    shown = [printable(name, 40) for name in names[:MOST_NAMED]]
    return ", ".join(shown) + (" and more" if len(names) > MOST_NAMED else "")


def _file(case: Case) -> Iterator[Finding]:
    """The file has Windows line ends, or no #! line."""
    if "\r\n" in case.text:
        line = case.text[: case.text.index("\r\n")].count("\n") + 1
        why = "sbatch refuses them, and bash would take them for text"
        yield Finding(line, "Windows line ends", why, "dos2unix FILE")
    if not case.text.startswith("#!"):
        yield Finding(1, "no #! line", "sbatch refuses a script that does not name its shell", "#!/bin/bash")


def _directives(case: Case) -> Iterator[Finding]:
    """SLURM ignores an #SBATCH line."""
    first = case.script.first
    for line in case.script.comments:
        text = case.script.lines[line - 1]
        if SBATCH.match(text):
            if line > first:
                why = f"SLURM reads options only above the first command, line {first}: this one is ignored"
                yield Finding(line, "#SBATCH after the first command", why, "move the line above it")
        elif line < first and (MISTYPED.match(text) or SWITCHED_OFF.match(text)):
            why = "only a line that begins with exactly #SBATCH and a space is an option; this one is a comment"
            wrong, switched_off = f"{text.split('-')[0].strip()!r} is not #SBATCH", bool(SWITCHED_OFF.match(text))
            yield Finding(line, wrong, why, re.sub(r"^[^-]*", "#SBATCH ", text), note=switched_off)


def _malformed(case: Case) -> Iterator[Finding]:
    """sbatch refuses a value, or reads it in another way than people do."""
    for option in case.script.options:
        name, value = option.name, option.value
        if name in WHOLE and not re.fullmatch(r"[1-9]\d*" if name != "nodes" else r"[1-9]\d*(-\d+)?", value):
            why = f"it must be a whole number of at least 1{UNFILLED if '$' in value else ''}"
            yield Finding(option.line, f"--{name}={value}", why, f"--{name}=1")
        if name in MEMORY and not re.fullmatch(r"\d+([KMGT]B?)?", value, re.IGNORECASE):
            why = "memory is a whole number with K, M, G or T directly behind it; without a letter it is MiB"
            yield Finding(option.line, f"--{name}={value}", why, f"--{name}=64G")
        if name == "time" and not TIME.fullmatch(value):
            why = "a time reads like hours:minutes:seconds, or days-hours:minutes:seconds"
            yield Finding(option.line, f"--time={value}", why, "--time=02:00:00")
        if name == "time" and re.fullmatch(r"0\d:\d\d", value):
            why = "two numbers are minutes:seconds, so the job would end after minutes"
            yield Finding(option.line, f"--time={value}", why, f"--time={value}:00", note=True)


def _cut_off(case: Case) -> Iterator[Finding]:
    """SLURM reads only the first words of an #SBATCH line."""
    for number, line in enumerate(case.script.lines[: case.script.first - 1], 1):
        options, rest = split(words_of(line)[1:]) if SBATCH.match(line) else ([], [])
        if rest and options and (value := options[-1].value):
            name = options[-1].name
            words = itertools.takewhile(lambda word: not word.startswith("-"), rest)
            whole = " ".join([value, *words]).replace(", ", ",")
            why = f"its value ends at the space: SLURM takes {value}, and passes over the rest of the line"
            yield Finding(number, f"--{name}={value} {' '.join(rest)}", why, f'#SBATCH --{name}="{whole}"')


def _site_names(case: Case) -> Iterator[Finding]:
    """The site has no such partition, constraint or account, or it needs a hint."""
    site, options = case.site, case.script.by_name
    hint, per_core, account = options.get("hint"), options.get("ntasks-per-core"), options.get("account")
    if hint and per_core:
        why = f"SLURM then silently drops --hint={hint.value}"
        yield Finding(per_core.line, "--ntasks-per-core beside --hint", why, "leave --ntasks-per-core out")
    if site is None:
        return
    for name, known in (("partition", site.partitions), ("constraint", site.constraints)):
        option = options.get(name)
        if option and known and option.value not in known:
            why = f"the nodes of {site.title} have {', '.join(known)}"
            yield Finding(option.line, f"--{name}={option.value}", why, f"#SBATCH --{name}={known[0]}")
        if option is None and known:
            why = f"the job would not get the nodes of {site.title}"
            yield Finding(1, f"no --{name}", why, f"#SBATCH --{name}={known[0]}")
    if site.hint and hint is None:
        why = "without it a CPU is half a core, a hyper-thread"
        yield Finding(1, "no --hint", why, f"#SBATCH --hint={site.hint}", note=True)
    if account and not re.fullmatch(site.account[0], account.value):
        why = "an account names the kind of node too"
        yield Finding(account.line, f"--account={account.value}", why, f"#SBATCH --account={site.account[1]}")


def _rank_variables(case: Case) -> Iterator[Finding]:
    """The job's shell fills in a variable of a rank, the same for all."""
    # A single task is number 0, and torchrun numbers its ranks itself.
    if case.steps and all(it.nodes == 1 and (not it.launcher or it.tasks_per_node == 1) for it in case.steps):
        return
    numbered = bool(case.trainings) and all(step.numbers_ranks for step in case.trainings)
    text = case.script.expanded
    for line, found in case.searched(RANK_VARIABLE):
        begin = max(text.rfind("\n", 0, found.start()) + 1, found.start() - LONGEST_TEST)
        if not IN_A_TEST.search(text, begin, found.start()):
            wrong = f"${found[1]} is filled in by the job's shell"
            why = "there it is 0 for all: only inside the step has each rank its own"
            instead = f"srun bash -c '... ${found[1]} ...' in single quotes, or read it in the program"
            yield Finding(line, wrong, why, instead, note=numbered)
    for line, found in case.searched(RANK_BY_HAND):
        instead = "leave it out: the launcher sets it for each rank"
        yield Finding(line, f"{found[1]} is set for all ranks", SAME, instead, note=numbered)
    for step in case.trainings:
        found_in = NODE_BY_HAND.search(" ".join(step.program.words)) if step.launcher and step.is_torchrun else None
        if found_in and (step.nodes or 1) > 1 and not step.numbers_ranks:
            why, instead = "every node would have the same number", "--rdzv-backend=c10d, which needs no number"
            yield Finding(step.line, found_in[0], why, instead)


def _unset(case: Case) -> Iterator[Finding]:
    """A variable is used that SLURM sets only where its option is given."""
    given = {option.name for option in case.script.options}
    known = set(case.script.values)
    for line, found in case.searched(SET_BY_OPTION):
        name = found[1]
        if name not in known and SETS[name] not in given:
            known.add(name)
            why = f"SLURM sets it only where --{SETS[name]} is given, in the script or to sbatch"
            yield Finding(line, f"${name} may be empty", why, f"#SBATCH --{SETS[name]}=N", note=True)


def _ports(case: Case) -> Iterator[Finding]:
    """A port that two jobs would share, or that some job ids make invalid."""
    text = case.script.text
    alone = case.is_exclusive or all(step.nodes == 1 for step in (case.job, *case.steps))
    fixed = None if alone else FIXED_PORT.search(text)
    if fixed:
        why = "two jobs that share a node, or a job that starts again, find it taken"
        yield Finding(case.line_of(fixed.start()), "a fixed port", why, PORT, note=True)
    for found in PORT_OVERFLOWS.finditer(text):
        why = "ports end at 65535, job ids do not"
        yield Finding(case.line_of(found.start()), "a port from the whole job id", why, PORT)
    # A single pattern would try every pair of brackets.
    for line in re.finditer(r"[^#\n]+", text.replace("\\\n", "  ")):
        before, opened, inside = line[0].partition("$((")
        if opened and (LAST_DIGITS.search(inside) or any(map(_cuts_job_id, inside.split(")")))):
            why = "in $(( )) digits after a 0 are octal: 0089 is an error, 0077 is 63; and a short id has no last four"
            position = line.start() + len(before)
            yield Finding(case.line_of(position), "a port from the job id's last characters", why, PORT)


def _cuts_job_id(part: str) -> bool:
    """Whether a command substitution takes characters of the job id."""
    begin = part.find("$(")
    job = re.compile(JOB).search(part, begin) if begin >= 0 else None
    return bool(job and re.compile("tail -c|cut -c").search(part, job.end()))


RULES: tuple[Rule, ...] = (
    *(_file, _directives, _malformed, _cut_off, _site_names),
    *step_rules.RULES,
    *(_rank_variables, _unset, _ports),
)
