"""A run folder, read: whatever of it is there, and a line on whatever is not."""

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain import files
from hvdtrain.core import recipe as recipes
from hvdtrain.errors import RecipeError
from hvdtrain.tools.report import lines
from hvdtrain.tools.report.launches import Launch, add_all
from hvdtrain.tools.report.lines import Lines
from hvdtrain.tools.report.metrics import Metrics
from hvdtrain.untrusted import one_line


@dataclass
class Folder:
    """What a run's files hold."""

    path: Path
    status: Mapping[str, Any] = field(default_factory=dict)
    recipe_text: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The resolved keys."""
    recipe_name: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    """run.json, of a user's own program."""
    metrics: Metrics = field(default_factory=Metrics)
    launches: list[Launch] = field(default_factory=list)
    changed: float = 0.0
    """When one of its files was last written, seconds since 1970."""
    missing: list[str] = field(default_factory=list)
    """A line on each thing that could not be read."""

    @property
    def launch(self) -> Launch | None:
        """The last one."""
        return self.launches[-1] if self.launches else None


def read(path: Path) -> Folder:
    """Never raises for what a folder holds."""
    found = Folder(path)
    found.status = _json(found, "status.json", "how the run ended is not known")
    _read_recipe(found)
    _read_metrics(found)
    _read_launches(found)
    return found


def _read_recipe(found: Folder) -> None:
    """The recipe and its plan, or what a program of the user's own has in their place."""
    if not os.path.lexists(found.path / "recipe.yaml"):
        found.own = _json(found, "run.json", None)
    if found.own:
        return
    found.plan = _json(found, "plan.json", "the numbers of the plan are not known")
    found.recipe_text = _text(found, "recipe.yaml", "the recipe is not known")
    if not found.recipe_text:
        return
    first, _, _ = found.recipe_text.partition("\n")
    found.recipe_name = lines.text(first.removeprefix("# ").removesuffix(", resolved")) if first[:1] == "#" else ""
    try:
        found.recipe = lines.mapping(lines.mapping(recipes.parsed("recipe.yaml", found.recipe_text)).get("default"))
    except RecipeError as error:
        found.missing.append(one_line(error, 200))
    if not found.recipe and not any(line.startswith("recipe.yaml") for line in found.missing):
        found.missing.append("recipe.yaml holds no recipe")


def _read_metrics(found: Folder) -> None:
    _read_lines(found, "metrics.jsonl", "no curves", found.metrics.add)
    is_empty = not found.metrics.steps and not found.metrics.epochs
    if is_empty and not any(line.startswith("metrics.jsonl") for line in found.missing):
        found.missing.append("metrics.jsonl has no records: no curves")


def _read_launches(found: Folder) -> None:
    left_out = 0

    def take(records: list[lines.Record]) -> None:
        nonlocal left_out
        left_out += add_all(found.launches, records)

    _read_lines(found, "launches.jsonl", "no waterfall, events, heat map or energy", take)
    says = any(line.startswith("launches.jsonl") for line in found.missing)
    if not says and not any(launch.clock for launch in found.launches):
        lacks = "times" if found.launches else "records"
        found.missing.append(f"launches.jsonl has no {lacks}: no waterfall")
    if left_out:
        found.missing.append(f"launches.jsonl: launches after the first {len(found.launches):,} are left out")


def _read_lines(found: Folder, name: str, without: str, take: Callable[[list[lines.Record]], None]) -> None:
    read = Lines(found.path / name)
    try:
        found.changed = max(found.changed, (found.path / name).lstat().st_mtime)
        for records in read:
            take(records)
    except (OSError, ValueError) as error:
        found.missing.append(f"{name} {_why(error)}: {without}")
    if complaint := read.complaint():
        found.missing.append(complaint)


def _json(found: Folder, name: str, without: str | None) -> Mapping[str, Any]:
    """A small file's mapping. `without`: what a report lacks without it; None where it may be missing."""
    text = _text(found, name, without)
    if not text:
        return {}
    try:
        value = files.parse_json(text)
    except ValueError as error:
        found.missing.append(f"{name} is not JSON ({one_line(error, 80)}){f': {without}' if without else ''}")
        return {}
    if not isinstance(value, dict):
        found.missing.append(f"{name} holds no object{f': {without}' if without else ''}")
        return {}
    return value


def _text(found: Folder, name: str, without: str | None) -> str:
    path = found.path / name
    try:
        text = files.read(path, follow=False)
        found.changed = max(found.changed, path.lstat().st_mtime)
    except FileNotFoundError as error:
        text, why = "", _why(error) if without else None
    except (OSError, ValueError) as error:
        text, why = "", _why(error)
    else:
        why = None if text.strip(" \n\0") else "is empty"
        text = "" if why else text
    if why:
        found.missing.append(f"{name} {why}{f': {without}' if without else ''}")
    return text


def _why(error: OSError | ValueError) -> str:
    """As in "is not there", "cannot be read (Permission denied)"."""
    if isinstance(error, FileNotFoundError):
        return "is not there"
    if isinstance(error, OSError) and error.errno == errno.ENXIO:
        return "cannot be read (it is not a regular file)"
    if isinstance(error, UnicodeDecodeError):
        return "cannot be read (it is not UTF-8)"
    return f"cannot be read ({one_line(getattr(error, 'strerror', None) or error, 80)})"
