"""Horovod's own optimizer trains as plain PyTorch does on the batch of both ranks, with every optimizer of PyTorch."""

import pytest
from marks import marked, rows
from paths import SUPPORT
from ranks import NEEDS, needs_our_horovod, of_ranks

VARIANTS = {  # by name: options with which the optimizers are tried, and some that are then tried
    "fused": (["fused"], {"Muon", "LBFGS", "SparseAdam", "SGD fused"}),
    "all": (
        ["amsgrad", "capturable", "centered", "foreach", "line_search_fn", "maximize", "weight_decay"],
        {"LBFGS line_search_fn", "AdamW weight_decay"},
    ),
}


@NEEDS["torch"]
@pytest.mark.parametrize(("device", "waited"), [("cpu", 1.5), ("cuda", None)])
def test_with_a_gpu_it_is_not_known_how_long_a_rank_waits(device, waited, monkeypatch):
    import torch

    from hvdtrain.torch.engines.horovod import HorovodEngine, _Waited

    engine = object.__new__(HorovodEngine)
    engine.device, engine._adasum = torch.device(device), False
    monkeypatch.setattr(_Waited, "seconds", 1.5)
    assert engine.waited == waited


@pytest.mark.launched
@NEEDS["torch"]
@needs_our_horovod
@pytest.mark.parametrize(("variants", "tried"), marked(rows(VARIANTS), slow={"all"}))
def test_it_trains_as_plain_pytorch_does(tmp_path, variants, tried):
    program = SUPPORT / "horovod_torch.py"
    given = {"variants": variants}
    for wrong in of_ranks("torch", "gloo", 2, tmp_path, given, program, HOROVOD_CYCLE_TIME="0.1"):
        assert wrong.pop("clipped too early").startswith("Gradients were changed after loss.backward() and before")
        assert tried < wrong.keys()
        assert not {name: why for name, why in wrong.items() if why}
