"""How a run stands: ended or not, where it is, and what it had to reach."""

from hvdtrain.tools import run_state
from hvdtrain.tools.report import lines
from hvdtrain.tools.report.folder import Folder
from hvdtrain.tools.watch import job


def state_of(folder: Folder, now: float) -> str:
    """As run_state has it."""
    launch = folder.launch
    return run_state.state_of(
        folder.path,
        now,
        status=lines.text(folder.status.get("state"), 20),
        end=None if not launch else launch.end.state if launch.end else "",
        host=launch.hosts[0] if launch and launch.hosts else "",
        seconds=launch.clock if launch else 0.0,
        written=last_sign(folder),
        is_job_over=lambda: _is_job_over(folder),
    )


def _is_job_over(folder: Folder) -> bool | None:
    number = folder.launch.job_id if folder.launch else ""
    answer = job.requested(number) if job.NUMBER.fullmatch(number) else None
    return answer.is_over if answer and answer.state else None


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
