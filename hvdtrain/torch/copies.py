"""Copies of tensors on the host, whose memory is taken once."""

from collections.abc import Mapping

import numpy as np
import torch


class Copies:
    """Memory for copies of tensors, which each call fills anew.

    Fresh memory would be twenty times as slow as the copy itself: the kernel makes each page of it when it is touched.
    """

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """The tensors as they are now, by name, until the next call."""
        with torch.no_grad():
            self._held = {name: self._copied(name, tensor) for name, tensor in tensors.items()}
        return {name: held.numpy() for name, held in self._held.items()}

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        held = self._held.get(name)
        if held is None or held.dtype != tensor.dtype or held.shape != tensor.shape:
            held = torch.empty_like(tensor, device="cpu", requires_grad=False)  # in the same memory layout
        return held.copy_(tensor)
