"""PMI: the plugins by which srun connects a step's tasks to their MPI, with their names and variables."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hvdtrain.errors import JobError
from hvdtrain.untrusted import quoted

NAMES = re.compile(r"\b(?:none|pmi2|pmix(?:_v\d+)?|cray_shasta|pspmix?|openmpi)\b")  # that srun --mpi= may have


@dataclass(frozen=True)
class Plugin:
    """A plugin of srun's, and the variables that it sets: the label of the step, the rank, the number of ranks."""

    name: str
    label: str
    step: str  # what the label holds for a step
    rank: str
    size: str  # "" where there is none


# Cray's names are from SLURM's plugin mpi/cray_shasta.
PLUGINS = (
    Plugin("pmix", "PMIX_NAMESPACE", "slurm.pmix.{}", "PMIX_RANK", ""),
    Plugin("cray_shasta", "PALS_APID", "{}", "PMI_RANK", "PMI_SIZE"),
    Plugin("pmi2", "PMI_JOBID", "{}", "PMI_RANK", "PMI_SIZE"),
)


def of_step(environ: Mapping[str, str], step: str) -> Iterator[Plugin]:
    """The plugins of this step. The label of another step is that of an outer launcher's daemon."""
    return (plugin for plugin in PLUGINS if environ.get(plugin.label) == plugin.step.format(step))


def check_name(name: str | None) -> None:
    """Raises JobError where srun --mpi= cannot have that name."""
    if name is not None and not NAMES.fullmatch(name):
        raise JobError(
            f"--mpi must be pmix, pmi2, cray_shasta, pspmi or none, got {quoted(name)}; see: srun --mpi=list"
        )
