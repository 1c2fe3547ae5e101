"""Texts as a forger or a dying disk leaves them, for the readers of JSON."""

import json
import os
import random
from collections.abc import Iterator
from typing import Any

COUNT, SEED = (int(os.environ.get(name, usual)) for name, usual in (("FUZZ_COUNT", "1000"), ("FUZZ_SEED", "16")))
VALUES = [
    *("null", "true", "-1", "0.5", "1e400", "NaN", "-Infinity", '"x"', "[]", "{}", "[[1]]", '{"": 0}', "-0.0", "1E5"),
    *('"\\ud800"', '"\\u001b[2J"', '"\\u0000"', '"' + "x" * 5000 + '"', str(2**62), str(-(2**63)), str(10**400)),
    *("9" * 5000, "-" + "9" * 50, "1" * 400 + ".5", "[" * 30 + "]" * 30, "[" * 900 + "]" * 900),
    *("[" * 100_000, '{"a":' * 100_000, '{"a":' * 19 + "1" + "}" * 19, "[" + "0," * 10_000 + "0]"),
]


def texts(good: dict[str, Any], count: int = COUNT, seed: int = SEED) -> Iterator[str]:
    """`count` texts: `good` with an odd value somewhere, without a key, with changed or missing bytes."""
    draw = random.Random(seed)
    changes = (_odd_value, _odd_value, _without_a_key, _other_key, _one_more_key, _changed_letter, _cut, _alone)
    for _ in range(count):
        yield draw.choice(changes)(json.loads(json.dumps(good)), draw)


def _inner(value: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], str]:
    """One of its mappings and a key there."""
    key = draw.choice(list(value))
    return (
        _inner(value[key], draw)
        if isinstance(value[key], dict) and value[key] and draw.random() < 0.7
        else (value, key)
    )


def _odd_value(good: dict[str, Any], draw: random.Random) -> str:
    mapping, key = _inner(good, draw)
    mapping[key] = "@here@"
    return json.dumps(good).replace('"@here@"', draw.choice(VALUES))


def _without_a_key(good: dict[str, Any], draw: random.Random) -> str:
    mapping, key = _inner(good, draw)
    del mapping[key]
    return json.dumps(good)


def _other_key(good: dict[str, Any], draw: random.Random) -> str:
    mapping, key = _inner(good, draw)
    mapping[draw.choice(["", key.upper(), "\ud800", "\x1b", "x" * 5000, "step"])] = mapping.pop(key)
    return json.dumps(good)


def _one_more_key(good: dict[str, Any], draw: random.Random) -> str:
    mapping, key = _inner(good, draw)
    mapping[f"{key}_x"] = draw.choice([1, "x", None, [], {}])
    return json.dumps(good)


def _changed_letter(good: dict[str, Any], draw: random.Random) -> str:
    text = json.dumps(good)
    place = draw.randrange(len(text))
    return text[:place] + chr(draw.choice([0, 10, 34, 44, 45, 48, 57, 91, 93, 123, 125, 233])) + text[place + 1 :]


def _cut(good: dict[str, Any], draw: random.Random) -> str:
    text = json.dumps(good)
    return text[: draw.randrange(len(text))]


def _alone(good: dict[str, Any], draw: random.Random) -> str:
    return draw.choice(VALUES)
