"""Runs training commands inside the current process, and captures what they print."""

import contextlib
import gc
import io
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.run import main as runs


def captured(adapter: str, argv: list[str], train: Any) -> dict[str, Any]:
    """Exit code, stdout and stderr of a run."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = runs.main(adapter, argv, train)
    gc.collect()  # the run folder is locked as long as its run lives
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def each_seed(became: Callable[[str, int, Path, int], Any], rank: int) -> None:
    """Writes what `became(way, seed, folder, left)` returns for each of the `seeds` in FOLDER/given.json to
    FOLDER/rank-R.json. Its folders are those of the way `begun`, where that has begun what it is to go on with."""
    own = Path(sys.argv[1])
    given = json.loads((own / "given.json").read_text())
    gc.freeze()  # each run ends with a collection, which need not look at what was imported
    results = {}
    for seed in given["seeds"]:
        results[str(seed)] = became(
            given["way"], seed, own / f"{given.get('begun', given['way'])}-{seed}", given["left"]
        )
        (own / f"rank-{rank}.json").write_text(json.dumps(results))


def trained_or_refused(trained: Any, way: str, seed: int, folder: Path, left: int) -> Any:
    """What `trained` returns, or the error that refused it. With `left` the signal `left` stops a first call."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            if left:
                with contextlib.suppress(SystemExit):
                    trained(way, seed, folder, left)
            return trained(way, seed, folder)
    except (SystemExit, Exception) as error:
        return f"{type(error).__name__}: {error}: {said.getvalue().strip().rpartition(os.linesep)[2]}"


def lasts(draw: random.Random, left: int, steps: int) -> tuple[int, ...]:
    """The steps after which a program's starts end: the last one; with `left` 1 a random one before it, too; with 2
    that alone."""
    at = draw.randint(1, steps - 1)
    return ((steps,), (at, steps), (at,))[left]
