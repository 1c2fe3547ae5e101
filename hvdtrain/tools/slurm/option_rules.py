"""What is wrong with the options of a job script, and with its lines as SLURM reads them."""

import re
from collections.abc import Iterator

from hvdtrain.tools.slurm.case import Case, Finding, Rule
from hvdtrain.tools.slurm.job_script import SBATCH
from hvdtrain.tools.slurm.sites import TIME

MISTYPED = re.compile(r"\s*#[SBATCH]{5,7}[ \t:]*-")
SWITCHED_OFF = re.compile(r"#[ \t]+SBATCH[ \t:]*-|#sbatch[ \t]+-")
UNFILLED = "; SLURM fills in no variables in #SBATCH"
WHOLE = {"nodes", "ntasks", "ntasks-per-node", "cpus-per-task"}
MEMORY = {"mem", "mem-per-cpu", "mem-per-gpu"}


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
        elif line < first and (MISTYPED.match(text) or SWITCHED_OFF.match(text)):
            why = "only a line that begins with exactly #SBATCH and a space is an option; this one is a comment"
            wrong, switched_off = f"{text.split('-')[0].strip()!r} is not #SBATCH", bool(SWITCHED_OFF.match(text))
            yield Finding(line, wrong, why, _corrected(text), note=switched_off)


def _corrected(text: str) -> str:
    return re.sub(r"^[^-]*", "#SBATCH ", text)


def _malformed(case: Case) -> Iterator[Finding]:
    """Values that sbatch refuses or reads otherwise than they look."""
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


RULES: tuple[Rule, ...] = (_file, _directives, _malformed, _site_names, _hint_undone)
