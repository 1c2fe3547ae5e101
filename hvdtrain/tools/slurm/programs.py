"""Which program a command starts that trains, behind launchers, containers, `bash -c` and variables."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.tools.slurm.bash import WRAPPERS, unquoted
from hvdtrain.tools.slurm.job_script import WORDS, program

SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
# Programs that start the words behind them.
PASSES_ON = {"singularity", "apptainer", "shifter", "docker", "podman", "podman-hpc", "enroot", "sarus", "ch-run"}
PASSES_ON |= {"uv", "poetry", "pixi", "conda", "mamba", "micromamba", "pipenv", "hatch", "nsys", "ncu", "numactl"}
PASSES_ON |= {
    "taskset",
    "stdbuf",
    "timeout",
    "nice",
    "xvfb-run",
    "unbuffer",
    "eval",
    "apptainer-suid",
    *WRAPPERS,
    *SHELLS,
}
# Programs that train nothing, whatever words are behind them.
QUIET = {"hostname", "echo", "printf", "cat", "cp", "mv", "rm", "ls", "ln", "mkdir", "rmdir", "tar", "unzip", "rsync"}
QUIET |= {"chmod", "touch", "find", "sed", "awk", "grep", "which", "date", "sleep", "true", "nvidia-smi", "rocm-smi"}
QUIET |= {
    "pip",
    "pip3",
    "git",
    "wget",
    "curl",
    "df",
    "free",
    "ip",
    "ping",
    "nproc",
    "lscpu",
    "printenv",
    "sync",
    "test",
}
QUIET |= {"module", "ml", "source", ".", "cd", "export", "set", "ulimit", "sbcast", "scontrol", "kill", "pkill", "sudo"}
PYTHON = re.compile(r"python[\d.]*|pypy3?")
KINDS = {
    "torchrun": re.compile(r"torchrun[\w-]*"),
    "accelerate": re.compile(r"accelerate(-launch)?"),
    "deepspeed": re.compile(r"deepspeed"),
    # Programs of frameworks that train in Python.
    "python": re.compile(
        r"fairseq(-hydra)?-train|llamafactory-cli|axolotl|litgpt|tune|yolo|onmt_train|nnUNet(v2)?_train|allennlp|"
        r"anemoi-training|t2t-trainer"
    ),
}
RUNS_TORCH = re.compile(r"torch\.distributed\.(run|launch)|torch\.distributed\.elastic\S*")
TOOLS = re.compile(
    r"(pip|venv|virtualenv|ensurepip|json|http|zipfile|compileall|site|ipykernel|pytest|ray|tensorboard)(\..*)?"
)
# Names of Python programs that prepare or look at something.
NOT_TRAINING = re.compile(
    r"(?:^|[-_.])(?:pre_?process(?:ing)?|prepare|download|convert|tokeni[sz]e|upload|sync|install|setup|generate|datagen|"
    r"extract|pre_?compute|compute|build|create|make|merge|average|consolidat\w+|(?:re)?encode|serve|server|validat(?:e|or)|"
    r"visuali[sz]e|plot)(?:[-_.]|$)"
)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?[-=]([^{}]{0,200}))?\}|(\w+))")
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
BRACES = re.compile(r"\$\{(\w+)[^{}]{0,200}\}")
COMMENT = re.compile(r"(?<!\S)#.*")
SUBSTITUTED = re.compile(r"\$\(\([^()]{0,200}\)\)|\$\([^()]{0,200}\)")
PIECES = re.compile(r"[;&|\n(){}]+|(?:^|\s)(?:then|do|else)\s")
MOST_WORDS = 400
MOST_FILLED = 8000  # characters of a command, its variables filled in
MOST_IN_ALL = 2**19
PASSES = 5  # of variables in variables
MOST_NESTED = 3  # bash -c in bash -c


@dataclass(frozen=True)
class Program:
    """What trains, by kind: torchrun, accelerate, deepspeed, python; or a script that cannot be seen into."""

    kind: str
    words: tuple[str, ...]


class Filler:
    """Fills in the variables that the script itself sets, as far as a bound on all that is filled in allows."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values
        self.left = MOST_IN_ALL

    def words(self, words: Sequence[str]) -> tuple[str, ...]:
        """The words as the program gets them: a variable alone may be several."""
        filled: list[str] = []
        for word in words[:MOST_WORDS]:
            is_text = bool(filled and re.fullmatch("-[a-z]*c", filled[-1]))
            text = self._text(word)
            if text != word and not is_text and VARIABLE.fullmatch(word):
                filled += [unquoted(found) for found in WORDS.findall(text)]
            else:
                filled.append(text)
        return tuple(filled[:MOST_WORDS])

    def _text(self, text: str) -> str:
        for _ in range(PASSES):
            if "$" not in text or self.left <= 0:
                break
            before, text = text, VARIABLE.sub(self._value, text)[:MOST_FILLED]
            self.left -= len(text)
            if text == before:
                break
        return text

    def _value(self, found: re.Match[str]) -> str:
        default = found[2]
        return self.values.get(found[1] or found[3], found[0] if default is None else default)


