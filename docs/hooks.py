"""What mkdocs adds to the pages of docs/: other files of the repository.

`python docs/hooks.py` makes the reference from the code again.
"""

import json
import os
import posixpath
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from hvdtrain.cli import COMMANDS
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.values import known
from hvdtrain.tools.bench import WHATS as BENCHMARKS

REPOSITORY = Path(__file__).parents[1]
ELSEWHERE = {  # page of the site: file of the repository
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "labs.md": "labs/README.md",
    "teaching.md": "labs/TEACHING.md",
    "security-policy.md": "SECURITY.md",
    "slurm.md": "slurm/README.md",
}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
EXTERNAL = re.compile(
    r"<(?:script|img|iframe)[^>]*\ssrc=\"?(?:https?:)?//|<link[^>]*\bstylesheet[^>]*href=\"?(?:https?:)?//"
)
WIDTH = "78"


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are no file of docs/."""
    pages = {page: (REPOSITORY / source).read_text(encoding="utf-8") for page, source in ELSEWHERE.items()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points links between files of the repository at their pages; a file without a page becomes its name."""
    own = page.file.src_uri
    folder = posixpath.dirname(ELSEWHERE.get(own, f"docs/{own}"))
    page_of = {source: target for target, source in ELSEWHERE.items()}

    def pointed(link: re.Match[str]) -> str:
        text, target, anchor = link.groups(default="")
        path = posixpath.normpath(posixpath.join(folder, target))
        goal = page_of.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if goal is None:
            if not (REPOSITORY / path).exists():
                raise PluginError(f"{own}: no file {path}; correct the link [{text}]({target}).")
            return text
        return f"[{text}]({posixpath.relpath(goal, posixpath.dirname(own) or '.')}{anchor})"

    return LINK.sub(pointed, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Marks short words of code, which a line does not break."""
    return re.sub(r"<code>([^<\n]{1,28})</code>", r'<code class="short">\1</code>', html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuses a page that would load anything from another host."""
    if found := EXTERNAL.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {found.group()}")
    return output


def reference() -> dict[Path, str]:
    """The pages that are made from the code."""
    folder = REPOSITORY / "docs" / "reference"
    return {folder / "recipe.md": recipe_page(), folder / "commands.md": commands_page()}


def recipe_page() -> str:
    """Every key of a recipe, and the shipped recipes."""
    properties = Recipe.model_json_schema()["properties"]
    rows = [
        f"| `{name}` | {schema['description']}<br>*{_values(schema)}; {_default(schema)}* |"
        for name, schema in properties.items()
        if name != "name"
    ]
    folder = REPOSITORY / "hvdtrain" / "recipes"
    recipes = [f"### {name}\n\n```yaml\n{(folder / f'{name}.yaml').read_text(encoding='utf-8')}```" for name in known()]
    return "\n".join(
        [
            "# Recipe keys",
            "",
            "Every key is also a flag: `batch_size` in a file is `--batch-size` on the command line.",
            "This page is made from the recipe's definition, by `python docs/hooks.py`.",
            "",
            "| key | meaning, *values and default* |",
            "|---|---|",
            *rows,
            "",
            "## The shipped recipes",
            "",
            *recipes,
        ]
    )


def _values(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_values(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "items" in schema:
        return f"list of {_values(schema['items'])}"
    kind = {"null": "none", "string": "text", "integer": "whole number"}.get(schema["type"], schema["type"])
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    bounds = [f"{word} {schema[key]:.7g}".replace("e+", "e") for key, word in words.items() if key in schema]
    return " ".join([kind, " and ".join(bounds)]).rstrip()


def _default(schema: dict[str, Any]) -> str:
    if "default" not in schema:
        return "must be given"
    value = schema["default"]
    return f"default {'none' if value is None or value == [] else f'`{json.dumps(value).strip(chr(34))}`'}"


def commands_page() -> str:
    """The help of every command."""
    train = [
        [f"hvdtrain.{framework}", *recipe]
        for framework, recipe in (("torch", []), ("torch", ["digits"]), ("tensorflow", []), ("lightning", []))
    ]
    tools = [["hvdtrain"], *(["hvdtrain", name] for name in COMMANDS)]
    benchmarks = [["hvdtrain", "bench", name] for name in BENCHMARKS]
    commands = [*train, *tools, *benchmarks]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        helps = list(pool.map(_help, commands))
    return "\n".join(
        [
            "# Commands",
            "",
            "This page is what the commands print with `--help`, taken by `python docs/hooks.py`.",
            "",
            *(f"## {' '.join(words)}\n\n```text\n{text}\n```\n" for words, text in zip(commands, helps, strict=True)),
        ]
    )


def _help(words: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words, "--help"],
        env={**os.environ, "COLUMNS": WIDTH, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise PluginError(f"{' '.join(words)} --help ended with {done.returncode}: {done.stderr}")
    return done.stdout.rstrip()


if __name__ == "__main__":
    for page, text in reference().items():
        page.write_text(text, encoding="utf-8")
