"""What is wrong with somebody's job script: findings with their line, the reason, and what to write instead."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.errors import JobError
from hvdtrain.tools.slurm import option_rules, step_rules, variable_rules
from hvdtrain.tools.slurm.case import Case, Finding, case_of
from hvdtrain.tools.slurm.job_script import program, program_of
from hvdtrain.tools.slurm.programs import QUIET
from hvdtrain.tools.slurm.sites import Site
from hvdtrain.tools.slurm.steps import LAUNCHERS
from hvdtrain.untrusted import printable

RULES = (*option_rules.RULES, *step_rules.RULES, *variable_rules.RULES)
MOST_BYTES = 2**19
MOST_LINES = 100_000
MOST_OF_A_RULE = 1000
LONGEST = 300  # characters of a finding, which quotes the script
MOST_NAMED = 4  # programs
SYNTAX = {"[", ":", "if", "exit", "wait", "trap", "shopt", "set", "unset", "declare", "read", "let", "return", "shift"}


def check(text: str, site: Site | None = None) -> list[Finding]:
    """What is wrong with the job script, in the order of its lines. Raises JobError for one that is too long."""
    return findings_of(read(text, site))


def read(text: str, site: Site | None = None) -> Case:
    """The script, for the rules. Raises JobError for one that is too long."""
    if len(text) > MOST_BYTES or text.count("\n") > MOST_LINES:
        raise JobError(f"a job script must have at most {MOST_BYTES:,} bytes in {MOST_LINES:,} lines.")
    return case_of(text, site)


def findings_of(case: Case) -> list[Finding]:
    """What is wrong with it, in the order of its lines."""
    found = {_shortened(finding) for rule in RULES for finding in itertools.islice(rule(case), MOST_OF_A_RULE)}
    if unread := case.script.shell.unread:
        why = "it is no bash that can be read in reasonable time, so no command of it is checked"
        found.add(Finding(unread, "cannot be read as a script", why, "bash -n FILE"))
    return sorted(found, key=lambda finding: (finding.line, finding.wrong))


def _shortened(found: Finding) -> Finding:
    wrong, instead = (printable(text, LONGEST) for text in (found.wrong, found.instead))
    return replace(found, wrong=wrong, instead=instead)


def report(name: str, findings: Sequence[Finding], case: Case) -> str:
    """The mistakes, then the advice; one line where there is neither, and what was read where nothing trains."""
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
    names = dict.fromkeys(_named(command.words) for command in case.script.shell.commands)
    told = [name for name in names if name not in QUIET | SYNTAX] or list(names)
    return f"it runs {_listed(told)}" if told else "it has no command"


def _named(words: Sequence[str]) -> str:
    """The program, with what a launcher starts."""
    name = program(words)
    started = program_of(words)[:1] if name in LAUNCHERS else ()
    return " ".join((name, *(Path(word).name for word in started)))


def _listed(names: Sequence[str]) -> str:
    shown = [printable(name, 40) for name in names[:MOST_NAMED]]
    return ", ".join(shown) + (" and more" if len(names) > MOST_NAMED else "")
