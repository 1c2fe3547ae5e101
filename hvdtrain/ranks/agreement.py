"""Compares what must be equal on all ranks, by an exchange of 8 bytes for each rank, and names what differs."""

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hvdtrain import installed
from hvdtrain.core.plan import Plan
from hvdtrain.core.sharing import Sum, from_rank_0, gather, of_ranks
from hvdtrain.core.wording import counted
from hvdtrain.errors import AgreementError, DeviceError, ReplicaError, WorldError
from hvdtrain.launch.devices import own_gpu
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import stacks
from hvdtrain.untrusted import one_line

Values = Mapping[str, Any]
"""JSON values by name. A name begins with a kind of value, a key of REMEDIES, as in "data: training list"."""

MEMORY = "resume from the last checkpoint with the same command, and check that host's memory"
REMEDIES = {
    "data": "give every node the same data: copy the set whole, or name one shared folder",
    "code": "start every rank from the same code",
    "version": "give every node the same environment",
    "setting": "set it alike on every node",
    "recipe": "start every rank with the same command",
    "plan": "give every node the same recipe and data",
    "model": "build the same model on every rank",
    "training": "give every rank the same numbers",
    "state": "keep what all ranks have alike; an average with buffers of a local BatchNorm differs: average parameters "
    "alone, or take world.sync_batch_norm",
    "decision": "let callbacks decide by the same numbers on every rank: give fit MetricAverageCallback before them",
    "gathered": "give self.all_gather tensors of one shape, padded where parts are unequal, or take a metric of "
    "torchmetrics, as CatMetric",
    "value": "let callbacks and schedulers decide by values that are logged with sync_dist=True",
    "report": "make the same steps and report the same on every rank, as of world.sum and world.mean",
    "learning": "freeze, thaw and add parameters on all ranks in the same step, with PyTorch's own DDP before forward",
    "gradients": "the update used gradients that were not averaged over the ranks: of torch.autograd.grad, set by "
    "hand, or of backward() within run.accumulating() alone; give them to run.average(), in a LightningModule to "
    "self.trainer.strategy.reduce(), before they are combined",
    "changes": "gradients were changed after backward(), or weights outside of optimizer.step(), maybe by other values "
    f"on each rank; compute these of what all ranks have, as of world.sum; else {MEMORY}",
    "optimizer": "an optimizer of the program's own may step by what one rank alone has, as its loss; give it that of "
    f"all ranks, as of world.mean; else {MEMORY}",
    "numbers": "the program draws random numbers after backward(), others on each rank; draw them from a generator "
    "that is seeded alike on all ranks, as run.generator",
    "steps": "change weights alike on every rank: by gradients that the optimizer averages, or by hvd.allreduce",
    "weights": MEMORY,
}
OF_A_NODE = {"name", "data_dir", "cache_dir", "workers"}
"""Keys of a recipe that may differ: each node may have the recipe and the data in another place, and other cores."""
VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "TF_DETERMINISTIC_OPS",
    "TF_CUDNN_DETERMINISTIC",
    "TF_ENABLE_ONEDNN_OPTS",
)
"""Environment variables that change how frameworks compute."""
MOST_NAMED, LONGEST_SHOWN = 8, 200
MOST_CODE = 1 << 24
"""The most bytes of a module's file that are compared."""


def check_values(values: Values, ranks: tuple[int, int], host: str, sum_over_ranks: Sum) -> None:
    """Compares the ranks' values. Every rank calls it; `ranks`: its own number, and how many there are.

    Raises AgreementError on every rank, which names each value that differs, on which ranks and hosts, and a remedy.
    """
    marks = gather(np.array([mark(values)]), *ranks, sum_over_ranks)
    if (marks != marks[0]).any():
        raise AgreementError(differences(values, ranks, host, sum_over_ranks))


def mark(value: Any) -> int:
    """A signed 64-bit digest of a JSON value."""
    text = json.dumps(value, sort_keys=True, default=_kind)
    return int(np.uint64(xxhash.xxh3_64_intdigest(text.encode())).astype(np.int64))


