"""What others wrote: no secrets shown, nothing of the current folder imported, no text of theirs markup."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import report_folders
from markdown_it import MarkdownIt
from marks import marked, rows
from paths import REPOSITORY

from hvdtrain import cli, untrusted
from labtools import launched

WORDS = {  # as given: as shown
    "--api-key abc": "--api-key ***",
    "--api-key=abc": "--api-key=***",
    "--hf_token abc --epochs 3": "--hf_token *** --epochs 3",
    "HF_TOKEN=abc python": "HF_TOKEN=*** python",
    "AWS_SECRET_ACCESS_KEY=abc": "AWS_SECRET_ACCESS_KEY=***",
    "--model-args apikey=abc classes=5": "--model-args apikey=*** classes=5",
    "-password abc": "-password ***",
    "--use-key --epochs 3": "--use-key --epochs 3",
    "--url https://me:abc@host/x": "--url https://me:***",
    "--tokenizer gpt2 --max-tokens 512 --tokens=9": "--tokenizer gpt2 --max-tokens 512 --tokens=9",
    "--tokens abc": "--tokens ***",
    '{"api_key": abc}': '{"api_key": ***',
    "python train.py keys turkey": "python train.py keys turkey",
}


@pytest.mark.parametrize(("given", "shown"), WORDS.items())
def test_secrets_of_a_command_are_hidden(given, shown):
    words = ["\0".join(given.split(" "))] if "{" not in given else [given]
    assert untrusted.redacted(words[0]).replace("\0", " ") == shown
    assert untrusted.redacted(words[0]).count("\0") == shown.count(" ") * ("{" not in given)


def test_a_secret_is_hidden_to_its_words_end():
    words = ["--password", "two words", "--key=-----BEGIN KEY-----\nabc\n", "--secret", "-----BEGIN KEY-----\nabc", "x"]
    shown = ["--password", "***", "--key=***", "--secret", "***", "x"]
    assert untrusted.redacted("\0".join(words)).split("\0") == shown


def test_long_words_take_no_time():
    """Each is looked at once: a hundred times as long, a hundred times the time, and not ten thousand."""
    for text in ("key" * 60_000, "-" * 200_000, "--" + "a" * 200_000, "://" * 60_000, "key " * 40_000, "-\0" * 80_000):
        untrusted.redacted(text)


def test_secrets_among_values_are_hidden():
    given = {"model_args": {"HF_Token": "abc", "depth": 3, "max_tokens": 512}, "key": ["x"], "secret": "abc", "lr": 0.1}
    given |= {"password": 1234, "layers": [{"api_key": "abc"}], "num_keys": 8}
    shown = {"model_args": {"HF_Token": "***", "depth": 3, "max_tokens": 512}, "key": "***", "secret": "***", "lr": 0.1}
    shown |= {"password": "***", "layers": [{"api_key": "***"}], "num_keys": 8}
    assert untrusted.without_secrets(given) == shown


PLANTED = "open('{}/imported', 'a').write(__name__ + ' ')\n"
NAMES = ("jinja2", "rich", "numpy", "yaml", "pydantic", "wandb", "cupy", "sitecustomize_", "torch")
OF_PYTHON = ("runpy", "hvdtrain", "pkgutil", "json")


def run(folder, words):
    """The finished program, started in that folder."""
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=250)


def m(words):
    return [sys.executable, *words.split()]


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (untrusted.program("hvdtrain", "plan", "linear"), (*NAMES, *OF_PYTHON)),
        (m("-m hvdtrain report run --json"), NAMES),
        (m("-u -mhvdtrain watch run"), NAMES),
    ],
    ids=["program", "report", "watch"],
)
def test_nothing_is_imported_from_the_current_folder(tmp_path, command, names):
    for name in names:
        (tmp_path / f"{name}.py").write_text(PLANTED.format(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/status.json").write_text(json.dumps({"state": "finished", "time": 1.7e9}))
    done = run(tmp_path, command)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()


def test_m_finds_a_recipes_own_module_in_the_current_folder(tmp_path):
    (tmp_path / "own_model.py").write_text("import own_layer\n\ndef net(**_):\n    return own_layer.layer\n")
    (tmp_path / "own_layer.py").write_text("layer = None\n")
    done = run(tmp_path, m("-m hvdtrain plan digits --model own_model:absent"))
    assert f"{tmp_path}/own_model.py has no 'absent'" in done.stderr


def test_another_program_keeps_its_path(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text("import hvdtrain\n")
    (tmp_path / "mine/__main__.py").write_text("import sys; print(sys.path[0])\n")
    done = run(tmp_path, m("-m mine -m hvdtrain"))
    assert done.stdout == f"{tmp_path}\n", done.stderr


TEXTS = {  # what somebody writes into a run folder
    "backticks": "a```<img src=x onerror=alert(1)>",
    "lines": "|\n\n<img src=x onerror=alert(1)>\n\n# x\n| a |",
    "quotes": "\"'><svg onload=alert(1)>`",
    "links": "[x](javascript:alert(1)) ![y](//evil.example/y) <http://evil.example> http://evil.example",
    "terminal": "[bold]x[/bold] \x1b[2J\x1b]0;x\x07\u202e __x__ ~~y~~",
    "braces": "{{ 7 * 7 }} </title></script><script>alert(1)</script> \\`",
}
CHOOSE = {"kind", "event", "state", "framework", "phase", "launcher"}
"""Keys whose values decide what is shown of the others."""


def planted(value, text, key=""):
    """The value of a file with that text as each text in it."""
    if isinstance(value, dict):
        return {name: planted(each, text, name) for name, each in value.items()} | {text: text}
    if isinstance(value, list):
        return [planted(each, text, key) for each in value]
    return text if isinstance(value, str) and key not in CHOOSE else value


def foreign_run(folder, text):
    run = folder / "".join(letter for letter in text if letter.isprintable() and letter != "/")
    report_folders.resumed(run)
    for path in run.glob("*.json*"):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        path.write_text("".join(f"{json.dumps(planted(json.loads(line), text))}\n" for line in lines))
    recipe = (run / "recipe.yaml").read_text()
    args = json.dumps({text: text})
    (run / "recipe.yaml").write_text(re.sub("(?m)^  model_args:.*$", lambda _: f"  model_args: {args}", recipe))
    (run / "job.sh").write_text(f"#!/bin/bash\n#SBATCH --comment={text}\n")
    return run


class Tags(HTMLParser):
    """Which elements a browser makes of a page, with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def check_html(text):
    found = Tags(text).found
    assert len(found) > 50
    for tag, attributes in found:
        assert tag not in {"script", "base", "iframe"}
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("src", "data:").startswith("data:"), attributes
        assert attributes.get("href", "#").startswith("#"), attributes


