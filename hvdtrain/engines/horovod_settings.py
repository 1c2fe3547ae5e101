"""Horovod's settings for a run: its variables, and how gradients are fused.

Without GPUs Horovod's cycle, in which ranks exchange what is ready, is not 1 ms: 10 ms between hosts, as it
took the processors that compute (four hosts at 1 Gbit/s and 50 us), and half a millisecond on one host, where a small
step mostly waits for it (`linear` on two ranks over MPI, from start to end: 7.1 s became 6.4).
"""

from collections.abc import Mapping

from hvdtrain.core.settings import EngineSettings
from hvdtrain.launch.devices import visible_gpus
from hvdtrain.untrusted import whole_number

FUSION_BYTES = 2 * 2**20  # bytes: of 0.25 to 25 MiB the fastest on one host and on four
CYCLE_MS_BETWEEN_HOSTS = 10
CYCLE_MS_ON_ONE_HOST = 0.5


def variables(settings: EngineSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Horovod's variables for the settings. What it leaves open is the user's choice, in `environ`."""
    found = {"HOROVOD_AUTOTUNE": "1"} if settings.autotune else {}
    if has_timeline(settings):
        found["HOROVOD_TIMELINE"] = "DYNAMIC"  # else start_timeline refuses
    if settings.fusion_threshold_mb is not None:
        found["HOROVOD_FUSION_THRESHOLD"] = str(settings.fusion_threshold_mb * 2**20)
    if settings.cycle_time_ms is not None:
        found["HOROVOD_CYCLE_TIME"] = str(settings.cycle_time_ms)
    elif not (settings.autotune or _has_gpu(settings, environ)):
        on_one_host = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
        cycle_ms = CYCLE_MS_ON_ONE_HOST if on_one_host else CYCLE_MS_BETWEEN_HOSTS
        found["HOROVOD_CYCLE_TIME"] = environ.get("HOROVOD_CYCLE_TIME", str(cycle_ms))
    return found


def has_timeline(settings: EngineSettings) -> bool:
    """Whether Horovod writes its timeline: where the settings request it, and beside a profile."""
    return settings.horovod_timeline or settings.profile


def fusion_bytes(settings: EngineSettings, environ: Mapping[str, str]) -> int | None:
    """How many bytes of gradients PyTorch's engine communicates together, larger ones alone; None leaves it to Horovod,
    for Adasum, where there are GPUs, or where autotune is to find out."""
    if settings.autotune or settings.reduction == "adasum" or _has_gpu(settings, environ):
        return None
    if settings.fusion_threshold_mb is not None:
        return settings.fusion_threshold_mb * 2**20
    chosen = whole_number(environ.get("HOROVOD_FUSION_THRESHOLD", ""))
    return FUSION_BYTES if chosen is None else chosen


def _has_gpu(settings: EngineSettings, environ: Mapping[str, str]) -> bool:
    return settings.device != "cpu" and visible_gpus(environ) > 0
