"""The lab on sharding: collectives in a ring over Gloo, Adam, and what a rank holds and has sent."""

import os
import re
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import default_rng  # imported later it would be among the bytes that are counted
from numpy.typing import NDArray

from hvdtrain import files
from hvdtrain.errors import LabError
from hvdtrain.launch import rendezvous

LOADED = ("torch._dynamo", "torch.distributed.fsdp")
"""What the ranks of this lab load once: seconds in each run otherwise."""

Array = NDArray[Any]
WeightsOf = Callable[[int], Array]
Gradients = Callable[[WeightsOf], Iterator[tuple[int, Array]]]


class Comm:
    """The ranks of a run in a ring: lab 3's two phases, each as a collective of its own. Arrays are flat, and their
    length is a multiple of the number of ranks."""

    def __init__(self) -> None:
        self.rank, self.size = join()

    def part(self, array: Array) -> Array:
        """This rank's part of an array that it holds whole: a view."""
        parts: list[Array] = np.split(array, self.size)
        return parts[self.rank]

    def reduce_scatter(self, array: Array) -> Array:
        """This rank's part of the sum of the ranks' arrays."""
        if self.size == 1:
            return array.copy()
        going = self._part(array, self.rank - 1)
        for step in range(self.size - 1):
            going = self._pass_on(going) + self._part(array, self.rank - step - 2)
        return going

    def allgather(self, part: Array) -> Array:
        """The parts of all ranks, in their order."""
        whole = np.empty(len(part) * self.size, part.dtype)
        going = self.part(whole)
        going[:] = part
        for step in range(self.size - 1):
            coming = self._part(whole, self.rank - step - 1)
            coming[:] = self._pass_on(going)
            going = coming
        return whole

    def allreduce(self, array: Array) -> Array:
        """The sum of the ranks' arrays, on every rank."""
        return self.allgather(self.reduce_scatter(array))

    def _part(self, array: Array, number: int) -> Array:
        parts: list[Array] = np.split(array, self.size)
        return parts[number % self.size]

    def _pass_on(self, part: Array) -> Array:
        """What arrives from the left while `part` goes to the right."""
        import torch
        import torch.distributed as dist

        arrived = np.empty_like(part)
        sending = dist.isend(torch.from_numpy(np.ascontiguousarray(part)), (self.rank + 1) % self.size)
        dist.recv(torch.from_numpy(arrived), (self.rank - 1) % self.size)
        sending.wait()
        return arrived


class Adam:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980), whose state is as long as the weights that it is given."""

    def __init__(self, lr: float = 1e-3) -> None:
        self._lr, self._state = lr, dict[int, tuple[Array, Array]]()
        self._steps = dict[int, int]()
        self.held = 0
        """The most bytes that NumPy held, all arrays together, as an update began whose state was there."""

    def update(self, number: int, weights: Array, gradient: Array) -> None:
        """Changes `weights` in place: those of layer `number`, or the part of them that this rank updates."""
        if np.shape(gradient) != np.shape(weights):
            raise LabError(
                f"adam.update got {np.size(weights)} weights of layer {number} and a gradient of {np.size(gradient)}: "
                "give both whole, or this rank's part of both."
            )
        if number in self._state:
            self.held = max(self.held, tracemalloc.get_traced_memory()[0])
        mean, square = self._state.setdefault(number, (np.zeros_like(weights), np.zeros_like(weights)))
        if mean.shape != weights.shape:
            raise LabError(f"layer {number} had {len(mean)} weights in the update before, and has {len(weights)} now.")
        self._steps[number] = step = self._steps.get(number, 0) + 1
        mean += 0.1 * (gradient - mean)
        square += 0.001 * (gradient**2 - square)
        weights -= self._lr * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)


Step = Callable[[Any, list[Array], Adam, Gradients], Any]


class Measured(NamedTuple):
    """What a rank had after the updates: the weights [layer, n], whole; bytes for each of them that it held when Adam
    began, that it held at most, and that it sent in an update; and the loss of its examples before each update."""

    weights: Array
    held: float
    peak: float
    sent: float
    losses: Sequence[float]


def measured(step: Step, sharded: bool, shape: tuple[int, int], examples: int, updates: int = 3) -> Measured:
    """What `step(comm, weights, adam, gradients)` leaves on this rank, of a network of shape (layers, width). Where it
    is `sharded`, the step is given this rank's part of each layer's weights."""
    comm, losses, (count, width) = Comm(), list[float](), shape
    tracemalloc.start()
    weights = [draw(number, width) for number in range(count)]
    if sharded:
        weights = [comm.part(each).copy() for each in weights]
    adam, sent = Adam(), 0
    for number in range(updates):
        x, y = (each[comm.rank :: comm.size] for each in batch(number, examples, width))
        if number == 1:
            tracemalloc.reset_peak()
            sent = written()
        step(comm, weights, adam, gradients(count, x, y, examples, losses))
    numbers = count * width**2
    sent, peak = written() - sent, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    whole = [comm.allgather(each) if sharded else each for each in weights]
    return Measured(np.array(whole), adam.held / numbers, peak / numbers, sent / numbers / (updates - 1), losses)


def draw(number: int, width: int) -> Array:
    """The first weights of a layer, whole: the same on every rank."""
    return default_rng(number).normal(0, width**-0.5, width**2).astype(np.float32)


def batch(number: int, examples: int, width: int) -> tuple[Array, Array]:
    """The inputs and targets [examples, width] of an update, of all ranks."""
    x = default_rng(number).normal(size=(examples, width)).astype(np.float32)
    return x, np.sin(3 * x)


def gradients(count: int, x: Array, y: Array, examples: int, losses: list[float]) -> Gradients:
    """A function of where the weights come from, which yields (layer, its gradient), the last layer's first. It asks
    for the weights of a layer in forward and again in backward, and keeps none.

    The loss is the squared error over `examples`, those of all ranks: the ranks' gradients add up to its gradient.
    """

    def of(weights_of: WeightsOf) -> Iterator[tuple[int, Array]]:
        width, seen = x.shape[1], [x]
        for number in range(count):
            seen.append(np.tanh(seen[-1] @ weights_of(number).reshape(width, width)))
        slope = 2 * (seen[-1] - y) / examples
        losses.append(float(((seen[-1] - y) ** 2).sum() / examples))
        for number in reversed(range(count)):
            slope = slope * (1 - seen.pop() ** 2)
            before = slope @ weights_of(number).reshape(width, width).T
            yield number, (seen[-1].T @ slope).ravel()
            slope = before

    return of


def written() -> int:
    """The bytes that this process has written so far, to files and connections, as the kernel has counted them."""
    return int(re.findall(r"wchar: (\d+)", files.read(Path("/proc/self/io")))[0])


def join() -> tuple[int, int]:
    """Opens torch.distributed over Gloo, by an address of rank 0's that Horovod brings to all; rank and size."""
    import horovod.torch as hvd
    import torch.distributed as dist

    hvd.init()
    rank, size, interface = hvd.rank(), hvd.size(), os.environ.get("HOROVOD_GLOO_IFACE", "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    host = rendezvous.address_of(interface) or "127.0.0.1"
    store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
    host, port = hvd.broadcast_object((host, store.port if store else 0))
    hvd.shutdown()
    dist.init_process_group(
        "gloo", store=store or dist.TCPStore(host, port, size, is_master=False), rank=rank, world_size=size
    )
    return rank, size