def trains(words: Sequence[str], functions: Mapping[str, str], by_launcher: bool, nested: int = 0) -> Program | None:
    """The program that trains; None where none does. Behind a launcher any of the words may be it."""
    words = words[:MOST_WORDS]
    if not words or program(words) in QUIET:
        return None
    if not (by_launcher or kind_of(words) or program(words) in PASSES_ON or _is_script(words[0])):
        return None
    unseen = None
    for i, word in enumerate(words):
        name = word.rpartition("/")[2]
        text = functions.get(name) or (_shell_text(words[i:]) if name in SHELLS else None)
        if text is not None:
            return _in_text(text, functions, nested)
        if kind := kind_of(words[i:]):
            return Program(kind, tuple(words[i:])) if kind != "tool" else None
        if not unseen and (_is_script(word) if i == 0 else name.endswith(SCRIPTS)):
            unseen = Program("script", tuple(words[i - 1 : i + 1] if i and words[i - 1] in SHELLS else words[i:]))
    return unseen


def _in_text(text: str, functions: Mapping[str, str], nested: int) -> Program | None:
    """The program in what `bash -c` runs: one that can be seen before a script that cannot."""
    found = []
    text = SUBSTITUTED.sub("$_", COMMENT.sub("", BRACES.sub(r"$\1", text.replace("\\\n", " "))))
    for piece in PIECES.split(text)[:MOST_WORDS] if nested < MOST_NESTED else []:
        words = [unquoted(word) for word in WORDS.findall(piece)]
        starts = (i for i, word in enumerate(words) if word not in WRAPPERS and not re.match(r"[A-Za-z_]\w*=", word))
        if started := trains(words[next(starts, len(words)) :], functions, True, nested + 1):
            found.append(started)
    return min(found, key=lambda started: started.kind == "script", default=None)


def _shell_text(words: Sequence[str]) -> str | None:
    """What `bash -c` gets as text, with the words behind it in the place of "$@"."""
    for i, word in enumerate(words[1:], 1):
        if re.fullmatch("-[a-z]*c", word):
            arguments = " ".join(shlex.quote(argument) for argument in words[i + 3 :])
            return words[i + 1].replace('"$@"', arguments)[:MOST_FILLED] if i + 1 < len(words) else None
        if not word.startswith("-"):
            return None
    return None


def _is_script(word: str) -> bool:
    return word.endswith(SCRIPTS) or word.startswith(("./", "$"))


def kind_of(words: Sequence[str]) -> str | None:
    """The kind of program that these words start with; `tool` for a Python that trains nothing; None for any other."""
    name = words[0].rpartition("/")[2]
    if PYTHON.fullmatch(name):
        return _kind_of_python(words)
    if name == "accelerate" and tuple(words[1:2]) != ("launch",):
        return "tool"
    if name.endswith(".py"):
        return "tool" if NOT_TRAINING.search(name) else "python"
    return next((kind for kind, pattern in KINDS.items() if pattern.fullmatch(name)), None)


def _kind_of_python(words: Sequence[str]) -> str:
    rest = list(_without_options(words))
    if not rest or rest[0] in {"-", "-c", "-V", "--version"}:
        return "tool"
    name = rest[1] if rest[0] == "-m" and len(rest) > 1 else ""
    if RUNS_TORCH.fullmatch(name):
        return "torchrun"
    if name.startswith("accelerate."):
        return "accelerate"
    if name.startswith("deepspeed."):
        return "deepspeed"
    # hvdtrain's own commands start their steps themselves.
    return (
        "tool"
        if name == "hvdtrain" or TOOLS.fullmatch(name) or NOT_TRAINING.search(name or rest[0].rpartition("/")[2])
        else "python"
    )


def _without_options(words: Sequence[str]) -> Iterator[str]:
    """The words from Python's module, text or file on."""
    begun = False
    for word in words[1:]:
        begun = begun or not word.startswith("-") or word in {"-", "-c", "-m", "-V", "--version"}
        if begun:
            yield word
