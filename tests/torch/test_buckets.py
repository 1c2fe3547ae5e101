"""How gradients are divided into messages, and tensors into bytes; what engine ddp does on a GPU, by stand-ins."""

import threading
from types import SimpleNamespace

import pytest
from ranks import needs_torch

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
pytestmark = needs_torch

from hvdtrain.core.recipe import of_program  # noqa: E402
from hvdtrain.errors import LoopError, RecipeError  # noqa: E402
from hvdtrain.launch.topology import Topology  # noqa: E402
from hvdtrain.ranks import stacks  # noqa: E402
from hvdtrain.torch.averaging import Averager, LoopAverager, grouped  # noqa: E402
from hvdtrain.torch.engines import distinct, flat, in_bytes  # noqa: E402
from hvdtrain.torch.engines.ddp import DdpEngine, dist  # noqa: E402

GROUPS = {
    "all together": ([3, 2, 1], 6, [[1, 2, 3]]),
    "cut": ([5, 10, 11, 10, 10], 25, [[10, 10], [11, 10], [5]]),
    "large ones alone, small ones across them": ([1, 40, 1, 50, 1], 25, [[50], [40], [1, 1, 1]]),
    "as large as may be": ([25, 26], 25, [[26], [25]]),
    "each alone": ([3, 2, 1], 0, [[1], [2], [3]]),
    "none": ([], 25, []),
}


@pytest.mark.parametrize(("sizes", "limit", "wanted"), GROUPS.values(), ids=GROUPS.keys())
def test_parameters_are_grouped_as_backward_reaches_them(sizes, limit, wanted):
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=torch.int8), requires_grad=False) for size in sizes]
    assert [[parameter.numel() for parameter in group] for group in grouped(parameters, limit)] == wanted


