"""torch.compile where it pays: the network in training, and on one GPU the whole update as a CUDA graph."""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hvdtrain.errors import EngineUnavailable
from hvdtrain.torch.resnet import ResNet

WARM_STEPS = 3
"""Updates before the capture: cuDNN and Triton time their kernels in these, which a capture forbids."""

Tensors = tuple[torch.Tensor, ...]
Work = Callable[[], list[Any]]
Recorder = Callable[[Work], tuple[Callable[[], object], list[Any]]]


def check_compiler(device: torch.device) -> None:
    """Raises EngineUnavailable where what torch.compile needs for the device is missing."""
    on_gpu = device.type == "cuda"
    if on_gpu and not importlib.util.find_spec("triton"):
        raise EngineUnavailable("compile needs Triton for a GPU; pip install triton, or drop compile.")
    name, usual = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++",))
    wanted = [os.environ[name]] if name in os.environ else usual
    if not any(map(shutil.which, wanted)):
        raise EngineUnavailable(
            f"compile needs a compiler, and {wanted[0]} is not in PATH; apt-get install g++, or set {name}, or drop "
            "compile."
        )


def compile_training(model: nn.Module, in_blocks: bool) -> None:
    """Compiles the model's forward and backward in training mode; evaluation stays as it is.

    A compiled backward hands over all its gradients at its end. `in_blocks`, for an engine that sends gradients while
    backward runs, compiles a ResNet's blocks one by one where most of the parameters are.
    """
    for module in _blocks(model) if in_blocks else [model]:
        module.forward = _in_training(module)


def _blocks(model: Any) -> Iterable[nn.Module]:
    if not isinstance(model, ResNet):
        return [model]
    return [model.layer1, model.layer2, *model.layer3, *model.layer4]


def _in_training(module: nn.Module) -> Callable[..., Any]:
    plain = module.forward
    compiled = torch.compile(plain, dynamic=False)

    def forward(*x: Any, **named: Any) -> Any:
        return (compiled if module.training else plain)(*x, **named)

    return forward


def record_cuda_graph(work: Work) -> tuple[Callable[[], object], list[Any]]:
    """The work's kernels as a CUDA graph to replay, and the tensors that a replay leaves its results in."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph.replay, results


class Captured:
    """An update of static shapes whose kernels are recorded once and then started together.

    `update` maps micro-batches [(x, y), …] to their results. The first WARM_STEPS updates are ordinary ones. A call
    overwrites what the one before returned.
    """

    def __init__(
        self,
        update: Callable[[list[Any]], list[Any]],
        device: torch.device,
        record: Recorder = record_cuda_graph,
    ) -> None:
        self._update, self._record, self._warm = update, record, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # The same tensors from the first step on: a capture must run nothing that would be compiled anew.
        self._inputs: list[Tensors] = []
        self._results: list[Any] = []
        self._replay: Callable[[], object] | None = None

    def __call__(self, micro_batches: list[Any]) -> list[Any]:
        self._inputs = self._inputs or [tuple(tensor.clone() for tensor in each) for each in micro_batches]
        for own, given in zip(self._inputs, micro_batches, strict=True):
            for kept, new in zip(own, given, strict=True):
                kept.copy_(new)
        if self._warm < WARM_STEPS:
            self._warm += 1
            return self._beside()
        if not self._replay:
            self._replay, self._results = self._record(lambda: self._update(self._inputs))
        self._replay()
        return self._results

    def _beside(self) -> list[Any]:
        # Off the default stream: autograd comes back to the stream that it first ran on, and no capture may wait for
        # the default one (PyTorch's CUDA semantics, whole-network capture).
        if not self._stream:
            return self._update(self._inputs)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = self._update(self._inputs)
        current.wait_stream(self._stream)
        return results
