"""Horovod's own optimizer trains as plain PyTorch does on the batch of both ranks, with every optimizer of PyTorch."""

import pytest
from paths import SUPPORT
from ranks import NEEDS, needs_our_horovod, of_ranks

SLOW = ("all",)
VARIANTS = {  # by name: options with which the optimizers are tried, and some that are then tried
    "fused": (["fused"], {"Muon", "LBFGS", "SparseAdam", "SGD fused"}),
    "all": (
        ["amsgrad", "capturable", "centered", "foreach", "line_search_fn", "maximize", "weight_decay"],
        {"LBFGS line_search_fn", "AdamW weight_decay"},
    ),
}


@pytest.mark.launched
@NEEDS["torch"]
@needs_our_horovod
@pytest.mark.parametrize(("variants", "tried"), VARIANTS.values(), ids=VARIANTS)
def test_it_trains_as_plain_pytorch_does(tmp_path, variants, tried):
    program = SUPPORT / "horovod_torch.py"
    given = {"variants": variants}
    for wrong in of_ranks("torch", "gloo", 2, tmp_path, given, program, HOROVOD_CYCLE_TIME="0.1"):
        assert wrong.pop("clipped too early").startswith("Gradients were changed after loss.backward() and before")
        assert tried < wrong.keys()
        assert not {name: why for name, why in wrong.items() if why}
