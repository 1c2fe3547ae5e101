"""Runs in this process, for the programs that ranks run."""

import contextlib
import gc
import io
from typing import Any

from hvdtrain.run import main as runs


def captured(adapter: str, argv: list[str], train: Any) -> dict[str, Any]:
    """Exit code, stdout and stderr of a run."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = runs.main(adapter, argv, train)
    gc.collect()  # the run folder is locked as long as its run lives
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}