def check_markdown(text):
    shown = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text)
    ours = {"h1", "h2", "p", "strong", "ul", "li", "code", "table", "thead", "tbody", "tr", "th", "td"}
    assert {tag for tag, _ in Tags(shown).found} <= ours, shown
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert not re.search(r"https?://|(?<!\\)~", re.sub("`.*?`", "", text, flags=re.DOTALL))
    assert {line.count("|") - line.count("\\|") for line in text.splitlines() if line.startswith("|")} <= {3, 4}


def check_json(text):
    assert json.loads(text)["runs"]
    assert text.isascii()


def check_terminal(text):
    assert text
    assert all(letter.isprintable() or letter == "\n" for letter in text)


def check_notebook(text):
    (frame,) = [attributes for tag, attributes in Tags(text).found if tag != "div"]
    assert (frame["sandbox"], len(Tags(text).found)) == ("", 2)
    check_html(frame["srcdoc"])


FORMATS = {  # words of the command, what is looked at
    "HTML": (["report", "--output", "report.html"], check_html),
    "Markdown": (["report", "--format", "md"], check_markdown),
    "JSON": (["report", "--json"], check_json),
    "terminal": (["watch"], check_terminal),
    "YAML": (["convert", "--to", "tensorflow"], check_terminal),
    "pt": (["export", "--to", "pt"], check_terminal),
    "notebook": (["report", "--output", "report.html"], check_notebook),
}


@pytest.mark.parametrize("text", marked(rows(TEXTS), slow={"quotes", "links", "terminal", "braces"}))
def test_texts_of_a_foreign_run_are_texts_in_every_format(tmp_path, monkeypatch, capsys, text):
    run = foreign_run(tmp_path / "runs", text)
    monkeypatch.chdir(tmp_path)
    for name, (words, check) in FORMATS.items():
        cli.main([words[0], str(run), *words[1:]])
        printed = "".join(capsys.readouterr())
        if "--output" in words:
            printed = (tmp_path / "report.html").read_text()
        check(launched.page("report.html").data if name == "notebook" else printed)
