"""How the stack of a rank looks that waits for others in a collective, in every library that a rank may wait in."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Place = Literal["collective", "framework", "outside"]
"""Where a thread is: in a collective; in C code of a framework, which may hold one; or elsewhere, where no rank waits
for another."""


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    module: str
    function: str
    file: str = ""
    line: int = 0


ANY = ""
COLLECTIVES = (  # (package or module, function)
    ("horovod", ANY),
    ("torch.distributed", ANY),
    ("hvdtrain.torch.engines.horovod", "wait"),
    ("hvdtrain.torch.engines.ddp", "averaged"),
    ("hvdtrain.ranks.world", "serve_rank_0"),
    ("hvdtrain.ranks.liveness", "wait_for"),
)
FRAMEWORKS = (
    ("torch.autograd.graph", "_engine_run_backward"),  # DistributedDataParallel's backward waits in it for the others
    ("tensorflow.python.eager", ANY),  # a graph holds its collectives
    ("tensorflow.python.framework", ANY),  # a value is waited for
)
READING = (("tensorflow.python.data", ANY),)
CALLED = (("tensorflow.python.ops.script_ops", ANY),)  # a graph, or its input pipeline, runs a function of Python
READERS = (  # of batches: a thread of theirs reads ahead
    ("hvdtrain.datasets", ANY),
    ("hvdtrain.torch.data", ANY),
    ("hvdtrain.torch.examples", ANY),
    ("hvdtrain.tensorflow.data", ANY),
    ("hvdtrain.tensorflow.examples", ANY),
    ("hvdtrain.keras.global_batches", ANY),
    ("keras.src.trainers.data_adapters", ANY),
)
OPERATIONS = (  # of engines and callbacks, each of which matches the same one of other ranks alone
    *(("hvdtrain.torch.engines", name) for name in ("sum", "broadcast", "gather_rows", "allreduce")),
    *(("hvdtrain.tensorflow.engines", name) for name in ("sum", "broadcast")),
    *(("hvdtrain.lightning.strategy", name) for name in ("reduce", "broadcast", "all_gather", "gather", "barrier")),
    ("hvdtrain.lightning.ddp", "reduce"),
    ("hvdtrain.keras.callbacks", "_sum"),
    ("hvdtrain.keras.ranks", "sum_arrays"),
    ("hvdtrain.keras.ranks", "broadcast_variables"),
)
AVERAGING = (("hvdtrain.torch.engines.buckets", ANY), *FRAMEWORKS)
LONG = (
    ("hvdtrain.run.loop", "write_checkpoint"),
    ("hvdtrain.torch.trainer", "validate"),
    ("hvdtrain.tensorflow.trainer", "validate"),
    ("lightning.pytorch.loops.evaluation_loop", ANY),
    ("pytorch_lightning.loops.evaluation_loop", ANY),
)
"""What may take long on one rank while the others wait, and is well."""


def place_of(stack: Iterable[Frame], own: Iterable[bool]) -> Place:
    """Where a thread of this stack is, its innermost frame first. `own`: of each frame, whether it is the user's."""
    place: Place = "outside"
    for frame, is_own in zip(stack, own, strict=True):
        if _is_in(frame, COLLECTIVES):
            return "collective"
        if is_own or _is_in(frame, READING):
            return place if is_own else "outside"
        if _is_in(frame, FRAMEWORKS):
            place = "framework"
    return place


def operation_of(stack: Sequence[Frame]) -> str:
    """Of a thread in a collective: which one it waits in; "gradients", or empty where that cannot be seen."""
    found = next((frame.function for frame in stack if _is_in(frame, OPERATIONS)), "")
    return found or ("gradients" if any(_is_in(frame, AVERAGING) for frame in stack) else "")


def is_long(stack: Iterable[Frame]) -> bool:
    """Whether the thread does what may take long on one rank."""
    return any(_is_in(frame, LONG) for frame in stack)


def reads(stack: Iterable[Frame]) -> bool:
    """Whether the thread reads batches, or waits for those that another one reads."""
    return any(_is_in(frame, READERS) for frame in stack)


def is_called(stack: Iterable[Frame]) -> bool:
    """Whether C code of a framework runs this thread's Python, and waits for it. A pipeline that has read ahead as far
    as it may runs none."""
    return any(_is_in(frame, CALLED) for frame in stack)


def _is_in(frame: Frame, table: Iterable[tuple[str, str]]) -> bool:
    return any(
        (frame.module == module or frame.module.startswith(f"{module}.")) and function in {ANY, frame.function}
        for module, function in table
    )
