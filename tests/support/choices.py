"""Makes a `Choice` for tests of compatibility rules."""

from typing import Any

from hvdtrain.core import recipe as recipes
from hvdtrain.core.compatibility import Adapter, Choice
from hvdtrain.core.recipe import Recipe
from hvdtrain.engines.registry import ENGINES
from hvdtrain.launch.topology import Topology


def choice(
    engine: str = "horovod", adapter: Adapter | None = None, recipe: Recipe | None = None, **rest: Any
) -> Choice:
    """Left out: the engine's first adapter, the recipe linear, one process, as many GPUs as the engine needs."""
    row = ENGINES[engine]
    given: dict[str, Any] = {
        "topology": Topology.alone("here"),
        "devices": tuple(f"cuda:{index}" for index in range(row.devices)),
        "engines": ENGINES.values(),
        **rest,
    }
    return Choice(recipe or recipes.load("linear"), adapter or next(iter(row.classes)), row, **given)
