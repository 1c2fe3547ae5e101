"""What is wrong with a gap of the exercise, in words, from what the ranks then had and did. None where it is right.

Each text continues "Gap 2, shard, ".
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labtools.exercises import listed
from labtools.exercises.horovod_ranks import BASE_BATCH, BASE_LR, World

_CLOSE = 1e-5
_COMPRESSED = 2e-3  # how far gradients sent as float16 may lead from the path

Array = NDArray[Any]


def failure(error: str, past: Sequence[int], size: int) -> str:
    """Explains what Ranks.run raised. The ranks `past` had returned from the learner's function."""
    if "Mismatched" in error and "root" in error:
        return (
            "names a different root on each rank, and each would give its own weights to all. "
            "Every rank has to name the same one: rank 0."
        )
    if "No Adasum" in error:
        return (
            "requests Adasum, another rule than the mean, which Horovod does not have over Gloo. "
            "Leave op at hvd.Average, which it is by itself."
        )
    if "wait" in error and 0 < len(past) < size:
        return f"is not for some ranks only: {listed(past)} of {size} went past it, and the others wait in it for them."
    return "makes ranks wait for one another:" if "wait" in error else "stopped:"


def of_init(worlds: Sequence[World]) -> str | None:
    size = len(worlds)
    reported = [(world.rank, world.size) for world in worlds]
    missing = [rank for rank, world in enumerate(worlds) if not world.running]
    if any(world.uncalled for world in worlds):
        return "names hvd.init, but does not call it: the parentheses are missing."
    if missing:
        return _of_missing(missing, size, any(world.distributed for world in worlds))
    if reported == [(0, 1)] * size:
        return (
            f"starts Horovod, but each of the {size} processes believes that it is rank 0 of 1: "
            f"that is {size} trainings beside one another, and not one on {size} ranks.\n"
            "hvd.init() reads in the environment (HOROVOD_RANK, HOROVOD_SIZE) who the others are: leave both alone."
        )
    if reported != [(rank, size) for rank in range(size)]:
        return f"gives the ranks contradictory numbers: {', '.join(f'rank {r} of {n}' for r, n in reported)}."
    return None


def _of_missing(missing: Sequence[int], size: int, distributed: bool) -> str:
    if distributed:
        return (
            "starts torch.distributed, which is PyTorch's own library, and not Horovod. Neither knows the other's "
            "ranks, and the gaps below use Horovod's: hvd.init()."
        )
    if len(missing) == size:
        return (
            "is still empty: nothing in it starts Horovod (or a `return` comes first, or it is shut down again).\n"
            f"So hvd.rank() fails on each of the {size} processes: Horovod has not been initialized."
        )
    return f"starts Horovod on some processes only: on {listed(missing)} of {size} it is not running."


def of_shard(batch: Array, local_batches: Sequence[Array | None]) -> str | None:
    """From each rank's local batch of the batch [global batch]."""
    given = [local for local in local_batches if local is not None]
    if not given:
        return "is still empty: it gives back nothing, so no rank has an example to learn from."
    if len(given) < len(local_batches):
        where = [local is None for local in local_batches].index(True)
        return f"gives back nothing on rank {where}: a `return` is missing there."
    for explain in (_foreign, _same_for_all, _same_by_machine, _off_by_one, _uncovered, _uneven):
        if mistake := explain(batch, given):
            return mistake
    return None


def is_same(local_batches: Sequence[Array | None]) -> bool:
    """Whether all ranks have the same examples."""
    given = [np.sort(local) for local in local_batches if local is not None]
    return len(given) == len(local_batches) and all(np.array_equal(local, given[0]) for local in given)


def _foreign(batch: Array, local_batches: Sequence[Array]) -> str | None:
    for local in local_batches:
        numbers = local.dtype.kind in "iu"
        foreign = local[~np.isin(local, batch)]
        if len(foreign) or not numbers:
            what = f"{foreign[0]} is not in the batch" if numbers else f"they are {local.dtype}"
            return f"gives back positions, or something else, but not examples ({what}): index the batch with them."
    return None


