"""Horovod's settings for a recipe: its variables, and how gradients are fused.

Without GPUs Horovod's cycle, in which ranks exchange what is ready, is not 1 ms: 10 ms between hosts, as it
took the processors that compute (four hosts at 1 Gbit/s and 50 us), and half a millisecond on one host, where a small
step mostly waits for it (`linear` on two ranks over MPI, from start to end: 7.1 s became 6.4).
"""

from collections.abc import Mapping

from hvdtrain.core.recipe import Recipe
from hvdtrain.launch.devices import visible_gpus
from hvdtrain.untrusted import whole_number

FUSION_BYTES = 2 * 2**20  # bytes: of 0.25 to 25 MiB the fastest on one host and on four
CYCLE_MS_BETWEEN_HOSTS = 10
CYCLE_MS_ON_ONE_HOST = 0.5


def variables(recipe: Recipe, environ: Mapping[str, str]) -> dict[str, str]:
    """Horovod's variables for the recipe. What it leaves open is the user's choice, in `environ`."""
    settings = {"HOROVOD_AUTOTUNE": "1"} if recipe.autotune else {}
    if has_timeline(recipe):
        settings["HOROVOD_TIMELINE"] = "DYNAMIC"  # else start_timeline refuses
    if recipe.fusion_threshold_mb is not None:
        settings["HOROVOD_FUSION_THRESHOLD"] = str(recipe.fusion_threshold_mb * 2**20)
    if recipe.cycle_time_ms is not None:
        settings["HOROVOD_CYCLE_TIME"] = str(recipe.cycle_time_ms)
    elif not (recipe.autotune or _has_gpu(recipe, environ)):
        on_one_host = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
        cycle_ms = CYCLE_MS_ON_ONE_HOST if on_one_host else CYCLE_MS_BETWEEN_HOSTS
        settings["HOROVOD_CYCLE_TIME"] = environ.get("HOROVOD_CYCLE_TIME", str(cycle_ms))
    return settings


def has_timeline(recipe: Recipe) -> bool:
    """Whether Horovod writes its timeline: where the recipe requests it, and beside a profile."""
    return recipe.horovod_timeline or recipe.profile


def fusion_bytes(recipe: Recipe, environ: Mapping[str, str]) -> int | None:
    """How many bytes of gradients PyTorch's engine communicates together, larger ones alone; None leaves it to Horovod,
    for Adasum, where there are GPUs, or where autotune is to find out."""
    if recipe.autotune or recipe.reduction == "adasum" or _has_gpu(recipe, environ):
        return None
    if recipe.fusion_threshold_mb is not None:
        return recipe.fusion_threshold_mb * 2**20
    chosen = whole_number(environ.get("HOROVOD_FUSION_THRESHOLD", ""))
    return FUSION_BYTES if chosen is None else chosen


def _has_gpu(recipe: Recipe, environ: Mapping[str, str]) -> bool:
    return recipe.device != "cpu" and visible_gpus(environ) > 0
