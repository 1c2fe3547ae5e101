"""srun's command line for another start: on how many nodes, and without which."""

from collections.abc import Collection, Sequence

from hvdtrain.errors import JobError
from hvdtrain.tools.slurm.job_script import Option, options_of, program, program_of
from hvdtrain.untrusted import quoted

AS_IN = "as in: python -m hvdtrain supervise -- srun python train.py"


def check(words: Sequence[str]) -> None:
    """Raises JobError where they start no step."""
    if not words:
        raise JobError(f"no step to supervise; give it after --, {AS_IN}")
    if program(words) != "srun":
        raise JobError(
            f"what is supervised must be a step of srun, got {quoted(words[0])}; put srun before it, {AS_IN}"
        )
    if not program_of(words):
        raise JobError(f"srun must have a program to start, got none; {AS_IN}")


def number(words: Sequence[str], name: str) -> int | None:
    """The value of that option of srun, where it is a number."""
    values = [option.value for option, _ in _options(words) if option.name == name]
    return int(values[-1]) if values and values[-1].isdecimal() else None


def placed(words: Sequence[str], nodes: int, tasks_per_node: int | None, without: Collection[str]) -> list[str]:
    """The same step on so many nodes."""
    options = _options(words)
    excluded = [option.value for option, _ in options if option.name == "exclude"]
    left_out = ",".join([*excluded, *without])
    added = [f"--nodes={nodes}", *([f"--ntasks={nodes * tasks_per_node}"] if tasks_per_node else [])]
    added += [f"--exclude={left_out}"] if left_out else []
    dropped = {"nodes", "exclude", *(["ntasks"] if tasks_per_node else [])}
    own = [word for option, given in options if option.name not in dropped for word in given]
    return [words[0], *added, *own, *program_of(words)]


def beside_others(words: Sequence[str]) -> list[str]:
    """The same step without memory of its own: one that has not ended on a silent node still holds the job's."""
    own = [word for option, given in _options(words) if option.name != "mem" for word in given]
    return [words[0], "--mem=0", *own, *program_of(words)]


def _options(words: Sequence[str]) -> list[tuple[Option, Sequence[str]]]:
    """srun's own options, each with the words that give it."""
    own, found = words[1 : len(words) - len(program_of(words))], list[tuple[Option, Sequence[str]]]()
    while own:
        length = 1 if len(own) == 1 or own[1].startswith("-") else 2
        found.append((options_of(own, 0)[0], own[:length]))
        own = own[length:]
    return found