def _same_for_all(batch: Array, local_batches: Sequence[Array]) -> str | None:
    if not is_same(local_batches):
        return None
    if is_same([local_batches[0], batch]):
        return f"does not shard: every rank has all {len(batch)} examples."
    left = len(batch) - len(np.unique(local_batches[0]))
    whose = ", that of rank 0" if is_same([local_batches[0], batch[: len(batch) // len(local_batches)]]) else ""
    return (
        f"gives every rank the same local batch{whose}: no rank ever sees the other {left} of {len(batch)} examples. "
        "The local batch has to depend on hvd.rank()."
    )


def _same_by_machine(batch: Array, local_batches: Sequence[Array]) -> str | None:
    if len(local_batches) < 4 or not (is_same(local_batches[0::2]) and is_same(local_batches[1::2])):
        return None
    return (
        "is right on one machine only. On two machines with two ranks each, ranks 0 and 2 have the same examples, "
        "and so have 1 and 3: hvd.local_rank() and hvd.local_size() count within a machine. "
        "Use hvd.rank() and hvd.size()."
    )


def _off_by_one(batch: Array, local_batches: Sequence[Array]) -> str | None:
    count = len(batch) // len(local_batches)
    if not all(
        is_same([local, batch[count * rank : count * (rank + 1)]]) for rank, local in enumerate(local_batches, 1)
    ):
        return None
    return (
        f"counts the ranks from 1: nobody has the first {count} of {len(batch)} examples, and the last rank has none. "
        "hvd.rank() begins at 0."
    )


def _uncovered(batch: Array, local_batches: Sequence[Array]) -> str | None:
    """Where not every example is on exactly one rank."""
    times = (np.concatenate(local_batches)[:, None] == batch).sum(axis=0)
    lost, shared = batch[times == 0], batch[times > 1]
    found = []
    if len(shared):
        who = [rank for rank, local in enumerate(local_batches) for _ in range((local == shared[0]).sum())]
        found.append(
            f"gives {len(shared)} of {len(batch)} examples to several ranks (number {shared[0]} to {listed(who)})"
        )
    if len(lost):
        found.append(f"loses {len(lost)} of {len(batch)} examples (number {lost[0]} is on no rank)")
    return " and ".join(found) + "." if found else None


def _uneven(batch: Array, local_batches: Sequence[Array]) -> str | None:
    sizes = [len(local) for local in local_batches]
    if len(set(sizes)) == 1:
        return None
    return (
        f"gives the ranks local batches of different sizes, {listed(sizes)}. "
        "The mean over ranks counts every rank alike, "
        "so an example in a small local batch would weigh more than one in a large one."
    )


def of_scale(on_four: Array, on_two: float) -> tuple[str | None, tuple[Array, int] | None]:
    """From the LRs [rank, case] on 4 ranks, and the first case's LR on 2.

    A mistake that a training shows comes with that training's LR [rank], and the batch of one process beside it.

    The cases: a base_batch on each rank; base_batch kept as the global batch; other numbers.
    """
    first, kept, other = on_four[0]
    if np.ptp(on_four, axis=0).any() or not np.isclose(first, 4 * BASE_LR):
        return _of_first_lr(on_four, on_two), (on_four[:, 0], BASE_BATCH)
    if not np.isclose(on_two, 2 * BASE_LR):
        return f"gives {on_two:.3g} on 2 ranks too, where 0.2 is right: the number of ranks is hvd.size().", None
    if not np.isclose(kept, BASE_LR):
        return (
            "scales although the global batch is kept: base_lr holds at base_batch = 200, 4 ranks take 50 each, "
            f"which is 200 again, and it gives {kept:.3g}. "
            "Times hvd.size() is right only where every rank takes a whole base_batch."
        ), (np.full(4, kept), 4 * BASE_BATCH)
    if not np.isclose(other, 0.48):
        return f"gives {other:.3g} for base_lr 0.3, base_batch 50 and 20 examples on each of 4 ranks, not 0.48.", None
    return None, None


def _of_first_lr(on_four: Array, on_two: float) -> str:
    lrs, kept = on_four[:, 0], on_four[0, 1]
    if np.ptp(on_four, axis=0).any():
        by_rank = " (it is scaled by hvd.rank(), not by hvd.size())" if np.ptp(np.diff(lrs)) < _CLOSE else ""
        return f"gives every rank another learning rate, {listed(lrs.tolist())}{by_rank}: the ranks part."
    local = np.isclose(on_two, 2 * BASE_LR)
    reasons = {
        1: "hvd.size() is missing" if np.isclose(kept, BASE_LR / 4) else "it is not scaled",
        1 / 4: "it is divided by the number of ranks, where it must grow with it",
        16: "it is scaled by the square of the number of ranks, twice the rule",
        2: "hvd.local_size() counts one machine's ranks, here 2 on each of two. Use hvd.size()"
        if local
        else "that is the square-root rule, and this lab asks for the linear one",
    }
    known = [reason for times, reason in reasons.items() if np.isclose(lrs[0], times * BASE_LR)]
    reason = known[0] if known else "the linear rule is base_lr times global batch / base batch"
    return f"gives {lrs[0]:.3g} for 4 ranks with {BASE_BATCH} examples each, and 0.4 is right: {reason}."


def of_wrap(paths: Array, right: Array) -> str | None:
    """From the paths [rank, steps + 1, 2] and the right one."""
    if np.ptp(paths, axis=0).max() > _CLOSE:
        slopes = listed(paths[:, -1, 0].tolist())
        return (
            f"does not average the gradients: {len(right) - 1} steps from one start the ranks' slopes are {slopes}. "
            "Each rank follows its own examples, and the ranks part: the optimizer is not wrapped."
        )
    if np.abs(paths[0] - right).max() < _COMPRESSED:
        return None
    step, mean = paths[0, 1] - paths[0, 0], right[1] - right[0]
    times = float(step @ mean / (mean @ mean))
    if np.isclose(times, 1, rtol=1e-3):
        return "makes the right first step and wrong ones later: wrap the optimizer given, which has momentum."
    reasons = {
        4: "4 times as much. That is the sum of the gradients over 4 ranks (hvd.Sum); leave op at hvd.Average.",
        1 / 4: "a quarter. The gradients are divided by the number of ranks twice: hvd.Average has done so already.",
    }
    known = [reason for factor, reason in reasons.items() if np.isclose(times, factor, rtol=1e-3)]
    other = (
        f"{times:.2f} times as much. The mean over the ranks is hvd.Average; and the LR is that of the optimizer given."
    )
    return (
        f"keeps the ranks together, but its first step changes the slope by {step[0]:.4f}, "
        f"the mean gradient by {mean[0]:.4f}: {known[0] if known else other}"
    )


def of_broadcast(before: Array, paths: Array, right: Array) -> str | None:
    """From the weights [rank, 2] before it, the paths [rank, steps + 1, 2] after it, and the right path."""
    starts, ends, steps = paths[:, 0], paths[:, -1], len(right) - 1
    if np.ptp(starts, axis=0).any():
        return _of_parted(before, starts, ends, steps)
    if not np.array_equal(starts[0], before[0]):
        return _of_root(before, starts[0])
    if np.ptp(ends, axis=0).max() > _CLOSE:
        return (
            "broadcasts the weights, but not the state of the optimizer: rank 0 continues with the momentum of its "
            f"checkpoint, the others begin with none. {steps} steps later they are at slopes "
            f"{listed(ends[:, 0].tolist())}: "
            "the paths part. hvd.broadcast_optimizer_state broadcasts it."
        )
    if np.abs(paths[0] - right).max() > _CLOSE:
        return "loses the momentum of rank 0: the ranks agree, but continue without it. The root is rank 0."
    return None


def _of_parted(before: Array, starts: Array, ends: Array, steps: int) -> str:
    apart = np.ptp(starts, axis=0)
    worst = int(apart.argmax())
    ways = (
        f"They start from {('slopes', 'intercepts')[worst]} {listed(starts[:, worst].tolist())} "
        f"and are, {steps} steps later, at {listed(ends[:, worst].tolist())}: the paths part."
    )
    if np.array_equal(starts, before):
        return (
            f"is still empty: no weights are broadcast, each rank keeps the random ones it was made with. {ways}\n"
            "(hvd.broadcast gives back a copy, hvd.broadcast_parameters writes into the model.)"
        )
    if not apart.all():
        return f"broadcasts the {('slope', 'intercept')[int(apart.argmin())]} alone. {ways}"
    return f"leaves the ranks with different weights. {ways}"


def _of_root(before: Array, start: Array) -> str:
    whose = [rank for rank, weights in enumerate(before) if np.array_equal(start, weights)]
    if whose:
        return (
            f"gives all ranks the weights of rank {whose[0]}: the root is the wrong one. Only rank 0 has read the "
            f"checkpoint: its slope {before[0, 0]:.2f} is lost, all continue from {start[0]:.2f}. The root is rank 0."
        )
    mean = ", but the mean over the ranks" if np.allclose(start, before.mean(axis=0), atol=1e-6) else ""
    return f"has all ranks start from slope {start[0]:.2f}, which is not rank 0's {before[0, 0]:.2f}{mean}."
