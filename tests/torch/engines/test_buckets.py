"""How gradients are divided into messages, and tensors into bytes; what engine ddp does on a GPU, by stand-ins."""

import re
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
from hvdtrain.ranks.agreement import REMEDIES  # noqa: E402
from hvdtrain.torch.averaging import Averager  # noqa: E402
from hvdtrain.torch.engines import distinct, flat, in_bytes  # noqa: E402
from hvdtrain.torch.engines.buckets import Bucket, grouped  # noqa: E402
from hvdtrain.torch.engines.ddp import DdpEngine, dist  # noqa: E402
from hvdtrain.torch.user_loop.averager import (  # noqa: E402
    AVERAGE,
    BACKWARD,
    DOES,
    LEAVE,
    LOSS,
    NOTHING,
    NUMBERS,
    SKIP,
    STEP,
    LoopAverager,
)

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
    assert engine.sent == ["hvdtrain.step", *(f"hvdtrain.gradients.{number}" for number in range(3))]
    assert model.bias.grad.item() == 4
    averager.close()
    model(torch.ones(2, 4)).sum().backward()
    assert len(engine.sent) == 4


class Two(Counting):
    """An engine of two ranks, of which the other one has the numbers that a test gives."""

    size = 2

    def __init__(self, other):
        super().__init__()
        self.other = other

    def average(self, tensor, name):
        self.sent.append(name)
        if name == "hvdtrain.step":
            tensor[1] = self.other(int(tensor[0]))
            tensor /= 2
        return lambda: None

    def sum(self, array):
        return array * 2 if array.shape[0] != 2 else array + array[::-1]


def numbers_of(call=BACKWARD, backward=0, update=0, digest=0):
    """A change of a rank's number."""
    return call - BACKWARD + len(DOES) * (backward + NUMBERS * (update + NUMBERS * digest))


WRONG = {  # by what rank 1 does otherwise: how its number differs, what the message says
    "leaves": (numbers_of(LEAVE), r"^rank 1 left run.batches\(\) where rank 0 continued"),
    "an update later": (numbers_of(update=1), "rank 1 calls backward() number 1 in step 2 of this start"),
    "a backward more": (numbers_of(backward=1), "rank 1 calls backward() number 2 in step 1 of this start"),
    "no backward": (numbers_of(NOTHING), "rank 1 calls no backward() in step 1 of this start, in "),
    "a batch left out": (numbers_of(SKIP), "rank 1 calls run.skip() in step 1 of this start, in "),
    "a loss": (numbers_of(LOSS), "rank 1 calls run.loss() number 1 in step 1 of this start"),
    "by hand": (numbers_of(AVERAGE), "rank 1 calls run.average() number 1 in step 1 of this start"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_rank_in_another_step_is_named_with_both_lines(case):
    more, text = WRONG[case]
    model, engine = torch.nn.Linear(4, 1), Two(lambda own: own + more)
    averager = LoopAverager(model, engine, "none")
    with pytest.raises(LoopError) as error:
        model(torch.ones(2, 4)).sum().backward()
    averager.close()
    assert re.search(text if text[0] == "^" else re.escape(text), str(error.value))
    assert case == "leaves" or str(error.value).count(f", in {__file__}:") == 2


def test_nothing_is_sent_where_no_rank_has_a_gradient():
    model, engine = torch.nn.Linear(4, 1), Two(lambda own: own)
    averager = LoopAverager(model, engine, "none")
    averager.updated()
    averager.take_part(SKIP)
    averager.updated()
    averager.take_part(STEP)
    averager.take_part(LEAVE)
    assert averager.backwards == 0  # of the next update
    assert engine.sent == ["hvdtrain.step"] * 4
    averager.begin_batch()  # whose forward pass communicates nothing
    assert len(engine.sent) == 4
    averager.take_part(LOSS)
    averager.is_forward_shared = True
    averager.begin_batch()
    assert engine.sent == ["hvdtrain.step"] * 6
    with averager.pause():
        with averager.pause(False):
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
    assert len(engine.sent) == 6
    averager.close()


def test_messages_hold_what_learns_now_alone():
    """Flags that change, a layer that is added, and one in place of another."""
    model, engine = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)), Counting()
    averager = LoopAverager(model, engine, "none")

    def learns(changed=lambda: None):
        changed()
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        sizes = {name: each.numel() for name, each in model.named_parameters() if each.requires_grad}
        assert set(averager._messages.names.values()) == sizes.keys()
        sent = sum(sum(map(torch.Tensor.numel, each.parameters)) for each in averager._messages.all)
        held = sum(len(each._whole) for each in averager._messages.all if isinstance(each, Bucket))
        assert sent == sum(sizes.values()) and held <= sent + len(sizes)
        return sizes.keys()

    assert learns(lambda: model[0].requires_grad_(False)) == {"1.weight", "1.bias"}
    assert learns(lambda: (model[0].requires_grad_(), model[1].requires_grad_(False))) == {"0.weight", "0.bias"}
    assert learns(lambda: model.append(torch.nn.Linear(1, 1))) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert learns(lambda: setattr(model[2], "weight", torch.nn.Parameter(torch.ones(1, 1)))) >= {"2.weight"}
    assert model[2].weight.grad is not None
    averager.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 7, 1000])
