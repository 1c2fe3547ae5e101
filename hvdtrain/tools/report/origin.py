"""What a run was: its recipe beside the shipped one, its plan, and how to repeat it."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from hvdtrain import untrusted
from hvdtrain.core import recipe as recipes
from hvdtrain.core.plan import Plan, Schedule
from hvdtrain.errors import HvdtrainError
from hvdtrain.record.history import Launch
from hvdtrain.record.reader import Run
from hvdtrain.tools.report.model import Origin
from hvdtrain.untrusted import SECRET, printable, redacted, without_secrets

LR = "LR "
"""The line of the plan that begins so derives the learning rate."""
MOST_KEYS = 300
NAMES_SECRET = re.compile(rf"(?i){SECRET}[\"']?\s*:")
MOST_VERSIONS = 50
MOST_RECIPE = MOST_WORD = 64 * 1024


def origin(run: Run) -> Origin:
    """Of whatever is known."""
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
        command=_command(untrusted.items(about.get("command"), 200)),
    )


def _command(words: Sequence[object]) -> str:
    """As a person types it: the interpreter is that of the environment."""
    shown = redacted("\0".join(str(word)[:MOST_WORD] for word in words)).split("\0")
    program, *rest = (untrusted.text(word, 300) for word in shown)
    return shlex.join(["python" if PurePath(program).name.startswith("python") else program, *rest]) if words else ""


def settings(run: Run) -> dict[str, object]:
    """The recipe's keys."""
    return {str(key): without_secrets(value, str(key)) for key, value in list(run.recipe.items())[:MOST_KEYS]}


def shipped(run: Run) -> Mapping[str, Any]:
    """The keys of the recipe of that name that hvdtrain brings; {} where it brings none."""
    if run.recipe_name.partition(":")[0] not in recipes.known():
        return {}
    try:
        return recipes.load(run.recipe_name).model_dump(mode="json", exclude={"name"})
    except HvdtrainError:  # an entry that this version does not have
        return {}


def differences(run: Run) -> tuple[tuple[str, str, str], ...]:
    """Key, shipped value, this run's value."""
    theirs, ours = shipped(run), settings(run)
    if not theirs or not ours:
        return ()
    keys = [key for key in {**theirs, **ours} if key in theirs and key in ours]
    return tuple((key, shown(theirs[key]), shown(ours[key])) for key in keys if not _equal(theirs[key], ours[key]))


def shown(value: object) -> str:
    """A recipe's value for a table."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return printable(" ".join(f"{key}={shown(one)}" for key, one in without_secrets(value).items()), 100)
    return printable(str(value), 100)


def _equal(one: object, other: object) -> bool:
    return one == other or shown(one) == shown(other)


def plan_lines(run: Run) -> tuple[str, ...]:
    """As the run printed them; of another version's plan its numbers."""
    if not run.plan:
        return ()
    try:
        return tuple(printable(line, 400) for line in _plan(run).lines())
    except (HvdtrainError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
        numbers = {key: value for key, value in run.plan.items() if isinstance(value, int | float | str)}
        return tuple(
            f"{untrusted.text(key, 40)}: {untrusted.text(value, 80)}" for key, value in list(numbers.items())[:30]
        )


def _plan(run: Run) -> Plan:
    """Raises much where the files are damaged, or another version's."""
    keys = {key: value for key, value in run.recipe.items() if key in recipes.Recipe.model_fields}
    recipe = recipes.validate({**keys, "name": run.recipe_name})
    numbers = {key: value for key, value in run.plan.items() if key in Plan.__dataclass_fields__}
    schedule = dict(untrusted.mapping(numbers.get("schedule")))
    milestones = tuple(untrusted.items(schedule.pop("milestones", []), 1000))
    numbers["schedule"] = Schedule(milestones=milestones, **schedule)
    return Plan(recipe=recipe, **numbers)


def lr_derivation(plan: tuple[str, ...]) -> str:
    """The plan's line on the learning rate; "" where it has none."""
    found = [line.removeprefix(LR).strip() for line in plan if line.startswith(LR)]
    return f"Peak {found[0]}." if found else ""


def _printable_lines(text: str) -> str:
    """The text with control characters as escapes and without secrets, its lines kept."""
    shown, hidden = [], None
    for line in map(str.expandtabs, text.splitlines()):
        depth = len(line) - len(line.lstrip(" -"))
        if hidden is None or (line.strip() and depth <= hidden):  # else it goes on with a secret
            hidden = depth if NAMES_SECRET.search(line) else None
            shown.append(printable(redacted(line), 2000))
    return "\n".join(shown)
