"""Every error a user can meet, in one tree.

HvdtrainError                  exit code 2: the input or the surroundings are wrong, nothing was trained
├── RecipeError                a recipe or a flag breaks a rule
├── TopologyError              the launcher contradicts itself
├── ProgramError               code of the user's that a recipe names failed
├── PlanError                  recipe, ranks and data do not fit together
├── DataError                  a data file is missing, damaged or of the wrong shape
├── OutputError                the output folder cannot be written, or is full
├── CheckpointError            a checkpoint is damaged, or belongs to another model
├── JobError                   a job script cannot be made, submitted or read
├── BuildError                 Horovod could not be built or did not prove itself
├── EngineUnavailable          a collective library, or a compiler, is not installed
├── WorldError                 the launcher and the collective library disagree about the number of ranks
├── AgreementError             the ranks have not the same data, code, recipe or settings
├── DeviceError                the visible GPUs do not fit the ranks
├── LabError                   a learner's mistake in a lab, explained; its text may have several lines
├── LoopError                  a loop of one's own would not train its ranks as one
├── KerasError                 a Keras model is put together so that its ranks would not train as one
└── TrainingError              exit code 1: training began and had to stop
    ├── AbortedError           another rank ended, and this one with it
    ├── StoppedError           a signal asked the run to stop; exit code 128 + the signal
    ├── DivergedError          the loss is no longer finite
    └── ReplicaError           the ranks' weights differ, or what updates them
"""


class HvdtrainError(Exception):
    """Its text is one line: the value, the rule, the remedy."""

    exit_code = 2
    everywhere = False
    """Whether every rank raises it alike, so that one rank's message is enough."""
    reported = False
    """Whether it has been printed already."""


class RecipeError(HvdtrainError):
    """A recipe or a flag breaks a rule."""

    everywhere = True


class ProgramError(HvdtrainError):
    """Code of the user's that a recipe names failed, maybe on one rank alone."""


class TopologyError(HvdtrainError):
    """The launcher contradicts itself."""


class PlanError(HvdtrainError):
    """Recipe, ranks and data do not fit together."""

    everywhere = True


class DataError(HvdtrainError):
    """A data file is missing, damaged or of the wrong shape."""


class OutputError(HvdtrainError):
    """The output folder cannot be written, or is full."""


class CheckpointError(HvdtrainError):
    """A checkpoint is damaged, or belongs to another model."""


class JobError(HvdtrainError):
    """A job script cannot be made, submitted or read."""


class BuildError(HvdtrainError):
    """Horovod could not be built or did not prove itself."""


class EngineUnavailable(HvdtrainError):
    """A collective library, or what torch.compile needs, is not installed."""


class WorldError(HvdtrainError):
    """The launcher and the collective library disagree about the number of ranks."""

    everywhere = True


class AgreementError(HvdtrainError):
    """The ranks have not the same data, code, recipe or settings."""

    everywhere = True


class DeviceError(HvdtrainError):
    """The visible GPUs do not fit the ranks."""


class LabError(HvdtrainError):
    """A learner's mistake in a lab, explained; its text may have several lines, and a notebook shows it alone."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in place of a traceback."""
        return [str(self)]


class LoopError(HvdtrainError):
    """A loop of one's own would not train its ranks as one, or not resume as it was."""

    everywhere = True


class KerasError(HvdtrainError):
    """A Keras model is put together so that its ranks would not train as one."""


class TrainingError(HvdtrainError):
    """Training began and had to stop."""

    exit_code = 1


class AbortedError(TrainingError):
    """Another rank ended, and this one with it; `reason` names it where it is known."""

    everywhere = True

    def __init__(self, reason: str | None = None, exit_code: int = TrainingError.exit_code) -> None:
        why = reason or "another rank ended, and this one with it; the first message of another rank tells why"
        super().__init__(f"{why}. The same command continues from the last checkpoint.")
        self.reason, self.exit_code = reason, exit_code


class StoppedError(TrainingError):
    """A signal asked the run to stop, and it did, with a checkpoint."""

    everywhere = True

    def __init__(self, step: int, signal_name: str, exit_code: int) -> None:
        super().__init__(
            f"{signal_name}: stopped after step {step}, with a checkpoint; the same command continues from it."
        )
        self.exit_code = exit_code


class DivergedError(TrainingError):
    """The loss is no longer finite."""

    everywhere = True


class ReplicaError(TrainingError):
    """The ranks' weights differ, or what updates them."""

    everywhere = True
