"""Copies of tensors: equal, the tensors' own no longer, in memory that is taken once."""

import numpy as np
import torch

from hvdtrain.torch.state import Copies


def tensors() -> dict[str, torch.Tensor]:
    images = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    return {
        "weight": torch.nn.Parameter(torch.randn(3, 2)),
        "float64": torch.randn(4, dtype=torch.float64),
        "step": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "channels last": images.to(memory_format=torch.channels_last),
        "a part": images[:, 1],
        "expanded": torch.ones(1).expand(5),
    }


def test_they_are_equal_and_stay_when_the_tensors_change():
    copies, live = Copies(), tensors()
    wanted = {name: tensor.detach().numpy().copy() for name, tensor in live.items()}
    found = copies.of(live)
    with torch.no_grad():
        for name in ("weight", "float64", "step", "a part"):
            live[name].zero_()
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        assert array.dtype == wanted[name].dtype, name
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)
    assert found["channels last"].strides == live["channels last"].numpy().strides  # the copy moves no number


def test_the_memory_is_taken_once():
    copies, live = Copies(), tensors()
    first = {name: array.ctypes.data for name, array in copies.of(live).items()}
    again = {name: array.ctypes.data for name, array in copies.of(live).items()}
    assert again == first
    del live["step"]
    live["float64"] = torch.ones(9)
    found = copies.of(live)
    assert found.keys() == live.keys()
    np.testing.assert_array_equal(found["float64"], np.ones(9, np.float32))
