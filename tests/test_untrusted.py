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
    assert untrusted.redacted("\0".join(words)).split("\0") == [
        "--password",
        "***",
        "--key=***",
        "--secret",
        "***",
        "x",
    ]


def test_long_words_take_no_time():
    """Each is looked at once: a hundred times as long, a hundred times the time, and not ten thousand."""
    for text in ("key" * 300_000, "-" * 10**6, "--" + "a" * 10**6, "://" * 300_000, "key " * 200_000, "-\0" * 400_000):
        untrusted.redacted(text)


def test_secrets_among_values_are_hidden():
    given = {"model_args": {"HF_Token": "abc", "depth": 3, "max_tokens": 512}, "key": ["x"], "secret": "abc", "lr": 0.1}
    given |= {"password": 1234, "layers": [{"api_key": "abc"}], "num_keys": 8}
    shown = {"model_args": {"HF_Token": "***", "depth": 3, "max_tokens": 512}, "key": "***", "secret": "***", "lr": 0.1}
    shown |= {"password": "***", "layers": [{"api_key": "***"}], "num_keys": 8}
    assert untrusted.without_secrets(given) == shown


PLANTED = "open('{}/imported', 'a').write(__name__ + ' ')\n"


@pytest.fixture
def planted(tmp_path):
    """A folder with modules of the names of others, which leave a word when they are imported."""
    for name in ("runpy", "hvdtrain", "pkgutil", "jinja2", "rich", "numpy", "yaml", "pydantic", "json"):
        (tmp_path / f"{name}.py").write_text(PLANTED.format(tmp_path))
    return tmp_path


def test_a_program_of_ours_imports_nothing_of_the_current_folder(planted):
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = untrusted.program("hvdtrain", "plan", "linear")
    done = subprocess.run(command, cwd=planted, env=environ, capture_output=True, text=True, check=False, timeout=250)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("recipe")
    assert not (planted / "imported").exists()


NAMES = ("jinja2", "rich", "numpy", "yaml", "pydantic", "wandb", "cupy", "sitecustomize_", "torch")


@pytest.mark.parametrize(
    "words", ["-m hvdtrain report run --json", "-u -m hvdtrain watch run", "-mhvdtrain plan linear"]
)
def test_m_imports_no_library_of_the_current_folder(tmp_path, words):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(PLANTED.format(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/status.json").write_text(json.dumps({"state": "finished", "time": 1.7e9}))
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *words.split()],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()


def test_m_finds_a_recipes_own_module_in_the_current_folder(tmp_path):
    (tmp_path / "own_model.py").write_text("import own_layer\n\ndef net(**_):\n    return own_layer.layer\n")
    (tmp_path / "own_layer.py").write_text("layer = None\n")
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, "-m", "hvdtrain.torch", "digits", "--model", "own_model:absent"]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=250)
    assert f"{tmp_path}/own_model.py has no 'absent'" in done.stderr


def test_another_program_keeps_its_path(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text("import hvdtrain\n")
    (tmp_path / "mine/__main__.py").write_text("import sys; print(sys.path[0])\n")
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, "-m", "mine", "-m", "hvdtrain"]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=250)
    assert done.stdout == f"{tmp_path}\n", done.stderr
