"""Keys that are neither numbers nor texts: mappings, as flags and in YAML, and the interval between checkpoints."""

import contextlib
import datetime
import sys
import threading
from typing import Any

import numpy as np
import pydantic
import pytest
from pydantic import BaseModel, Field, ValidationError
from refusals import refusal

from hvdtrain.core import flags, recipe, wording
from hvdtrain.core.values import Arguments
from hvdtrain.errors import RecipeError
from hvdtrain.record.writer import daly


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Flags of a command."""

    model_args: Arguments = Field({}, description="passed on")
    epochs: int = Field(1, description="passes")


GIVEN = {
    "nothing": ("", {}),
    "numbers": ("--model-args weight_decay=5e-5 depth=3", {"weight_decay": 5e-5, "depth": 3}),
    "a list": ("--model-args betas=[0.9,0.99]", {"betas": [0.9, 0.99]}),
    "a mapping": ("--model-args head={classes:10,name:a}", {"head": {"classes:10": None, "name:a": None}}),
    "JSON": ('--model-args head={"classes":10}', {"head": {"classes": 10}}),
    "switches and nothing": ("--model-args a=true b=null c=", {"a": True, "b": None, "c": None}),
    "text": ("--model-args root=/data/x=1 mean='1'", {"root": "/data/x=1", "mean": "1"}),
    "commas": (
        """--model-args a=x,y b="x,c=2" c='1,' d=[a,{b=1:2}] e={"x":"y,z=1"}""",
        {"a": "x,y", "b": "x,c=2", "c": "1,", "d": ["a", {"b=1:2": None}], "e": {"x": "y,z=1"}},
    ),
    "underscore, and another flag": ("--model_args a=1 --epochs 3", {"a": 1}),
    "behind an equals sign": ("--model-args=a=1", {"a": 1}),
    "empty": ("--model-args {}", {}),
}


@pytest.mark.parametrize(("argv", "expected"), GIVEN.values(), ids=GIVEN)
def test_flags_of_a_mapping(argv, expected):
    assert flags.parse(Options, "prog", argv.split()).model_args == expected


def test_a_flag_replaces_the_whole_mapping():
    fields = flags.fields_of(Options)
    assert flags.given(fields, "prog", ["--model-args", "b=2"], {"model_args": {"a": 1}}) == {"model_args": {"b": 2}}
    assert flags.given(fields, "prog", ["--epochs", "2"], {"model_args": {"a": 1}}) == {"epochs": 2}


def test_what_another_thread_prints_meanwhile_is_not_lost(capsys):
    ended, printed = threading.Event(), 0

    def prints():
        nonlocal printed
        while not ended.is_set():
            print("a rank is gone", file=sys.stderr)
            printed += 1

    thread = threading.Thread(target=prints)
    thread.start()
    for argv in [[], ["--model-args"], ["--no-such-flag"]] * 30:
        with contextlib.suppress(RecipeError):
            flags.parse(Options, "prog", argv)
    ended.set()
    thread.join()
    assert capsys.readouterr() == ("", "a rank is gone\n" * printed)


def test_the_help_shows_the_arguments(capsys):
    with pytest.raises(SystemExit):
        flags.given(flags.fields_of(Options), "prog", ["--help"], {"model_args": {"betas": [0.9, 0.99]}})
    shown = " ".join(capsys.readouterr().out.split())
    assert "--model-args [KEY=VALUE ...]" in shown
    assert "betas=[0.9, 0.99]" in shown


TOGETHER = (
    "--model-args must be KEY=VALUE ..., separated by spaces, got '{}'; a text that holds such a comma needs "
    "quotes: '{}=\"...\"'."
)
REFUSED_FLAGS = {
    "no value": ("--model-args", "--model-args needs a value; --help lists the flags."),
    "no equals sign": ("--model-args a", "--model-args must be KEY=VALUE ..., got 'a'; {} leaves it empty."),
    "no key": ("--model-args =1", "--model-args must be KEY=VALUE ..., got '=1'; {} leaves it empty."),
    "commas": ("--model-args a=1,b=2", TOGETHER.format("a=1,b=2", "a")),
    "commas of texts": ("--model-args path=x,dtype=float", TOGETHER.format("path=x,dtype=float", "path")),
    "commas and spaces": ("--model-args a=1, b=2", TOGETHER.format("a=1,", "a")),
    "twice": ("--model-args a=1 a=2", "--model-args has 'a' twice; remove one of them."),
    "no YAML": (
        "--model-args a=[1",
        "--model-args a line 1 is not YAML: expected ',' or ']', but got '<stream end>'.",
    ),
    "a date": (
        "--model-args a=2024-01-01",
        "--model-args must hold numbers, texts, true, false, null, lists and mappings, "
        "got {'a': datetime.date(2024, 1, 1)}; --help lists the flags.",
    ),
    "an object": (
        "--model-args a=!!python/name:os.system",
        "--model-args a line 1 is not YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/name:os.system'.",
    ),
}


@pytest.mark.parametrize(("argv", "message"), REFUSED_FLAGS.values(), ids=REFUSED_FLAGS)
def test_refused_flags(argv, message):
    assert refusal(RecipeError, flags.parse, Options, "prog", argv.split()) == message


class Model(BaseModel):
    key: Arguments = {}


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


REFUSED = {
    "no mapping": ([1], "map names to values"),
    "a number as name": ({"a": {1: 2}}, "map names to values"),
    "a date": ({"a": datetime.date(2024, 1, 1)}, "hold numbers, texts, true, false, null, lists and mappings"),
    "bytes": ({"a": [b"x"]}, "hold numbers, texts, true, false, null, lists and mappings"),
    "infinite": ({"a": float("inf")}, "hold numbers between -2^63 and 2^63"),
    "no number": ({"a": float("nan")}, "hold numbers between -2^63 and 2^63"),
    "too large": ({"a": 2**63}, "hold numbers between -2^63 and 2^63"),
    "too deep": ({"a": nested(4)}, "go at most 5 levels deep"),
    "too many": ({"a": [0] * 1000}, "hold at most 1000 values"),
    "a bell": ({"a": "\a"}, "hold printable texts of at most 4096 characters"),
    "an escape in a name": ({"\x1b": 1}, "hold printable texts of at most 4096 characters"),
    "too long": ({"a": "x" * 4097}, "hold printable texts of at most 4096 characters"),
}


@pytest.mark.parametrize(("value", "rule"), REFUSED.values(), ids=REFUSED)
def test_refused_values(value, rule):
    with pytest.raises(ValidationError) as caught:
        Model(key=value)
    assert wording.rule(caught.value.errors()[0]) == rule


def test_the_bounds_themselves_are_allowed():
    most = {"a": [0] * 992, "b": nested(3)}
    assert Model(key=most).key == most


HOUR = 3600.0


def test_the_formula():
    # Young's 7200 s, times 1 + sqrt(1/576)/3 + (1/576)/9, less the cost
    assert daly(300, 24 * HOUR) == pytest.approx(7200 * (1 + 1 / 72 + 1 / 5184) - 300)
    assert daly(2 * HOUR, HOUR) == daly(9 * HOUR, HOUR) == HOUR
    assert daly(0, HOUR) == 0


@pytest.mark.parametrize("cost", [0.01, 1, 60, 900])
@pytest.mark.parametrize("mtbf", [HOUR, 24 * HOUR, 1000 * HOUR])
def test_it_loses_least(cost, mtbf):
    """Of the expected time of a run in which failures come at random, also while a checkpoint is written:
    MTBF x (exp((interval + cost) / MTBF) - 1) / interval, for each second of training."""
    intervals = np.geomspace(cost / 10 + 1e-3, 20 * mtbf, 200_000)
    with np.errstate(over="ignore"):
        lost = mtbf * np.expm1((intervals + cost) / mtbf) / intervals
    ours = daly(cost, mtbf)
    assert mtbf * np.expm1((ours + cost) / mtbf) / ours == pytest.approx(lost.min(), rel=1e-3)
    assert ours == pytest.approx(intervals[lost.argmin()], rel=0.05)


def test_refused_intervals():
    for value in ("often", 0):
        assert refusal(RecipeError, recipe.load, "linear", {"checkpoint_every_steps": value}) == (
            f"checkpoint_every_steps must be a whole number from 1 to 10^9, or auto, got {value!r}."
        )
    assert refusal(RecipeError, recipe.load, "linear", {"checkpoint_every_steps": "auto"}) == (
        "checkpoint_every_steps auto needs mtbf_hours, the mean hours between failures of the whole job: those of one "
        "node divided by the job's nodes."
    )
    message = refusal(RecipeError, recipe.load, "linear", {"checkpoint_every_steps": "auto", "mtbf_hours": 0.0})
    assert message == "mtbf_hours must be greater than 0, got 0.0."


def test_both_are_keys_that_load_again(tmp_path):
    loaded = recipe.load("linear", {"checkpoint_every_steps": "auto", "mtbf_hours": 12.5})
    (tmp_path / "auto.yaml").write_text(recipe.dump(loaded))
    again = recipe.load(str(tmp_path / "auto.yaml"))
    assert (again.checkpoint_every_steps, again.mtbf_hours) == ("auto", 12.5)
