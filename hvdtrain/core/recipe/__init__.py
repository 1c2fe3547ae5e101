"""Recipes, which say what to train: named YAML entries and flags become one validated, frozen value."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import AfterValidator, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from hvdtrain.core.recipe import augmentation, classes, finetuning, memory, noise, rules, stopping, text
from hvdtrain.core.recipe.augmentation import Augmentation
from hvdtrain.core.recipe.classes import Classes
from hvdtrain.core.recipe.finetuning import FineTuning
from hvdtrain.core.recipe.keys import Keys
from hvdtrain.core.recipe.memory import Memory
from hvdtrain.core.recipe.noise import Noise
from hvdtrain.core.recipe.stopping import Stopping
from hvdtrain.core.recipe.text import Text
from hvdtrain.core.user_code import is_path
from hvdtrain.core.values import BOOLEANS_OF_YAML_1_1, entry_keys, over, shown_key
from hvdtrain.core.wording import nearest, rule
from hvdtrain.errors import RecipeError
from hvdtrain.files import expanded
from hvdtrain.untrusted import quoted


class Recipe(Augmentation, Classes, FineTuning, Memory, Noise, Stopping, Text, Keys):
    """What to train. Every field is a key of the YAML entry and a flag of the command line."""


def expanding(key: str) -> AfterValidator:
    """The validator of a flag's path, in which environment variables and ~ are replaced by their values."""
    return AfterValidator(lambda path: Path(expanded(str(path), key)))


def load(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe `FILE[:ENTRY]`, in which `overrides` replace keys.

    FILE is the name of a shipped recipe or the path of a .yaml file; ENTRY is "default" where it is left out. Raises
    RecipeError for anything that breaks a rule.
    """
    return validate({**over(entry_keys(name, (), {}), overrides or {}), "name": name})


def validate(keys: Mapping[str, Any]) -> Recipe:
    """The recipe with these keys. Raises RecipeError, which names the first key that breaks a rule."""
    try:
        recipe = Recipe.model_validate({shown_key(key): value for key, value in keys.items()})
    except ValidationError as error:
        raise RecipeError(_first_line(error)) from None
    rules.check(recipe)
    augmentation.check(recipe)
    classes.check(recipe)
    finetuning.check(recipe)
    memory.check(recipe)
    noise.check(recipe)
    stopping.check(recipe)
    text.check(recipe)
    return recipe


def of_program(**keys: Any) -> Recipe:
    """What engine, loop and loader of a user's program, which has no recipe, read of one: these keys, which no rule
    checks, and the defaults of the others."""
    return Recipe.model_construct(name="program", **keys)


def fixed_workers(recipe: Recipe) -> int:
    """The number of readers; 0 where a run has not replaced `auto`: whoever reads a few examples needs none."""
    return 0 if recipe.workers == "auto" else recipe.workers


def named_by(r: Recipe) -> dict[str, str]:
    """The import paths in a recipe, by key."""
    paths = {key: getattr(r, key) or "" for key in ("model", "dataset", "collate", "loss", "step", "optimizer")}
    paths |= {f"metrics {name}": path for name, path in r.metrics.items()}
    return {key: path for key, path in paths.items() if is_path(path)}


def located(recipe: Recipe) -> Recipe:
    """The recipe with the environment variables in its folders replaced. The recipe itself keeps $NAME, because values
    differ from node to node and from job to job. Raises RecipeError where a variable is not set."""
    folders = {"data_dir": recipe.data_dir, "cache_dir": recipe.cache_dir}
    found = {key: Path(expanded(str(path), key)) for key, path in folders.items() if path}
    return recipe.model_copy(update=found)


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML from which `load` makes an equal recipe."""
    text = io.StringIO()
    keys = recipe.model_dump(mode="json", exclude={"name"})
    YAML().dump({"default": _marked(keys)}, text)
    return f"# {recipe.name}, resolved\n{text.getvalue()}"


def _marked(value: Any) -> Any:
    """The value, with quotes around those texts that are refused without."""
    if isinstance(value, dict):
        return {key: _marked(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_marked(each) for each in value]
    is_refused = isinstance(value, str) and value.lower() in BOOLEANS_OF_YAML_1_1
    return DoubleQuotedScalarString(value) if is_refused else value


def _first_line(error: ValidationError) -> str:
    errors = error.errors(include_url=False)
    # The key that is unknown may be meant for the one that is missing.
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"unknown key {quoted(key)}.{nearest(key, list(Recipe.model_fields))}"
    if first["type"] == "missing":
        return f"{key} is missing: {Recipe.model_fields[key].description}."
    subject = f"each of {key}" if len(first["loc"]) > 1 else key
    return f"{subject} must {rule(first)}, got {quoted(first['input'])}."
