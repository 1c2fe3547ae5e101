"""What others wrote: no secrets shown, nothing of the current folder imported."""

import json
import os
import subprocess
import sys

import pytest
from paths import REPOSITORY

from hvdtrain import untrusted

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
