"""A whole update as one CUDA graph, with the engine local on one GPU."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.core import optimizers
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.user_code import MODELS, is_path

WARM_STEPS = 3
"""Updates before the capture: in these cuDNN and Triton time their kernels, which they cannot do in a capture."""

Work = Callable[[], list[Any]]
Recorder = Callable[[Work], tuple[Callable[[], object], list[Any]]]
"""Records the work; returns a function that repeats it, and the results that each repetition overwrites."""


def is_one_graph(recipe: Recipe, engine: str, device: torch.device) -> bool:
    """Whether the whole update is one CUDA graph. It is not where there is a loss scale, where phases are measured, or
    with an optimizer whose kernels no graph is known to hold."""
    whole = engine == "local" and device.type == "cuda" and recipe.compile and recipe.optimizer in optimizers.fused()
    has_user_code = recipe.model not in MODELS or is_path(recipe.dataset)  # which a capture may not be able to hold
    is_measured = recipe.profile or recipe.gradient_noise
    return whole and not has_user_code and recipe.precision != "float16" and not is_measured


def record_cuda_graph(work: Work) -> tuple[Callable[[], object], list[Any]]:
    """The work's kernels as a CUDA graph to replay, and the tensors in which a replay leaves its results.

    Random numbers in a replay follow from the seed that the default generator has when it is called: a graph reads
    seed and offset from memory, to which PyTorch copies the generator's before each replay.
    """
    graph = torch.cuda.CUDAGraph()
    # Freeing an older graph breaks a capture: garbage is collected before, and not within.
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        # Not "global", in which a call of another thread, as one that pins memory, breaks the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = work()
    finally:
        if was_enabled:
            gc.enable()
    return graph.replay, results


class GraphedUpdate:
    """An update of static shapes whose kernels are recorded once and then started together.

    `update` maps micro-batches [(x, y), …] to their results. The first WARM_STEPS updates are ordinary ones. Each call
    overwrites the results of the call before.
    """

    def __init__(
        self, update: Callable[[Sequence[Any]], list[Any]], device: torch.device, record: Recorder = record_cuda_graph
    ) -> None:
        self._update, self._record, self._warm = update, record, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # The same tensors from the first step on: for other ones a capture would have to compile anew.
        self._inputs: list[tuple[torch.Tensor, ...]] = []
        self._results: list[Any] = []
        self._replay: Callable[[], object] | None = None

    def __call__(self, micro_batches: Sequence[Any]) -> list[Any]:
        self._inputs = self._inputs or [tuple(tensor.clone() for tensor in each) for each in micro_batches]
        for inputs, given in zip(self._inputs, micro_batches, strict=True):
            for kept, new in zip(inputs, given, strict=True):
                kept.copy_(new)
        if self._warm < WARM_STEPS:
            self._warm += 1
            return self._beside()
        if not self._replay:
            self._replay, self._results = self._record(lambda: self._update(self._inputs))
        self._replay()
        return self._results

    def _beside(self) -> list[Any]:
        # Not on the default stream: autograd returns to the stream on which it first ran, and a capture must not wait
        # for the default one (PyTorch's CUDA semantics, whole-network capture).
        if not self._stream:
            return self._update(self._inputs)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = self._update(self._inputs)
        current.wait_stream(self._stream)
        return results
