"""Horovod's own optimizer trains as plain PyTorch does on the batch of both ranks, with every optimizer of PyTorch."""

import pytest
from paths import SUPPORT
from ranks import NEEDS, needs_our_horovod, of_ranks


@pytest.mark.launched
@NEEDS["torch"]
@needs_our_horovod
def test_it_trains_as_plain_pytorch_does(tmp_path):
    program = SUPPORT / "horovod_torch.py"
    for wrong in of_ranks("torch", "gloo", 2, tmp_path, {}, program, HOROVOD_CYCLE_TIME="0.1"):
        assert wrong.pop("clipped too early").startswith("Gradients were changed after loss.backward() and before")
        assert {"Muon", "LBFGS", "SparseAdam", "SGD fused", "AdamW weight_decay"} < wrong.keys()
        assert not {name: why for name, why in wrong.items() if why}
