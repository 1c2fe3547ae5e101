"""Lists what a user can type or import: every command, every flag that a --help shows, every public name.

`python tests/support/surface.py` prints them, one a line. surface.txt holds those of version 0.1.0, and test_cli.py
tests that none is lost.
"""

import contextlib
import importlib
import inspect
import io
import os
import re
from pathlib import Path

from hvdtrain import cli, errors
from hvdtrain.core.values import known

TOPICS = ("train", "allreduce", "scaling", "engines")
RUNS = ("torch", "tensorflow", "lightning")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def helps() -> dict[str, str]:
    """The help of each command, and of a run in each framework, with a recipe and without one."""
    from hvdtrain.run.options import parse_run

    os.environ["COLUMNS"] = "300"
    asked = {name: (importlib.import_module(module).main, ["--help"]) for name, (module, _) in cli.COMMANDS.items()}
    for topic in TOPICS:
        asked[f"bench_{topic}"] = (asked["bench"][0], [topic, "--help"])
    for adapter in RUNS:
        for argv in (["--help"], *([recipe, "--help"] for recipe in known())):
            asked[f"hvdtrain.{adapter} {argv[0]}"] = (lambda argv, of=adapter: parse_run(of, argv, of), argv)
    return {name: printed(call, argv) for name, (call, argv) in asked.items()}


def printed(call, argv) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        call(argv)
    return out.getvalue()


def is_public(package, name: str) -> bool:
    """Whether the name is neither a module, nor a constant, nor an import for the package's own use."""
    value = vars(package).get(name)
    is_internal = name[0] == "_" or name.isupper() or name in {"Any", "TYPE_CHECKING", "discover"}
    return not (is_internal or inspect.ismodule(value) or value in vars(errors).values())


def surface() -> list[str]:
    found = {f"command {name}" for name in cli.COMMANDS}
    found |= {f"flag {name.partition(' ')[0]} {flag}" for name, text in helps().items() for flag in FLAG.findall(text)}
    for framework in (*RUNS, "keras"):
        package = importlib.import_module(f"hvdtrain.{framework}")
        found |= {f"name hvdtrain.{framework}.{name}" for name in dir(package) if is_public(package, name)}
        listed = REFERENCE / f"{framework}.md"
        entries = re.findall(r"^::: [\w.]+\.(\w+)$", listed.read_text(), re.MULTILINE) if listed.exists() else []
        found |= {f"reference {framework} {name}" for name in entries}
    found |= {f"error {name}" for name, value in vars(errors).items() if isinstance(value, type)}
    return sorted(found)


if __name__ == "__main__":
    print("\n".join(surface()))
