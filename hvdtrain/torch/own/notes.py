"""What a program's run says once, of what would else pass in silence."""

from torch import nn

from hvdtrain.core.progress import Extent, Progress
from hvdtrain.torch.models import SyncBatchNorm
from hvdtrain.torch.networks import BATCH_NORMS


def of_batch_norms(model: nn.Module) -> str | None:
    """That BatchNorm layers of this model normalise by what their own rank sees; None where there are none."""
    names = [name for name, each in model.named_modules() if isinstance(each, BATCH_NORMS) and _is_local(each)]
    if not names:
        return None
    layers = f"{names[0] or 'the model'} and {len(names) - 1} more" if len(names) > 1 else names[0] or "the model"
    return (
        f"BatchNorm ({layers}) normalises by each rank's part of the batch, so the curve depends on the number of "
        "ranks; for the whole batch's, take model = world.sync_batch_norm(model) before the optimizer is made"
    )


def of_left_epoch(progress: Progress, extent: Extent) -> str:
    """That the program has left the epoch's batches before their end."""
    steps = f"{progress.updates(extent)} of {extent.train_examples // extent.global_batch} steps"
    return (
        f"epoch {progress.epoch} was left after {steps}; a run that resumes inside such an epoch continues with the "
        "next batch, and cannot know where you would leave: decide by run.global_step, or give run.epochs(..., "
        "max_steps=)"
    )


def of_nothing_to_do(progress: Progress, stopped: str | None) -> str:
    """That a run which resumes has no epoch left."""
    why = f" was stopped ({stopped})" if stopped else " has no epoch left"
    return (
        f"this folder's run{why}: it is finished at epoch {progress.epoch}, step {progress.step}, and nothing is "
        "trained; another training, as of the next fold, needs a folder of its own"
    )


def _is_local(norm: nn.Module) -> bool:
    """Whether it takes the statistics of its rank's batch, and not those that it has kept."""
    if isinstance(norm, SyncBatchNorm):
        return False
    return norm.training or not getattr(norm, "track_running_stats", True)
