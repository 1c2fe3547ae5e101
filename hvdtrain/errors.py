"""The errors that a user can meet: exit code 1 for a TrainingError, 2 for any other HvdtrainError."""

import functools
import textwrap

OTHER_FOLDER = "give another {folder}"
"""A remedy."""


class HvdtrainError(Exception):
    """The input or the environment is wrong. The text is one line: the value, the rule, the remedy."""

    exit_code = 2
    everywhere = False
    """Whether every rank raises this error, so that the message of one rank is enough."""
    reported = False
    """Whether the message was printed already."""
    folder = "--output"
    """What {folder} stands for in the remedy: who prints it knows how the run folder was given."""
    ag_pass_through = True
    """TensorFlow's AutoGraph then raises the error as it is: one with an __init__ of its own it would replace."""

    def __init__(self, *text: str, remedy: str = "") -> None:
        """`remedy`: what to do, where the text does not say it; without a full stop."""
        super().__init__(*text)
        self.remedy = remedy

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}; {self.remedy.replace('{folder}', self.folder)}." if self.remedy else text


class RecipeError(HvdtrainError):
    """A recipe or a flag breaks a rule."""

    everywhere = True


class ProgramError(HvdtrainError):
    """The user's code that a recipe names failed, maybe on one rank only."""


class TopologyError(HvdtrainError):
    """The launcher contradicts itself."""


class PlanError(HvdtrainError):
    """The recipe, the number of ranks and the data do not fit together."""

    everywhere = True


class DataError(HvdtrainError):
    """A data file is missing or damaged, or has a wrong shape."""


class OutputError(HvdtrainError):
    """The output folder cannot be written, or is full."""


class CheckpointError(HvdtrainError):
    """A checkpoint is damaged, or belongs to another model."""


class JobError(HvdtrainError):
    """A job script cannot be made, submitted or read."""


class BuildError(HvdtrainError):
    """Horovod could not be built, or failed its checks afterwards."""


class EngineUnavailable(HvdtrainError):
    """A collective library, or what torch.compile needs, is not installed."""


class WorldError(HvdtrainError):
    """The launcher and the collective library disagree about the number of ranks."""

    everywhere = True


class AgreementError(HvdtrainError):
    """The ranks do not have the same data, code, recipe or settings."""

    everywhere = True


class DeviceError(HvdtrainError):
    """The visible GPUs do not fit the ranks."""


class LabError(HvdtrainError):
    """A learner's mistake in a lab, explained in one or more lines."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: text in lines of 80 columns, code as it is."""
        fold = functools.partial(textwrap.fill, width=80, break_long_words=False, break_on_hyphens=False)
        return [line if line.startswith(" ") else fold(line) for line in str(self).splitlines()]


class LoopError(HvdtrainError):
    """The user's own training loop would not keep its ranks in step, or could not be resumed exactly; or hvdtrain does
    not know the installed release of a framework."""

    everywhere = True


class KerasError(HvdtrainError):
    """A Keras model is built in a way that would not keep its ranks in step."""


class TrainingError(HvdtrainError):
    """Training had begun and had to stop."""

    exit_code = 1


class OutOfMemoryError(TrainingError):
    """A step does not fit into the memory of this rank's device or host."""


class AbortedError(TrainingError):
    """Another rank ended, so this one had to; the `reason`, where known, names that rank."""

    everywhere = True

    def __init__(self, reason: str | None = None, exit_code: int = TrainingError.exit_code) -> None:
        why = reason or "another rank ended, and this one with it; the first message of another rank tells why"
        super().__init__(f"{why}. The same command continues from the last checkpoint.")
        self.reason, self.exit_code = reason, exit_code


class StoppedError(TrainingError):
    """A signal requested the run to stop, and it did, after writing a checkpoint."""

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
    """The weights of the ranks differ, or the code and settings that update them."""

    everywhere = True
