"""Energy of a run: what SLURM's accounting says of its jobs, and what the run's own counters have shown."""

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.tools.report.launches import Launch
from hvdtrain.tools.report.lines import number
from hvdtrain.tools.report.model import Energy, EnergyRow

JOULES = 3.6e6
"""Of a kWh."""
SECONDS = 8.0
"""For sacct, of all jobs together."""
JOB_ID = re.compile(r"[0-9]{1,12}(_[0-9]{1,8})?")
MOST_JOBS = 100
FIELDS = ("JobIDRaw", "Start", "ElapsedRaw", "NNodes", "ConsumedEnergyRaw")
LONG_JOB = 1.25
"""A job that took so many times the run's own time did something else, too."""
SLURM = "SLURM ConsumedEnergy"
NOT_MEASURED = 2**63
"""From here on, what SLURM prints for a figure that it does not have (2^64 - 2)."""
SOURCES = {
    "pm_counters": ("Cray pm_counters", "whole nodes"),
    "nvml": ("NVML", "GPUs of the job only"),
    "amdsmi": ("amdsmi", "GPUs of the job only"),
    "rapl": ("RAPL", "processors and memory of the nodes, whoever used them"),
}
"""By the key in the run's records: name and scope. In the order in which the run's figure is chosen."""
DEVICES = ("nvml", "amdsmi")


@dataclass(frozen=True)
class Measured:
    """Joules in so many seconds; `nodes` None where nobody says."""

    joules: float
    seconds: float
    nodes: int | None = None


def energy(launches: Sequence[Launch], epochs: float, co2_g_per_kwh: float | None) -> Energy:
    """Each job and each counter once. `epochs`: that the run has made."""
    slurm, why = of_jobs(launches)
    counters = _named(of_counters(launches))
    rows = [*([_row(SLURM, slurm, "whole nodes of the job, from its start to its end")] if slurm else [])]
    rows += [_row(*named) for named in counters]
    if not rows:
        return Energy((), None, None, None, f"{why}; no counter of the nodes or GPUs could be read.")
    figure = slurm or counters[0][1]
    kwh = rows[0].kwh
    return Energy(
        rows=tuple(rows),
        mean_watts=figure.joules / figure.seconds if figure.seconds else None,
        kwh_per_epoch=kwh / epochs if epochs else None,
        co2_grams=None if co2_g_per_kwh is None else kwh * co2_g_per_kwh,
        note=_note(rows[0], slurm, launches),
    )


def of_jobs(launches: Sequence[Launch]) -> tuple[Measured | None, str]:
    """SLURM's figure of the run's jobs, with all their starts; or None and why."""
    jobs = list(dict.fromkeys(launch.job_id for launch in launches if JOB_ID.fullmatch(launch.job_id)))
    if not jobs:
        return None, "the run was in no job of SLURM"
    sacct = shutil.which("sacct")
    if not sacct:
        return None, f"sacct, which knows job {jobs[0]}, is not installed here"
    command = [sacct, "-X", "-D", "-P", "-n", "-o", ",".join(FIELDS), "-j", ",".join(jobs[:MOST_JOBS])]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"sacct did not answer within {SECONDS:g} s"
    except OSError as error:
        return None, f"sacct cannot be run ({error.strerror})"
    if done.returncode:
        return None, "sacct has failed (is there no accounting?)"
    measured = of_table(done.stdout)
    return measured, "" if measured else f"SLURM has no energy of job {', '.join(jobs[:3])}"


def of_table(printed: str) -> Measured | None:
    """The sum over sacct's lines, each start of each job once; None where one of them has no figure."""
    starts = {}
    for line in printed.splitlines():
        fields = line.strip().split("|")
        if len(fields) == len(FIELDS):
            starts[fields[0], fields[1]] = fields[2:]
    joules = seconds = 0.0
    nodes = 0
    for elapsed, count, consumed in starts.values():
        took, used = _number(elapsed), _number(consumed)
        if took and not 0 < used < NOT_MEASURED:
            return None
        joules, seconds, nodes = joules + used, seconds + took, max(nodes, int(_number(count)))
    return Measured(joules, seconds, nodes or None) if joules else None


def of_counters(launches: Iterable[Launch]) -> dict[str, Measured]:
    """By source, the sum over launches of what each had used at last."""
    found: dict[str, Measured] = {}
    for launch in launches:
        for name, joules in launch.joules.items():
            before = found.get(name, Measured(0.0, 0.0))
            nodes = max(before.nodes or 0, launch.nodes.get(name, 0)) or None
            found[name] = Measured(before.joules + joules, before.seconds + launch.joules_clock, nodes)
    return {name: measured for name, measured in found.items() if measured.joules > 0}


def _named(counters: Mapping[str, Measured]) -> list[tuple[str, Measured, str]]:
    """Source, figure and scope; the first is the run's, where SLURM has none."""
    known = [(*SOURCES[name], counters[name]) for name in SOURCES if name in counters]
    rows = [(source, measured, scope) for source, scope, measured in known]
    parts = [name for name in (*DEVICES, "rapl") if name in counters]
    if "pm_counters" not in counters and "rapl" in parts and len(parts) > 1:
        rows.insert(0, _together([counters[name] for name in parts], " + ".join(SOURCES[name][0] for name in parts)))
    return rows


def _together(measured: Sequence[Measured], source: str) -> tuple[str, Measured, str]:
    """GPUs and processors: they count different things, so their sum counts none twice."""
    nodes = max((each.nodes or 0 for each in measured), default=0) or None
    joules, seconds = sum(each.joules for each in measured), max(each.seconds for each in measured)
    return source, Measured(joules, seconds, nodes), "GPUs and processors; no power supplies, fans or network"


def _row(source: str, measured: Measured, scope: str) -> EnergyRow:
    return EnergyRow(source, measured.joules / JOULES, measured.nodes, scope)


def _note(figure: EnergyRow, slurm: Measured | None, launches: Sequence[Launch]) -> str:
    """What a reader must know of the figure."""
    said = f"Measured by {figure.source}: {figure.scope}."
    own = sum(launch.clock for launch in launches)
    if slurm and own and slurm.seconds > LONG_JOB * own:
        return f"{said} The job took {slurm.seconds:,.0f} s, this run {own:,.0f} s: the figure is the whole job's."
    behind = [launch for launch in launches if not launch.joules]
    if not slurm and behind:
        return f"{said} {len(behind)} of {len(launches)} launches are not in it: killed before they had read a counter."
    return said


def _number(text: str) -> float:
    """0 where it is none, or one that no counter has."""
    try:
        return number(float(text), 0, 2.0**65) or 0.0
    except ValueError:
        return 0.0
