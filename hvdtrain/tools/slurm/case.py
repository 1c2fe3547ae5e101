"""What a rule gets and gives: a job script as it was read, and a finding."""

import bisect
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hvdtrain.tools.slurm.job_script import JobScript, read
from hvdtrain.tools.slurm.sites import Site
from hvdtrain.tools.slurm.steps import Step, job_options, training_steps


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong; `note` where it is advice: it may cost time, or go wrong at some sites only."""

    line: int
    wrong: str
    why: str
    instead: str
    note: bool = False


@dataclass(frozen=True)
class Case:
    """A script, what it starts that trains, and the site it is for, if that is known."""

    text: str
    script: JobScript
    site: Site | None
    steps: tuple[Step, ...]

    @property
    def trainings(self) -> tuple[Step, ...]:
        """The steps that can be seen into."""
        return tuple(step for step in self.steps if step.program.kind != "script")

    @functools.cached_property
    def job(self) -> Step:
        """The job's own nodes and tasks."""
        return Step(0, (), {}, job_options(self.script))

    @property
    def is_exclusive(self) -> bool:
        """Whether no other job shares its nodes."""
        option = self.script.option("exclusive")
        return option is not None and not option.value

    def searched(self, pattern: re.Pattern[str]) -> Iterator[tuple[int, re.Match[str]]]:
        """What matches in all that the job's own shell fills in, with its line."""
        return ((self.line_of(found.start()), found) for found in pattern.finditer(self.script.shell.expanded))

    def line_of(self, position: int) -> int:
        """The line of the script in which that character of the text stands."""
        return 1 + bisect.bisect_left(self._line_ends, position)

    @functools.cached_property
    def _line_ends(self) -> list[int]:
        return [found.start() for found in re.finditer("\n", self.script.shell.text)]


def case_of(text: str, site: Site | None) -> Case:
    """The script read, for the rules."""
    script = read(text)
    return Case(text, script, site, training_steps(script))


Rule = Callable[[Case], Iterator[Finding]]