def differences(values: Values, ranks: tuple[int, int], host: str, sum_over_ranks: Sum) -> str:
    """One line that says what differs, on which ranks, and what to do. Every rank calls it where digests differ."""
    values = json.loads(json.dumps(values, default=_kind))
    common = from_rank_0(list(values), ranks[0], sum_over_ranks)
    more = of_ranks([name for name in values if name not in common][:MOST_NAMED], *ranks, sum_over_ranks)
    names = [*common, *sorted(set(chain.from_iterable(more)))]
    own = np.array([mark(values.get(name)) for name in names])
    table = gather(own, *ranks, sum_over_ranks)
    differing = [names[column] for column in np.flatnonzero((table != table[0]).any(axis=0))]
    differing = [name for name in differing if name.startswith("report")] or differing  # it explains the others
    shown = differing[:MOST_NAMED]
    first = from_rank_0({name: values.get(name) for name in shown}, ranks[0], sum_over_ranks)
    of_all = of_ranks(
        [one_line(host, LONGEST_SHOWN), *(_shown(values.get(n), first[n]) for n in shown)], *ranks, sum_over_ranks
    )
    hosts = [row[0] for row in of_all]
    parts = [_difference(name, [row[1 + index] for row in of_all], hosts) for index, name in enumerate(shown)]
    more_text = [f"and {len(differing) - MOST_NAMED} more"] if len(differing) > MOST_NAMED else []
    kinds = dict.fromkeys("state" if ": state " in name else name.partition(":")[0] for name in shown)
    return f"the ranks differ in {'; '.join(parts + more_text)}: {', and '.join(REMEDIES[kind] for kind in kinds)}."


def _difference(name: str, texts: list[str], hosts: list[str]) -> str:
    """Which ranks have another value than most ranks, or than rank 0 where no value is that of most."""
    counts = Counter(texts)
    usual = max(counts, key=lambda text: (counts[text], text == texts[0]))
    others = [f"rank {rank} on {hosts[rank]} has {text}" for rank, text in enumerate(texts) if text != usual]
    more = f" and {counted(len(others) - MOST_NAMED, 'more rank')}" if len(others) > MOST_NAMED else ""
    rest = [rank for rank, text in enumerate(texts) if text == usual]
    who = f"rank {rest[0]} on {hosts[rest[0]]}" if len(rest) == 1 else "the others"
    return f"{name.partition(': ')[2]}: {', '.join(others[:MOST_NAMED])}{more}, {who} {usual}"


def _shown(value: Any, first: Any) -> str:
    """The value as text; of a long list, the first entry that differs from `first`, which is rank 0's."""
    if isinstance(value, list) and isinstance(first, list) and value != first and len(first) + len(value) > MOST_NAMED:
        pairs = zip([*value, *[None] * len(first)], [*first, *[None] * len(value)], strict=False)
        index = next(index for index, (own, theirs) in enumerate(pairs) if own != theirs)
        own, theirs = ([*of, "none"][min(index, len(of))] for of in (value, first))
        return one_line(f"{len(value)} (number {index}: {own}, on rank 0 {theirs})", LONGEST_SHOWN)
    is_long = isinstance(value, list) and len(value) > MOST_NAMED
    return one_line("none" if value is None else f"{len(value)}" if is_long else value, LONGEST_SHOWN)


def _kind(value: Any) -> Any:
    """In place of a value that JSON cannot hold: the number of NumPy or a tensor; of anything else the name of its
    type, as its text may hold an address in memory."""
    return value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else type(value).__name__


