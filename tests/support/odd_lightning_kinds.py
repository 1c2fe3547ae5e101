"""What is odd in the programs of odd_lightning.py, by seed; in a module that does not import PyTorch."""

from odd_drawn import drawn

CALLBACKS = (
    "GradientAccumulationScheduler", "StochasticWeightAveraging", "EMAWeightAveraging", "EarlyStopping",
    "ModelCheckpoint", "ModelCheckpoint in steps", "BackboneFinetuning", "LearningRateMonitor", "Timer",
    "LambdaCallback",
)  # fmt: skip
OTHERS = (
    "WeightAveraging", "LearningRateFinder", "DeviceStatsMonitor", "ModelPruning", "ModelSummary",
    "OnExceptionCheckpoint", "SpikeDetection", "ThroughputMonitor", "TQDMProgressBar", "RichProgressBar",
    "RichModelSummary",
)  # fmt: skip
"""Lightning's other callbacks, except BatchSizeFinder, which changes the batches of plain Lightning."""
FLAGS = {
    "limit_train_batches": 2,
    "limit in parts": 0.7,
    "overfit_batches": 2,
    "val_check_interval": 2,
    "val in parts": 0.5,
    "check_val_every_n_epoch": 2,
    "max_steps": 7,
    "min_epochs": 3,
    "reload_dataloaders_every_n_epochs": 2,
    "barebones": True,
    "fast_dev_run": 2,
    "gradient_clip_val": 0.3,
    "clipped by value": 0.05,
    "accumulate_grad_batches": 2,
}
"""Arguments of the Trainer, by their names, or by a name of their own where several set the same one."""
ODDITIES = (
    *CALLBACKS, *FLAGS, "frozen norm", "counter", "extra state", "two optimizers", "by step", "by epoch", "on plateau",
    "groups", "dropout", "logged in training", "callbacks of the module", "validated", "weighted",
    *OTHERS, "own callbacks", "metric of sums", "metric of lists", "masked",
)  # fmt: skip
REFUSED = {"BackboneFinetuning", "LearningRateFinder", "ModelPruning", "OnExceptionCheckpoint", "SpikeDetection"}
"""Callbacks that FaultTolerance refuses, so that no program has them."""
OF_RANK = {"dropout"}
"""Oddities with which the weights depend on the number of ranks."""
AUTOMATIC = {"gradient_clip_val", "clipped by value", "accumulate_grad_batches", "GradientAccumulationScheduler"}
AUTOMATIC |= {"StochasticWeightAveraging", "BackboneFinetuning"}
APART = (
    {"limit_train_batches", "limit in parts", "overfit_batches", "fast_dev_run"},
    {"val_check_interval", "val in parts"},
    {"gradient_clip_val", "clipped by value"},
    {"by step", "by epoch", "on plateau"},
    {"accumulate_grad_batches", "GradientAccumulationScheduler", "counter"},
    {"StochasticWeightAveraging", "frozen norm"},
    {"StochasticWeightAveraging", "BackboneFinetuning", "groups"},
    {"StochasticWeightAveraging", "by step", "on plateau"},
    {"EMAWeightAveraging", "WeightAveraging", "StochasticWeightAveraging", "ModelPruning"},
    {"check_val_every_n_epoch", "on plateau"},
    {"check_val_every_n_epoch", "EarlyStopping"},
    {"TQDMProgressBar", "RichProgressBar"},
    {"ModelSummary", "RichModelSummary"},
    {"masked", "weighted"},
    {"masked", "logged in training"},
    {"masked", "accumulate_grad_batches", "GradientAccumulationScheduler"},
    {"masked", "on plateau"},
    *({"two optimizers", each} for each in (*sorted(AUTOMATIC), *OTHERS[:4])),
    *({"barebones", each} for each in ("fast_dev_run", "on plateau", "LearningRateMonitor", *CALLBACKS[3:6], *OTHERS)),
)
"""Groups of oddities that exclude one another: Lightning refuses them together."""


def oddities(seed: int) -> set[str]:
    """What is odd in the program of that seed."""
    return drawn(seed, ODDITIES, APART, most=6)
