"""`python -m hvdtrain doctor`: what was found, what was expected, and the command that fixes it."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import pydantic
import tyro

from hvdtrain.launch import mpi
from hvdtrain.launch.topology import discover
from hvdtrain.tools.build.probe import FRAMEWORK_WHEELS
from hvdtrain.tools.doctor import gather, host, launch, machine, report, software, world
from hvdtrain.tools.doctor.checking import Checking
from hvdtrain.tools.doctor.expected import EXPECTED
from hvdtrain.tools.doctor.findings import Check, Findings, Rank, Step, count
from hvdtrain.tools.rank_status import shown


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Checks this machine, and inside a job step the step; exit code 1 where something is to be fixed."""

    json: Annotated[bool, tyro.conf.arg(help="the checks as JSON")] = False


def main(argv: Sequence[str]) -> int:
    """Checks, and rank 0 prints; 1 where a check fails. Raises TopologyError where the launcher contradicts itself."""
    from rich.console import Console

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
        report.show(checks, f"hvdtrain doctor: {where}, {time.monotonic() - started:.0f} s", console)
    return 1 if any(check.status == "fail" for check in checks) else 0


def judge(findings: Findings) -> list[Check]:
    """Every check, in the order of its group."""
    checks = [*software.checks(findings), *machine.checks(findings), *world.checks(findings)]
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
