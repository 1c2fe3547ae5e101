"""`python -m hvdtrain doctor`: what was found, what was expected, and the command that fixes it."""

import contextlib
import dataclasses
import json
import os
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Annotated

import pydantic
import tyro
from rich.console import Console
from rich.text import Text

from hvdtrain.launch import mpi
from hvdtrain.launch.topology import discover
from hvdtrain.tools.build.probe import FRAMEWORK_WHEELS
from hvdtrain.tools.doctor import gather, host, launch, machine, software
from hvdtrain.tools.doctor.findings import Check, Findings, Rank, Status, Step, count
from hvdtrain.tools.doctor.gather import Checking
from hvdtrain.tools.rank_status import shown

EXPECTED = {
    "torch": "it imports, if installed",
    "tensorflow": "it imports, if installed",
    "horovod": "one built by python -m hvdtrain build",
    "horovod.torch": "it imports, built against the torch that is installed",
    "horovod.tensorflow": "it imports, built against the TensorFlow that is installed",
    "Horovod's MPI": "a library that the loader finds, or none",
    "mpi4py's MPI": "Horovod's",
    "launchers": "those of Horovod's MPI",
    "SLURM's PMI": "a plugin that Horovod's MPI supports",
    "driver": "one for each GPU host",
    "CUDA": "a driver at least as new as torch's CUDA",
    "NCCL": "a Horovod built with NCCL, where there are GPUs",
    "GPUs": "one for each rank, or to each rank its own",
    "NCCL's interface": "one that is up and reaches the other hosts",
    "Gloo's interface": "one that is up and reaches the other hosts",
    "InfiniBand": "used where it is there",
    "locked memory": "unlimited over InfiniBand",
    "open files": "at least 4096",
    "cpus per task": "as many as the job requested",
    "OMP_NUM_THREADS": "at most the CPUs of the task",
    "binding": "a CPU for each rank",
    "hostname": "it resolves",
    "output folder": "it can be written",
    "free space": "at least 5 GB",
    "clock": "this century, and within 1 s of the other ranks",
    "fork under MPI": "no MPI over InfiniBand, or fork made safe",
    "two MPI packages": "at most one",
    "pip's cache": "no Horovod wheel of another build",
    "world": "the launcher's rank and size",
    "ports": "the ranks' own closed to other users: by a key, and a Horovod built by python -m hvdtrain build",
    "allreduce": "it ends, at the network's speed",
}
MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "skip": ("-", "dim"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
}
PLURALS: dict[Status, str] = {"ok": "ok", "warn": "to look at", "fail": "to fix", "skip": "left out"}


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Checks this machine, and inside a job step the step; exit code 1 where something is to be fixed."""

    json: Annotated[bool, tyro.conf.arg(help="the checks as JSON")] = False


def main(argv: Sequence[str]) -> int:
    """Checks, and rank 0 prints; 1 where a check fails. Raises TopologyError where the launcher contradicts itself."""
    from hvdtrain.core import flags

    options = flags.parse(Options, "python -m hvdtrain doctor", argv)
    started = time.monotonic()
    with shown(discover(os.environ), "looking at this machine") as show:
        findings = gather_findings(os.environ, Checking(show))
    if findings is None:
        return 0
    checks = judge(findings)
    if options.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    else:
        at = findings.step.topology
        where = at.host if at.launcher == "alone" else f"{count(at.size, 'rank')} of {at.launcher}, seen from {at.host}"
        # Open MPI gives its ranks a terminal of their own, wherever their output goes in the end.
        console = Console(force_terminal=False if at.launcher == "mpirun" else None)
        report(checks, f"hvdtrain doctor: {where}, {time.monotonic() - started:.0f} s", console)
    return 1 if any(check.status == "fail" for check in checks) else 0


def judge(findings: Findings) -> list[Check]:
    """Every check, in the order of its group."""
    checks = [*software.checks(findings), *machine.checks(findings), *launch.checks(findings)]
    checks = [dataclasses.replace(check, expected=check.expected or EXPECTED[check.name]) for check in checks]
    groups = list(dict.fromkeys(check.group for check in checks if check.group not in {"traps", "step"}))
    return sorted(checks, key=lambda check: [*groups, "traps", "step"].index(check.group))


def gather_findings(environ: Mapping[str, str], checking: Checking | None = None) -> Findings | None:
    """All there is to judge, on rank 0; None on the other ranks, which only send theirs."""
    checking = checking or Checking()
    topology = discover(environ)
    mine = host.rank(topology, environ)
    step = host.step(topology, environ)
    framework = _to_join_with(step)
    others = [name for name in FRAMEWORK_WHEELS if name != framework]
    with ThreadPoolExecutor() as pool:
        installed = pool.submit(gather.software, environ, others, checking) if topology.is_rank_0 else None
        with checking(f"allreduce of the ranks ({framework})") if framework else contextlib.nullcontext():
            joined = gather.live(framework, dataclasses.asdict(mine), environ) if framework else gather.Joined()
    if installed is None:
        return None
    found = installed.result()
    if framework:
        imported = joined.framework or gather.framework(framework, environ)
        found = dataclasses.replace(found, frameworks=(imported, *found.frameworks))
    ranks = tuple(Rank.from_json(rank) for rank in joined.ranks) or (mine,)
    return Findings(found, ranks, dataclasses.replace(step, live=joined.live), time.time())


def _to_join_with(step: Step) -> str | None:
    """The framework with which the ranks shall join; None where it is plain that they cannot."""
    framework = next(filter(mpi.horovod_library, FRAMEWORK_WHEELS), None)
    if step.topology.launcher == "alone" or not framework or launch.mismatch(step, mpi.of_horovod(framework)):
        return None
    return framework


def report(checks: Sequence[Check], title: str, console: Console) -> None:
    """Prints the table, then every fix on lines of its own that are never folded, then how many there are of each."""
    _print(console, Text(title, style="bold"))
    rows = list(_rows(checks))
    name_width = max(len(names) for _, names, _ in rows)
    for group, members in groupby(rows, key=lambda row: row[0]):
        _print(console, Text(f"\n{group}", style="bold cyan"))
        for _, names, check in members:
            _print(console, _line(names.ljust(name_width), check, console.width))
    worst_first = sorted((check for check in checks if check.fix), key=lambda check: check.status != "fail")
    for fix in dict.fromkeys(check.fix for check in worst_first):
        fixed = [check for check in worst_first if check.fix == fix]
        mark, style = MARKS[fixed[0].status]
        _print(console, Text(f"\n{mark} {', '.join(check.name for check in fixed)}", style=style))
        _print(console, Text(f"    {fix}"))
    counts = [
        f"{sum(check.status == status for check in checks)} {plural}"
        for status, plural in PLURALS.items()
        if any(check.status == status for check in checks)
    ]
    _print(console, Text(f"\n{', '.join(counts)}", style="bold"))


def _rows(checks: Sequence[Check]) -> Iterator[tuple[str, str, Check]]:
    """Group, names and check of each line: neighbours that are left out for the same reason share one."""
    for _, group in groupby(checks, key=lambda check: (check.group, check.status, check.found)):
        members = list(group)
        if members[0].status == "skip":
            members, names = members[:1], ", ".join(check.name for check in members)
            yield members[0].group, names, members[0]
        else:
            yield from ((check.group, check.name, check) for check in members)


def _line(name: str, check: Check, width: int) -> Text:
    """One check, its text folded to the width of the terminal."""
    mark, style = MARKS[check.status]
    room = max(20, width - len(name) - 4)
    dim = "dim" if check.status == "skip" else ""
    lines = [(line, dim) for line in textwrap.wrap(check.found, room)]
    if check.status in {"warn", "fail"} and check.expected:
        lines += [(line, "dim") for line in textwrap.wrap(f"expected: {check.expected}", room)]
    text = Text.assemble(" ", (mark, style), " ", (name, dim))
    for number, (line, line_style) in enumerate(lines):
        text.append("\n" + " " * (len(name) + 4) if number else " ").append(line, style=line_style)
    return text


def _print(console: Console, text: Text) -> None:
    # A folded command could not be copied; and what rich takes for a name or number it would colour.
    console.print(text, soft_wrap=True, highlight=False)
