"""Each engine's verbs, over real ranks and both controllers."""

import pytest
from ranks import CONTROLLERS, needs_horovod, needs_torch, program

pytestmark = needs_torch


def expected(size):
    total = size * (size + 1) / 2
    return {
        "sum of float64": [total, 0.125 * (total - size)],
        "sum of float32": [total],
        "sum of int64": [2**62 + 1 - int(total - size), 2**53 * int(total - size) + size],
        "sum of a table": [[total] * 3] * 2,
        "sum of another shape": [size * i for i in range(7)],
        "gathered": [[rank, 10.0 * rank] for rank in range(size)],
        "gathered float32": [[rank + 0.5] * 3 for rank in range(size)],
        "facts": {"step": 3, "best": None, "text": "é"},
        "no facts": None,
        "broadcast": {"scalar": 7, "counts": [2**53 + 1] * 3, "weights": [[0.5] * 2] * 2, "doubles": [0.1] * 2},
        # Averaged once: (size + 1) / 2, then ten times that.
        "updates": [[total / size, -total / size], [10 * total / size, -11 * total / size]],
    }


def check(told, size):
    for rank, verbs in enumerate(told):
        assert verbs.pop("place") == [rank, size]
        assert verbs == expected(size)


@needs_horovod
@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("size", [1, 2, 4], ids="{} ranks".format)
def test_horovods_verbs_are_arithmetic(controller, size, tmp_path):
    check(program(controller, size, "verbs", tmp_path), size)


def test_one_process_has_the_same_verbs():
    import torch
    from torch_programs import told_by

    from hvdtrain.torch.engines.local import LocalEngine

    check([told_by(LocalEngine(torch.device("cpu")))], 1)
