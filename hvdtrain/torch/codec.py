"""Tensors, and values of any nesting that hold them, as bytes of a checkpoint."""

from collections.abc import Callable, Container
from typing import Any

import numpy as np
import torch

from hvdtrain.core.codec import FUNCTIONS, Codec, Refused
from hvdtrain.errors import OTHER_FOLDER, CheckpointError, LoopError
from hvdtrain.run.attributes import ProgramKinds

CPU = torch.device("cpu")
OPAQUE: tuple[Any, ...] = torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler
OPAQUE += torch.utils.data.Dataset, torch.utils.data.DataLoader


class Live:
    """In the place of a tensor that is the model's own."""


class TorchKinds(ProgramKinds):
    """Tensors of a device come back to one, and keep the memory that a program has for them."""

    functions = FUNCTIONS | {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    classes = torch.Size, torch.device

    def __init__(self, device: torch.device = CPU, others: Container[int] = ()) -> None:
        """`others`: addresses of memory that checkpoints hold elsewhere, into which nothing is written."""
        super().__init__()
        self._device, self.others = device, others

    def is_opaque(self, each: Any) -> bool:
        is_live = isinstance(each, torch.Tensor) and address(each) in self.others
        return is_live or isinstance(each, OPAQUE) or super().is_opaque(each)

    def array_of(self, each: Any) -> tuple[str, np.ndarray] | None:
        if not isinstance(each, torch.Tensor) or each.layout != torch.strided or each.is_quantized or each.is_meta:
            return None
        if address(each) in self.others:
            return None
        flat = each.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        kind = "parameter" if isinstance(each, torch.nn.Parameter) else "tensor"
        shape = ",".join(map(str, each.shape))
        return f"{each.dtype} {kind} {each.requires_grad:d} {each.device.type} {shape}", flat.numpy()

    def of_array(self, word: str, array: np.ndarray) -> Any:
        dtype, kind, learns, device, shape = word.split(" ")
        of = self.functions[dtype]
        flat = torch.from_numpy(array).view(of) if array.size else torch.empty(0, dtype=of)
        found = flat.reshape([*map(int, filter(None, shape.split(",")))])
        found = found if device == "cpu" else found.to(self._device)
        return torch.nn.Parameter(found, learns == "1") if kind == "parameter" else found.requires_grad_(learns == "1")

    def assign(self, now: Any, saved: Any) -> bool:
        if isinstance(saved, Live):
            return True
        are_tensors = isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor)
        is_one = are_tensors and (now.shape, now.dtype) == (saved.shape, saved.dtype)
        if is_one and address(now) not in self.others:
            with torch.no_grad():
                now[...] = saved
            return True
        return False

    def state_of(self, each: Any) -> Any:
        return each.get_state() if isinstance(each, torch.Generator) else super().state_of(each)

    def set_state(self, each: Any, state: Any, fill: Callable[[Any, Any], Any]) -> None:
        if isinstance(each, torch.Generator):
            each.set_state(state.cpu())
        else:
            super().set_state(each, state, fill)


def saved(content: Any) -> np.ndarray:
    """The content as bytes [n]. Raises LoopError where it holds what no checkpoint does."""
    try:
        return Codec(TorchKinds()).encode(content)
    except Refused as error:
        raise LoopError(
            f"a {error} is to be kept, which no checkpoint holds; keep tensors, numbers and texts."
        ) from None


def unkept(content: Any) -> str:
    """The name of a class in the content that no checkpoint holds; empty where it holds all."""
    found = Codec(TorchKinds()).look(content)[1]
    return found.__name__ if found else ""


def restored(content: np.ndarray, device: torch.device = CPU) -> Any:
    """The content of which `saved` has made the bytes, on the host and this device. Raises CheckpointError."""
    try:
        return Codec(TorchKinds(device)).decode(content)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint holds {error}", remedy=OTHER_FOLDER) from None


def filled(now: Any, saved: Any, others: Container[int] = ()) -> Any:
    """`now` with the content of `saved`, changed in place where that is possible, else `saved`; nothing is written into
    memory at the addresses of `others`."""
    return Codec(TorchKinds(others=others)).filler()(now, saved)


def address(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0
