"""Callbacks of a program's own, of 37 kinds of state, killed at a step and resumed: as undisturbed, or named."""

import json

import pytest
import warm
from event_files import scalars
from paths import SUPPORT
from ranks import needs_horovod, needs_lightning, needs_tensorflow, run

pytestmark = [pytest.mark.launched, needs_horovod, pytest.mark.timeout(400)]

NAMED = {
    "Timed": "no checkpoint holds started of Timed, it is a time of this process: it begins anew",
    "Made": "no checkpoint holds judge of Made, it holds a function: it begins anew",
}


def trained(framework, tmp_path, step):
    kind = {"keras": "tensorflow"}.get(framework, framework)
    return run("alone", 1, warm.command(kind, SUPPORT / "kept_callbacks.py", framework, step), cwd=tmp_path)


@pytest.mark.parametrize(("framework", "step"), [
    pytest.param("keras", 17, marks=[needs_tensorflow, pytest.mark.slow]),
    pytest.param("keras", 10, marks=[needs_tensorflow, pytest.mark.slow]),
    pytest.param("lightning", 13, marks=[needs_lightning, pytest.mark.slow]),
    pytest.param("lightning", 17, marks=[needs_lightning, pytest.mark.only_ci]),
])  # fmt: skip
def test_killed_they_count_on(tmp_path, framework, step):
    assert trained(framework, tmp_path, step).code != 0
    ended = trained(framework, tmp_path, -1).good()
    left, whole = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("left", "whole"))
    assert len(whole) == 37
    for name in whole.keys() - NAMED.keys():
        assert left[name] == whole[name], name
    for line in NAMED.values():
        assert ended.out.count(line) == 2, ended.out
    if framework == "keras":
        for suffix in (".csv", ".jsonl"):
            found = [(tmp_path / f"{name}{suffix}").read_text() for name in ("left", "whole")]
            assert found[0] == found[1]


@needs_tensorflow
def test_steps_made_again_are_on_a_board_once(tmp_path):
    pytest.importorskip("tensorboard", reason="needs TensorBoard: pip install tensorboard")
    trained("keras", tmp_path, 17)
    trained("keras", tmp_path, -1).good()
    left, whole = (scalars(tmp_path / f"{name}-board" / "train") for name in ("left", "whole"))
    assert whole.pop("keras") and left.pop("keras")  # the model, which each start writes
    assert whole and left == whole
