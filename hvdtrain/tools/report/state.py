"""How a run stands: ended or not, where it is, and what it had to reach."""

from hvdtrain.tools.report import lines
from hvdtrain.tools.report.folder import Folder

ENDED = {"finished", "failed", "stopped"}
SILENT = 900.0
"""Seconds without a sign of life, or this part of the time so far, after which a run that has not ended was killed:
it writes at the latest after a hundredth of its time, but a log line may be long in coming."""
SILENT_PART = 0.1


def state_of(folder: Folder, now: float) -> str:
    """finished, failed, stopped, running, killed (no sign of life, and no end), unknown."""
    said = lines.text(folder.status.get("state"), 20)
    launch = folder.launch
    ended = launch.end.state if launch and launch.end else ""
    if said == "running" and ended in ENDED:
        return ended
    if said in ENDED:
        return said
    if said != "running" and ended in ENDED:
        return ended
    if said != "running" and not launch:
        return "unknown"
    patience = max(SILENT, SILENT_PART * (launch.clock if launch else 0.0))
    return "running" if now - last_sign(folder) < patience else "killed"


def last_sign(folder: Folder) -> float:
    """Of life, seconds since 1970: the newest time stamp of the records; of older folders, of the files."""
    launch = folder.launch
    times = [lines.unix_time(folder.status.get("time")) or 0.0, folder.metrics.last_time]
    if launch and launch.time:
        times.append(launch.time + launch.clock)
    return max(times) if max(times) else folder.changed


def step_of(folder: Folder) -> int:
    """The updates that are made."""
    launch = folder.launch
    said = lines.whole(folder.status.get("step")) or 0
    return max(folder.metrics.last_step, said, launch.last_step if launch else 0)


def total_steps(folder: Folder) -> int | None:
    """That the plan has, or that are made where an epoch has begun anew with other data."""
    planned = lines.whole(folder.plan.get("total_steps"), 1)
    return planned and max(planned, step_of(folder))


def steps_per_epoch(folder: Folder) -> int | None:
    return lines.whole(folder.plan.get("steps_per_epoch"), 1)


def epochs_made(folder: Folder) -> float:
    """Fractions count."""
    each = steps_per_epoch(folder)
    return step_of(folder) / each if each else float(folder.metrics.last_epoch)


def error_of(folder: Folder) -> str:
    """Why the run failed or was stopped, in one line; "" where nothing says so."""
    launch = folder.launch
    ended = launch.end.text if launch and launch.end else ""
    return lines.text(folder.status.get("error")) or ended