def named(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with names of that kind."""
    return {f"{kind}: {name}": value for name, value in values.items()}


def of_process(settings: Mapping[str, Any], rank: int, sum_over_ranks: Sum) -> dict[str, Any]:
    """This process's code, library versions and settings, by name; `settings` are its framework's. Every rank calls it.

    A module that rank 0 or this rank alone has imported counts as equal, as rank 0 alone may plot.
    """
    own = code()
    first = from_rank_0(own, rank, sum_over_ranks)
    modules = {name: own.get(name, digest) for name, digest in first.items()}
    every_setting = {**{name: os.environ.get(name) for name in VARIABLES}, **settings}
    return named("version", installed.versions()) | named("setting", every_setting) | named("code", modules)


def of_plan(plan: Plan, contents: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe's run that must be equal: recipe, data and plan. `contents` describes the data set."""
    keys = {k: v for k, v in plan.recipe.model_dump(mode="json").items() if k not in OF_A_NODE}
    numbers = {k: v for k, v in plan.to_json().items() if not k.endswith("_examples")}  # contents have them
    return named("recipe", keys) | named("data", contents) | named("plan", numbers)


def code() -> dict[str, str]:
    """By the name of each of the user's modules that are imported by now, a digest of its file."""
    found = {}
    for name, module in sorted(sys.modules.copy().items()):  # atomic: a thread may import meanwhile
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and Path(file).is_absolute() and file.endswith(".py") and stacks.is_users(file):
            found[name] = "unreadable"
            with contextlib.suppress(OSError), open(file, "rb") as opened:  # noqa: PTH123
                found[name] = xxhash.xxh3_64_hexdigest(opened.read(MOST_CODE))
    return found


def check_world(topology: Topology, rank: int, size: int, title: str = "Horovod") -> None:
    """Raises WorldError where the engine has another rank or number of ranks than the launcher promised."""
    if (rank, size) != (topology.rank, topology.size):
        outcome = "nothing would be averaged" if size == 1 else "the ranks would not share the batch"
        error = WorldError(
            f"{topology.launcher} promised rank {topology.rank} of {topology.size} on {topology.host}, "
            f"but {title} reports rank {rank} of {size}: {outcome}; {topology.row.remedy}."
        )
        error.everywhere = size == 1  # with ranks in another order, rank 0's may be the promised one
        raise error


def check_gpus(topology: Topology, environ: Mapping[str, str], ranks: tuple[int, int], sum_over_ranks: Sum) -> None:
    """Compares the ranks' GPUs, before NCCL refuses two ranks on one. Raises DeviceError on every rank."""
    gpus = of_ranks(own_gpu(topology, environ), *ranks, sum_over_ranks)
    hosts = of_ranks(topology.host, *ranks, sum_over_ranks)
    for second, gpu in enumerate(gpus):
        if gpu and (first := gpus.index(gpu)) < second:
            error = DeviceError(
                f"ranks {first} and {second} on {hosts[first]} share {gpu}: NCCL takes one rank a GPU, and the slices "
                "of a GPU (MIG) count as one; start one rank for each GPU, or take --device cpu."
            )
            error.everywhere = True
            raise error


def check_replicas(
    fingerprint: int,
    values: Values,
    step: int,
    ranks: tuple[int, int],
    host: str,
    sum_over_ranks: Sum,
    cause: str = "weights",
) -> None:
    """Compares the ranks' 64-bit fingerprints of their weights, and the values that an update follows from. Every rank
    calls it; `ranks`: its own number, and how many there are; `cause`: why its weights may differ from others', a key
    of REMEDIES.

    Raises ReplicaError on every rank, which names what differs, on which ranks and hosts.
    """
    marks = gather(np.array([mark(values), fingerprint]), *ranks, sum_over_ranks)
    of_values, of_weights = (marks != marks[0]).any(axis=0)
    if of_values or of_weights:
        causes = [] if of_values else of_ranks(cause, *ranks, sum_over_ranks)
        why = next((each for each in causes if each != "weights" and each in REMEDIES), "weights")
        differing = values if of_values else {f"{why}: weights": f"{fingerprint % 2**64:016x}"}
        text = differences(differing, ranks, host, sum_over_ranks)
        raise ReplicaError(f"after step {step} {text}")


def of_unlike_buffers(
    named: Mapping[str, Any], mark: Callable[[list[Any]], Any], among: Sequence[Any], kind: str, end: str, remedy: str
) -> list[str]:
    """A line for the log about buffers that the forward pass has made different on each rank, if there are any. Every
    rank calls it. `mark` digests buffers; `among`: this rank's number, how many ranks there are, and the sum over them.
    """
    if among[1] == 1 or not named:
        return []
    rows = gather(np.array([int(mark([each])) for each in named.values()]), *among)
    names = [name for name, is_one in zip(named, (rows == rows[0]).all(0), strict=True) if not is_one]
    if not names:
        return []
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return [
        f"after a step each rank has another {', '.join(names[:MOST_NAMED])}{more}: the forward pass changes these "
        f"{kind} by the rank's own examples, so the curve depends on the number of ranks, and all get {end} at an "
        f"epoch's end; for one value on all ranks after every step, {remedy}"
    ]


def check_devices(fingerprints: Sequence[int], step: int, devices: Sequence[str]) -> None:
    """Compares the fingerprints of one process's replicas, of which each device has one. Raises ReplicaError, which
    names those that differ from the first."""
    differing = [index for index, mark in enumerate(fingerprints) if mark != fingerprints[0]]
    if differing:
        named = [f"replica {index} on {devices[index]}" for index in differing]
        more = [f"{len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
        raise ReplicaError(
            f"after step {step} the weights of {', '.join(named[:MOST_NAMED] + more)} differ from replica 0's: the "
            "replicas have diverged and training stops; resume from the last checkpoint with the same command, and "
            "check that device's memory."
        )
