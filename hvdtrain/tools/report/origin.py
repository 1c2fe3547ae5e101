"""What was trained: recipe, plan, software and hosts, and how to repeat the run."""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from hvdtrain import untrusted
from hvdtrain.core import recipe as recipes
from hvdtrain.core.plan import Plan
from hvdtrain.core.schedule import Schedule
from hvdtrain.core.values import known
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.topology import ALONE, launcher
from hvdtrain.record.folder import BEST
from hvdtrain.record.history import Launch
from hvdtrain.record.reader import RecordedRun
from hvdtrain.tools.report.model import Origin
from hvdtrain.untrusted import SECRET, printable, redacted, without_secrets

OURS = re.compile(r"(-\S+ )*-m hvdtrain\.(torch|tensorflow|lightning)( |$)")
"""The words of a command that trains a recipe, whose flag --output names the run folder."""
HOST = re.compile(r"[\w.-]+", re.ASCII)
MOST_KEYS = 300
NAMES_SECRET = re.compile(rf"(?i){SECRET}[\"']?\s*:")
MOST_VERSIONS = 50
MOST_RECIPE = MOST_WORD = 64 * 1024


def origin(run: RecordedRun) -> Origin:
    """The run's origin, as far as it was recorded."""
    launch = run.launch or Launch({})
    about = launch.about
    git = untrusted.mapping(about.get("git"))
    versions = list(untrusted.mapping(about.get("versions")).items())[:MOST_VERSIONS]
    return Origin(
        recipe=_printable_lines(run.recipe_text[:MOST_RECIPE]),
        is_shipped=bool(shipped(run)),
        differences=differences(run),
        plan=plan_lines(run),
        versions={untrusted.text(name, 60): untrusted.text(version, 80) for name, version in versions},
        hosts=tuple(dict.fromkeys(launch.hosts)),
        launcher=untrusted.text(about.get("launcher"), 60),
        engine=run.engine,
        framework=run.framework,
        ranks=run.ranks,
        git_commit=untrusted.text(git.get("commit"), 60) + (" with changes" if git.get("dirty") is True else ""),
        job_id=launch.job_id,
        words=tuple(words_of(run)),
        command=command(run),
        export=export(run),
    )


def words_of(run: RecordedRun) -> list[str]:
    """The words of rank 0's command, without secrets."""
    launched = untrusted.items(run.launch.about.get("command"), 200) if run.launch else []
    words = redacted("\0".join(str(word)[:MOST_WORD] for word in launched)).split("\0")
    return [untrusted.text(word, 300) for word in words] if launched else []


def command(run: RecordedRun, *, again: bool = False) -> str:
    """The command as a person types it, with its launcher and the environment's interpreter: it repeats the run in a
    new folder, or `again` continues it in its own."""
    program, *words = words_of(run) or [""]
    if not program:
        return ""
    python = ["python"] if PurePath(program).name.startswith("python") else [program]
    if OURS.match(" ".join(words)):
        flags = [index for index, word in enumerate(words) if word.partition("=")[0] == "--output"]
        for index in reversed(flags):
            folder = words[index].partition("=")[2] or " ".join(words[index + 1 : index + 2])
            del words[index : index + (1 if "=" in words[index] else 2)]
        words += ["--output", folder if flags else str(run.path)] if again else []
    launch, ranks = run.launch or Launch({}), run.ranks or 1
    hosts = {host: launch.hosts.count(host) for host in launch.hosts if HOST.fullmatch(host)} or {"HOST": ranks}
    own, typed = (launcher(untrusted.text(launch.about.get(key), 40)) for key in ("launcher", "typed"))
    row = own if ALONE in (own, typed) else typed
    if row.starts_python:
        python, words = [], [word for word in words if word != "-u"]
    return shlex.join([*row.words(ranks, hosts), *python, *words])


def export(run: RecordedRun) -> str:
    """The command that writes the run's model as a file, of the best checkpoint where one is marked; "" where its
    framework is not known."""
    to = {"torch": "pt", "tensorflow": "keras"}.get(run.framework)
    best = ["--best"] if os.path.lexists(run.path / BEST) else []
    return shlex.join(["python", "-m", "hvdtrain", "export", str(run.path), *best, "--to", to]) if to else ""


def settings(run: RecordedRun) -> dict[str, object]:
    """The keys of the run's recipe, without secrets."""
    return {str(key): without_secrets(value, str(key)) for key, value in list(run.recipe.items())[:MOST_KEYS]}


def shipped(run: RecordedRun) -> Mapping[str, Any]:
    """The keys of the shipped recipe of that name; {} where there is none."""
    if run.recipe_name.partition(":")[0] not in known():
        return {}
    try:
        return recipes.load(run.recipe_name).model_dump(mode="json", exclude={"name"})
    except HvdtrainError:  # it has no such entry
        return {}


def differences(run: RecordedRun) -> tuple[tuple[str, str, str], ...]:
    """The keys of both recipes whose values differ: key, shipped value, this run's value."""
    known = settings(run)
    differing = {key: value for key, value in shipped(run).items() if known.get(key, value) != value}
    as_text = [(key, shown(value), shown(known[key])) for key, value in differing.items()]
    return tuple(row for row in as_text if row[1] != row[2])


def shown(value: object) -> str:
    """A recipe's value as text for a table."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return printable(" ".join(f"{key}={shown(one)}" for key, one in without_secrets(value).items()), 100)
    return printable(str(value), 100)


def plan_lines(run: RecordedRun) -> tuple[str, ...]:
    """The plan's lines as the run printed them; where its files are damaged, its numbers."""
    if not run.plan:
        return ()
    try:  # many errors where files are damaged
        recipe = recipes.validate({**run.recipe, "name": run.recipe_name})
        given = {key: value for key, value in run.plan.items() if key in Plan.__dataclass_fields__}
        schedule = dict(untrusted.mapping(given.get("schedule")))
        milestones = tuple(untrusted.items(schedule.pop("milestones", []), 1000))
        given["schedule"] = Schedule(milestones=milestones, **schedule)
        return tuple(printable(line, 400) for line in Plan(recipe=recipe, **given).lines())
    except (HvdtrainError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
        numbers = [(key, value) for key, value in run.plan.items() if isinstance(value, int | float | str)]
        return tuple(f"{untrusted.text(key, 40)}: {untrusted.text(value, 80)}" for key, value in numbers[:30])


def _printable_lines(text: str) -> str:
    """The text's lines, with control characters as escapes and without secrets."""
    shown, hidden = [], None
    for line in map(str.expandtabs, text.splitlines()):
        depth = len(line) - len(line.lstrip(" -"))
        if hidden is None or (line.strip() and depth <= hidden):  # else the line belongs to a secret above it
            hidden = depth if NAMES_SECRET.search(line) else None
            shown.append(printable(redacted(line), 2000))
    return "\n".join(shown)