def test_a_rank_has_a_code_that_a_mean_in_half_precision_keeps(dtype, size):
    codes = torch.arange(128)
    assert ((codes.to(dtype) / size).double() * size).round().long().equal(codes)


def test_an_optimizer_may_not_step_inside_of_backward():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = LoopAverager(model, Counting(), "none")
    model.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(LoopError, match=r"^SGD makes its step inside of backward\(\), before"):
        model(torch.ones(2, 4)).sum().backward()
    averager.close()


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
    groups, row, work = [], torch.ones(3), SimpleNamespace(wait=lambda *_: None)
    for name in ("all_gather_into_tensor", "broadcast", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *_, group=None, **__: groups.append(group) or work)
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


def averaged(model=None):
    """A model of two layers, whose gradients share buckets, and its averager."""
    model = model or torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    return model, LoopAverager(model, Counting(), "none")


def test_a_gradient_that_a_program_holds_stays_its_own():
    model, averager = averaged()
    flat_one = torch.zeros(sum(each.numel() for each in model.parameters()))
    made = [part.view_as(each) for part, each in zip(flat_one.split([6, 2, 2, 1]), model.parameters(), strict=True)]
    for each, part in zip(model.parameters(), made, strict=True):
        each.grad = part
    model(torch.ones(1, 3)).sum().backward()
    assert all(each.grad is part for each, part in zip(model.parameters(), made, strict=True))
    assert flat_one[-1] == 1
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    held = [each.grad for each in model.parameters()]
    model.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    assert (held[-1].item(), model[1].bias.grad.item(), flat_one[-1].item()) == (2, 4, 1)
    model[1].bias.grad.detach_()
    with pytest.raises(LoopError, match=r"backward\(create_graph=True\) makes gradients of each rank's own graph"):
        model(torch.ones(1, 3)).square().sum().backward(create_graph=True)
    averager.close()


def step_plainly(model, optimizer):
    optimizer.step()


def scale_gradients(model, optimizer):
    model[0].weight.grad.mul_(2)
    optimizer.step()


def move_after(model, optimizer):
    optimizer.step()
    with torch.no_grad():
        model[1].bias.add_(1)


def draw(model, optimizer):
    model[0].weight.grad.add_(torch.randn(2, 3))
    optimizer.step()


def replace_gradient(model, optimizer):
    model[0].weight.grad = torch.ones(2, 3)
    optimizer.step()


class Own(torch.optim.SGD):
    """An optimizer of a program's own."""


CAUSES = {
    "weights": (step_plainly, torch.optim.SGD),
    "changes": (scale_gradients, torch.optim.SGD),
    "changes after": (move_after, torch.optim.SGD),
    "numbers": (draw, torch.optim.SGD),
    "gradients": (replace_gradient, torch.optim.SGD),
    "optimizer": (step_plainly, Own),
}


@pytest.mark.parametrize("case", CAUSES)
def test_what_an_update_shows_is_the_cause_of_replicas_that_part(case):
    step, kind = CAUSES[case]
    model, averager = averaged()
    optimizer = kind(model.parameters(), 0.1)
    model(torch.ones(1, 3)).sum().backward()
    step(model, optimizer)
    assert averager.evidence.cause == case.partition(" ")[0]
    assert averager.evidence.cause in REMEDIES
    averager.close()


def test_what_one_of_an_updates_backwards_reaches_is_reached():
    model, averager = averaged(
        torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    )
    for layer in model[:2]:
        layer(torch.ones(1, 1)).sum().backward()
    assert averager.unreached == ["2.weight", "2.bias"]
    averager.updated()
    model[2](torch.ones(1, 1)).sum().backward()
    assert averager.unreached == ["0.weight", "0.bias", "1.weight", "1.bias"]
    averager.close()