IMAGES = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
LAYOUTS = {
    "a number": torch.tensor(3.0),
    "rows": torch.arange(6.0).view(2, 3),
    "columns": torch.arange(6.0).view(2, 3).t(),
    "channels last": IMAGES.to(memory_format=torch.channels_last),
    "filters of 1x1": torch.rand(4, 3, 1, 1).to(memory_format=torch.channels_last),
    "volumes": torch.rand(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "inside of another": torch.arange(24.0)[4:10].view(2, 3),
    "empty": torch.zeros(0, 3),
}


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_flat_tensor_is_the_same_memory(tensor):
    line = flat(tensor)
    assert line.is_contiguous() and line.shape == (tensor.numel(),) and line.data_ptr() == tensor.data_ptr()
    assert line.sort().values.equal(tensor.flatten().sort().values)


@pytest.mark.parametrize("tensor", [torch.rand(4, 6)[:, :3], torch.rand(3, 1).expand(3, 2)], ids=["gaps", "repeated"])
def test_a_tensor_with_gaps_has_no_flat_one(tensor):
    with pytest.raises(RuntimeError):
        flat(tensor)


STATES = {
    **LAYOUTS,
    "gaps": torch.rand(4, 6)[:, :3],
    "repeated": torch.rand(3, 1).expand(3, 2),
    "a number": torch.tensor(2.5),
    "complex": torch.randn(3, 2, dtype=torch.complex64),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "bfloat16": torch.rand(2, 3).bfloat16().t(),
    "whether": torch.tensor([True, False]),
}


@pytest.mark.parametrize("tensor", STATES.values(), ids=STATES.keys())
def test_what_is_written_into_a_tensors_bytes_is_in_the_tensor(tensor):
    other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    distinct(other, other).copy_(distinct(tensor * 2, other))
    own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    own = own.conj() if tensor.is_conj() else own
    with in_bytes({"": own}) as mine, in_bytes({"": other}) as theirs:
        assert mine.keys() == theirs.keys() == ({""} if tensor.numel() else set())
        for name in mine:
            mine[name].copy_(theirs[name])
    torch.testing.assert_close(own, other)


class Counting:
    """An engine of one rank that records the names of the messages."""

    rank, size = 0, 1

    def __init__(self):
        self.sent = []

    def bucket_bytes(self):
        return 16

    def average(self, tensor, name):
        self.sent.append(name)
        return lambda: None


def test_gradients_are_sent_with_the_last_backward_alone():
    model, engine = torch.nn.Linear(4, 1), Counting()
    averager = LoopAverager(model, engine, "none")
    with averager.pause(True):
        model(torch.ones(2, 4)).sum().backward()
    assert engine.sent == []
    model(torch.ones(2, 4)).sum().backward()
    assert engine.sent == [*(f"hvdtrain.gradients.{number}" for number in range(3)), "hvdtrain.leaving"]
    assert model.bias.grad.item() == 4
    averager.close()
    model(torch.ones(2, 4)).sum().backward()
    assert len(engine.sent) == 4


def test_the_host_waits_after_its_update_for_who_has_left():
    """Not in backward: with gradients on a GPU it would wait there for the other hosts in every step."""
    waits, flags = [], []

    class Two(Counting):
        size = 2

        def average(self, tensor, name):
            if "leaving" in name:
                flags.append(tensor)
                return lambda: waits.append(len(flags))
            return lambda: None

    model = torch.nn.Linear(4, 1)
    averager = LoopAverager(model, Two(), "none")
    model(torch.ones(2, 4)).sum().backward()
    assert (len(flags), waits) == (1, [])
    averager.check_left()
    averager.check_left()
    assert waits == [1]
    model(torch.ones(2, 4)).sum().backward()
    flags[-1][1] = 0.5  # rank 1 has left
    with pytest.raises(LoopError, match=r"^rank 1 left run.batches\(\) where rank 0 continued"):
        model(torch.ones(2, 4)).sum().backward()  # of an update with two of them


@pytest.mark.parametrize("hidden", [False, True])
def test_a_sparse_gradient_is_refused(hidden):
    model = torch.nn.Embedding(3, 2, sparse=not hidden)
    with pytest.raises(RecipeError, match=r"^the gradient of weight is sparse, ranks average dense"):
        Averager(model, Counting(), "none")
        torch.nn.functional.embedding(torch.tensor([1]), model.weight, sparse=True).sum().backward()


class Event:
    """In place of a torch.cuda.Event: behind collectives that have ended once a test says so."""

    recorded, ended = 0, True

    def record(self):
        self.recorded, self.ended = self.recorded + 1, False

    def query(self):
        return self.ended


@pytest.fixture
def on_gpu(monkeypatch):
    """Engine ddp of one rank, which takes the CPU for its GPU."""
    monkeypatch.setattr(stacks, "_pending", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    engine = DdpEngine(of_program(), Topology.alone(), torch.device("cuda"))
    yield engine
    engine.close()


WAITS = {  # what the GPU waits for once it was called
    "an average": lambda engine: engine.average(torch.ones(3), "")(),
    "rows": lambda engine: engine.gather_rows(torch.ones(3)),
}


@pytest.mark.parametrize("begin", WAITS.values(), ids=WAITS)
def test_a_host_that_waits_for_its_gpu_waits_for_ranks_until_the_collective_has_ended(begin, on_gpu):
    own, reads, ended = stacks.Stacks(), threading.Event(), threading.Event()

    def train():
        own.train_here()
        begin(on_gpu)
        reads.set()
        ended.wait()  # in a line of the user's code, as loss.item()

    assert own.now()[0] == "outside"
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    reads.wait()
    assert (own.now()[0], own.now()[3]) == ("collective", "")  # which collective cannot be known
    on_gpu._event.ended = True  # as at a rank that reads, and has begun no other collective
    assert own.now()[0] == "outside"
    ended.set()
    thread.join()


def test_all_that_is_on_the_gpu_is_communicated_in_one_group(on_gpu, monkeypatch):
    """NCCL's operations of two communicators may wait for each other for ever."""
    groups, row = [], torch.ones(3)
    for name in ("all_gather_into_tensor", "broadcast", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *_, group=None, **__: groups.append(group) or SimpleNamespace())
    on_gpu.average(row, "")
    on_gpu.gather_rows(type("OnGpu", (torch.Tensor,), {"is_cuda": True})(row))
    assert groups == [None, None]
    on_gpu.sum(row.numpy())
    on_gpu.gather_rows(row)
    assert groups[2:] == [on_gpu._group] * 2


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_the_hooks_of_a_rank_alone_change_no_gradient(compression, on_gpu):
    """They can be tried on one GPU: `wrap` leaves them out there."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Linear(300, 1)), torch.randn(8, 4)
    (model(x[:4]).mean() + model(x[4:]).mean()).backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    on_gpu.hook(model, compression)
    for _ in range(2):
        model.zero_grad()
        for out in on_gpu.outputs(model, [x[:4], x[4:]]):
            out.mean().backward()
        on_gpu.finish()
        for parameter, gradient in zip(model.parameters(), plain, strict=True):
            torch.testing.assert_close(
                parameter.grad, gradient, rtol=2e-3 if compression == "fp16" else 1e-5, atol=1e-5
            )
    assert on_gpu._event.recorded >= 2
