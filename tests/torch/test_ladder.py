"""What makes a step fast: compiled networks, an update as one CUDA graph, data on the device; and a step's profile.
The network is torchvision's to the bit."""

import functools
import itertools
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from cifar100_files import batch, write
from marks import marked
from ranks import needs_horovod, needs_tensorflow, needs_torch, train
from refusals import refusal
from streams import Recorder
from worlds import SMOOTHED, of_kind

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
pytestmark = needs_torch

from torch.nn import functional as F  # noqa: E402

from hvdtrain import datasets  # noqa: E402
from hvdtrain.core import recipe  # noqa: E402
from hvdtrain.datasets import cifar100  # noqa: E402
from hvdtrain.errors import EngineUnavailable, RecipeError  # noqa: E402
from hvdtrain.torch import models, profiler, resnet, trainer  # noqa: E402
from hvdtrain.torch import step as stepping  # noqa: E402
from hvdtrain.torch.data import Loader  # noqa: E402
from hvdtrain.torch.data.held import hold  # noqa: E402
from hvdtrain.torch.engines import cuda_graph  # noqa: E402
from hvdtrain.torch.engines.local import LocalEngine  # noqa: E402
from hvdtrain.torch.objective import Objective  # noqa: E402
from hvdtrain.torch.step import Step  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("stem", marked(["imagenet", "cifar"], slow={"cifar"}))
def test_resnets_are_torchvisions_to_the_bit(stem, monkeypatch):
    """With two blocks in each stage, one of which has a shortcut."""
    theirs = pytest.importorskip("torchvision.models.resnet", reason="the reference: pip install torchvision")
    monkeypatch.setattr(resnet, "BLOCKS", dict.fromkeys(resnet.BLOCKS, 2))
    torch.manual_seed(5)
    ours = models.resnet50(10, stem)
    torch.manual_seed(5)
    theirs = theirs.ResNet(theirs.Bottleneck, [2] * 4, num_classes=10, zero_init_residual=True)
    if stem == "cifar":
        theirs.conv1.stride, theirs.maxpool = (1, 1), torch.nn.Identity()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for model in (ours, theirs):
        assert not any(block.bn3.weight.any() for layer in resnet.BLOCKS for block in getattr(model, layer))
        for layer in resnet.BLOCKS:
            for block in getattr(model, layer):
                torch.nn.init.constant_(block.bn3.weight, 0.5)
    images = torch.randn(2, 3, 32, 32)
    outputs = [model(images) for model in (ours, theirs)]
    assert torch.equal(*outputs)
    for out in outputs:
        out.square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other) and torch.equal(mine.grad, other.grad)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name])


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("data") / cifar100.FOLDER, *(pickle.dumps(batch(n)) for n in (300, 40)))
    return cifar100.load(folder)


EDGES = np.array([0, 0.5, np.nextafter(np.float32(1), np.float32(0))], np.float32)


def requests(count, seed=0):
    """Three requests, with draws that reach every edge."""
    random = np.random.default_rng(seed)
    draws = random.random((600, datasets.DRAWS), dtype=np.float32)
    draws[:81, :4] = np.stack(np.meshgrid(EDGES, EDGES, EDGES, EDGES), axis=-1).reshape(81, 4)
    indices = random.integers(0, count, 600)
    return [(indices[:100], draws[:100]), (indices[100:590], draws[100:590]), (indices[590:], draws[590:])]


def test_images_on_the_device_have_the_readers_bytes(cifar):
    held = hold(cifar.train, CPU)
    for split, wanted in ((cifar.train, requests(300)), (cifar.valid, [(np.arange(40), None)])):
        held = hold(split, CPU)
        for (x, y), request in zip(held.batches(wanted), wanted, strict=True):
            expected = split.read(*request)
            assert x.dtype == torch.uint8
            np.testing.assert_array_equal(x.numpy(), expected[0])
            np.testing.assert_array_equal(y.numpy(), expected[1])
    assert list(held.batches([])) == []


SETS = {
    "linear": {},
    "digits": {"channels_last": True},
    "synthetic:tiny": {"precision": "float64"},
}


@pytest.mark.parametrize("name", SETS)
def test_a_data_set_on_the_device_gives_the_loaders_batches(name):
    plain = recipe.load(name, SETS[name])
    sizes = {"image_size": plain.image_size, "classes": plain.classes, "examples": plain.examples}
    dataset = datasets.load(plain.dataset, **sizes)
    for split in (dataset.train, dataset.valid):
        wanted = [(indices, None) for indices in np.array_split(np.random.default_rng(1).permutation(len(split)), 3)]
        pairs = [
            list(Loader(plain.model_copy(update={"data_on_device": held}), dataset, CPU).batches(split, wanted))
            for held in (False, True)
        ]
        for (x, y), (held_x, held_y) in zip(*pairs, strict=True):
            assert torch.equal(x, held_x) and torch.equal(y, held_y)
            assert x.dtype == held_x.dtype and x.stride() == held_x.stride()


def test_a_split_of_files_is_refused():
    message = "object is read from files and cannot lie on the device; drop data_on_device."
    assert refusal(RecipeError, hold, object(), CPU) == message


class Backend:
    """torch.compile's tracing without a C++ compiler: counts graphs, and records when a backward one runs."""

    def __init__(self):
        self.graphs, self.events = 0, []

    def compile(self, graph, inputs):
        # Not above: they take seconds, in every process that collects tests.
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def backward(graph, inputs):
            def run(*given):
                self.events.append("backward")
                return graph.forward(*given)

            return make_boxed_func(run)

        self.graphs += 1
        compiler = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=backward)
        return compiler(graph, inputs)


@pytest.fixture
def small(monkeypatch):
    """Makes ResNet50 one of a block in each stage; the backend of its compiler."""
    backend, compiler = Backend(), torch.compile
    monkeypatch.setattr(resnet, "BLOCKS", dict.fromkeys(resnet.BLOCKS, 1))
    monkeypatch.setattr(torch, "compile", functools.partial(compiler, backend=backend.compile))
    yield backend
    torch._dynamo.reset()


def steps(keys, record=None, in_one=True, count=6):
    """The losses of `count` updates at a changing LR, and the weights and statistics after them."""
    chosen = recipe.load("digits", {"seed": 3, **keys})
    engine = LocalEngine(CPU)
    step = Step(chosen, engine, models.build(chosen, 10, engine), 0.1, in_one=in_one, record=record)
    torch.manual_seed(0)
    x = torch.randn(count, chosen.accumulation_steps, 6, 3, 8, 8)
    y = torch.randint(10, x.shape[:3])
    step.model.train()
    losses = []
    for k in range(count):
        seen = step(list(zip(x[k], y[k], strict=True)), 0.001 * (k + 1))  # a high LR makes rounding large
        assert [(each.count, each.metrics["acc1"][1]) for each in seen] == [(6, 6)] * chosen.accumulation_steps
        losses += [number.item() for each in seen for number in (each.loss, each.metrics["acc1"][0])]
    step.model.eval()
    with torch.no_grad():
        losses.append(step.evaluate((x[0, 0], y[0, 0])).loss.item())
    engine.close()
    return losses, step.model.state_dict()


# How many graphs: one without breaks, and none for evaluation.
COMPILED = {"whole": ({"label_smoothing": 0.1}, {"in_one": True}, 1), "in blocks": ({}, {"in_one": False}, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_a_compiled_network_learns_the_same(small, case):
    keys, how, graphs = COMPILED[case]
    keys = {"fused_optimizer": True, "channels_last": True, **keys}
    losses, state = steps(keys)
    assert small.graphs == 0
    compiled_losses, compiled_state = steps({**keys, "compile": True}, **how)
    assert small.graphs == graphs
    np.testing.assert_allclose(compiled_losses, losses, rtol=1e-5)
    for name, tensor in state.items():
        torch.testing.assert_close(compiled_state[name], tensor, rtol=1e-3, atol=1e-5)


INTERLEAVED = ["fc", "backward", "layer4", "backward", "layer3", "backward", "layer2", "backward", "layer1", "stem"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_blocks", "order"), [(True, INTERLEAVED), (False, ["backward", "all"])], ids=["blocks", "whole"]
)
def test_gradients_of_a_network_compiled_in_blocks_leave_while_backward_runs(small, in_blocks, order):
    model = models.resnet50(10, "cifar").train()
    stepping.compile_training(model, in_blocks)
    names = {"conv1": "stem", "bn1": "stem"}
    for name, parameter in model.named_parameters():
        layer = name.partition(".")[0]
        event = names.get(layer, layer) if in_blocks else "all"
        parameter.register_post_accumulate_grad_hook(lambda _, event=event: small.events.append(event))
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    assert [event for event, _ in itertools.groupby(small.events)] == order


class Tape:
    """In place of a CUDA graph: a replay runs the recorded work, and its results go to the same list."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, work):
        self.recorded += 1
        results = []

        def replay():
            self.replayed += 1
            results[:] = work()

        return replay, results


GRAPHS = {
    "one micro-batch": {},
    "micro-batches": {"accumulation_steps": 2},
    "clipped bfloat16": {"clip_norm": 1.0, "precision": "bfloat16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("keys", GRAPHS.values(), ids=GRAPHS)
def test_a_recorded_step_learns_the_same(monkeypatch, keys):
    monkeypatch.setattr(resnet, "BLOCKS", dict.fromkeys(resnet.BLOCKS, 1))
    keys = {"fused_optimizer": True, **keys}
    tape = Tape()
    losses, state = steps(keys)
    recorded_losses, recorded_state = steps(keys, record=tape)
    assert (tape.recorded, tape.replayed) == (1, 6 - cuda_graph.WARM_STEPS)
    # The graph's LR is a float32.
    np.testing.assert_allclose(recorded_losses, losses, rtol=1e-5)
    for name, tensor in state.items():
        torch.testing.assert_close(recorded_state[name], tensor, rtol=1e-4, atol=1e-6)


def test_on_a_gpu_an_update_is_recorded_after_steps_beside_the_default_stream():
    with Recorder() as recorder:
        log = recorder.log
        gpu = torch.device("cuda")
        captured = cuda_graph.GraphedUpdate(lambda micro_batches: log.append("update") or micro_batches, gpu)
        results = [captured([(torch.tensor(float(k)),)])[0][0].item() for k in range(5)]
    warm = ["another waits for the default", "on another", "update", "end", "the default waits for another"]
    into = "into a graph, {'capture_error_mode': 'thread_local'}"
    assert log == [*warm * cuda_graph.WARM_STEPS, into, "update", "end", "replay", "replay"]
    assert results == [0, 1, 2, 3, 4]


def test_a_replay_draws_from_the_seed_of_its_step(monkeypatch):
    """PyTorch gives a graph the default generator's seed at each replay."""
    gpu = torch.device("cuda")
    with Recorder() as recorder:
        monkeypatch.setattr(torch.cuda, "manual_seed_all", recorder.log.append)
        captured = cuda_graph.GraphedUpdate(lambda micro_batches: [], gpu)
        step = SimpleNamespace(update=captured, set_lr=lambda lr: None, fitting=SimpleNamespace())
        run = SimpleNamespace(engine=SimpleNamespace(rank=0, device=gpu), recipe=recipe.load("digits"), step=step)
        run.share_buffers, run.profiler, run.parts, run.plan = list, None, 1, SimpleNamespace(micro_batch=32)
        for number in range(6):
            trainer.Trainer.update(run, [], 0.1, number)
    seeds = [line for line in recorder.log if isinstance(line, int)]
    assert len(set(seeds)) == 6
    assert recorder.log[-4:] == [seeds[4], "replay", seeds[5], "replay"]


@pytest.mark.slow
@needs_horovod
@pytest.mark.timeout(900)
def test_a_compiled_run_has_the_curve_of_a_plain_one(tmp_path, train_here):
    """With PyTorch's own compiler: alone, and under two ranks of Horovod and of DDP."""
    argv = ["linear", "--epochs", "2", "--fused-optimizer"]
    train_here("torch", *argv, "--output", tmp_path / "plain").good()
    train_here("torch", *argv, "--compile", "--output", tmp_path / "alone").good()
    for engine in ("horovod", "ddp"):
        train("torch", "mpi", 2, *argv, "--compile", "--engine", engine, "--output", tmp_path / engine).good()
    plain, *compiled = (
        [line["loss"] for line in of_kind("step", tmp_path / name)] for name in ("plain", "alone", "horovod", "ddp")
    )
    assert len(plain) == 2
    for losses in compiled:
        np.testing.assert_allclose(losses, plain, rtol=1e-6)


COMPILERS = {  # the device, the environment, whether there is Triton, and how the message begins
    "no Triton": ("cuda", {}, False, "compile needs Triton for a GPU; "),
    "no C compiler": ("cuda", {"CC": "nocc"}, True, "compile needs a compiler, and nocc is not in PATH; "),
    "no C++ compiler": ("cpu", {"CXX": None, "PATH": ""}, False, "compile needs a compiler, and g++ is not in PATH; "),
}


@pytest.mark.parametrize("case", COMPILERS)
def test_a_missing_compiler_is_reported(monkeypatch, case):
    device, environ, has_triton, message = COMPILERS[case]
    monkeypatch.setattr(stepping.importlib.util, "find_spec", lambda name: has_triton or None)
    for name, value in environ.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    assert refusal(EngineUnavailable, stepping.check_compiler, torch.device(device)).startswith(message)


def smoothed(logits, label, smoothing):
    """The cross-entropy to the targets 1 - s + s / K of the label and s / K of the other classes, by hand."""
    logits = np.asarray(logits)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    target = np.full(logits.shape, smoothing / logits.shape[1])
    target[np.arange(len(logits)), label] += 1 - smoothing
    return -(target * logs).sum(1).mean()


LOGITS, LABELS, SMOOTHINGS = SMOOTHED.values()


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_torchs_smoothed_loss(smoothing):
    objective = Objective(recipe.load("digits", {"label_smoothing": smoothing}), LocalEngine(CPU))
    batch = None, torch.tensor(LABELS)
    out = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    loss, _ = objective.measure(out, batch, training=True)
    assert objective.measure(out, batch)[0].item() == pytest.approx(smoothed(LOGITS, LABELS, 0.0), rel=1e-12)
    assert loss.item() == pytest.approx(smoothed(LOGITS, LABELS, smoothing), rel=1e-12)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_torchs_weighed_loss(smoothing):
    """Is PyTorch's own, of labels and of shares of classes, of which PyTorch's mean would divide by the examples."""
    objective = Objective(recipe.load("digits", {"label_smoothing": smoothing, "mixup": 1.0}), LocalEngine(CPU))
    weights = torch.linspace(0.5, 3, np.shape(LOGITS)[1], dtype=torch.float64)
    objective.weigh(weights[:-1].tolist(), CPU)
    weights[-1] = 1.0  # as it has none
    out, labels = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True), torch.tensor(LABELS)
    total, seen = objective.measure(out, (None, labels), training=True)
    expected = F.cross_entropy(out, labels, weights, label_smoothing=smoothing).item()
    assert total.item() / seen.metrics["loss"][1].item() == pytest.approx(expected, rel=1e-12)
    shares = F.one_hot(labels, len(weights)).float()
    of_shares, seen = objective.measure(out, (None, shares), training=True)
    assert of_shares.item() / seen.metrics["loss"][1].item() == pytest.approx(expected, rel=1e-12)
    assert seen.metrics["acc1"][0] == (out.argmax(1) == labels).sum()
    valid, seen = objective.measure(out, (None, labels))
    assert valid.item() / seen.metrics["loss"][1].item() == pytest.approx(smoothed(LOGITS, LABELS, 0.0), rel=1e-12)


@needs_tensorflow
@pytest.mark.xdist_group("tensorflow")  # whose launch it is
def test_tensorflows_smoothed_loss(world):
    (results,) = world("alone-1", "tensorflow").results["smoothed"]
    assert results == pytest.approx([smoothed(LOGITS, LABELS, s) for s in SMOOTHINGS], rel=1e-12)


@pytest.mark.slow
def test_smoothing_is_for_training_alone(tmp_path, train_here):
    argv = ["digits", "--max-steps", "1", "--epochs", "1", "--warmup-epochs", "0", "--base-lr", "1e-9"]
    losses = {}
    for smoothing in ("0", "0.5"):
        train_here("torch", *argv, "--label-smoothing", smoothing, "--output", tmp_path / smoothing).good()
        (line,) = of_kind("epoch", tmp_path / smoothing)
        losses[smoothing] = line["train_loss"], line["valid_loss"]
    assert losses["0"][0] != pytest.approx(losses["0.5"][0], rel=1e-3)
    assert losses["0"][1] == pytest.approx(losses["0.5"][1], rel=1e-6)


@pytest.mark.slow
def test_a_profile_tells_where_a_step_goes(tmp_path, train_here):
    ended = train_here("torch", "linear", "--epochs", "3", "--profile", "--output", tmp_path).good()
    written = json.loads((tmp_path / "phases.json").read_text())
    assert (written["steps"], written["clock"]) == (10, "the host's clock")
    assert list(written["phases_ms"]) == [*profiler.PHASES, "rest"]
    assert sum(written["phases_ms"].values()) == pytest.approx(written["step_ms"])
    assert all(value > 0 for value in written["phases_ms"].values())
    for line in profiler.table(written["phases_ms"], written["step_ms"], "mean of 10 steps, by the host's clock"):
        assert f"INFO - {line}\n" in ended.out
    traced = {event.get("name") for event in json.loads((tmp_path / "profile.json").read_text())["traceEvents"]}
    assert set(profiler.PHASES) <= traced


@pytest.mark.slow
@needs_horovod
def test_a_profile_under_horovod_has_its_timeline(tmp_path):
    ended = train("torch", "gloo", 2, "linear", "--epochs", "3", "--profile", "--output", tmp_path).good()
    assert ended.out.count("phase            ms      %  (mean of 10 steps, by the host's clock)") == 1
    assert "ALLREDUCE" in (tmp_path / "timeline.json").read_text()
    assert "traceEvents" in json.loads((tmp_path / "profile.json").read_text())


@pytest.mark.slow
def test_a_run_too_short_for_a_profile_says_so(tmp_path, train_here):
    ended = train_here("torch", "linear", "--max-steps", "24", "--profile", "--output", tmp_path).good()
    assert "INFO - the run's 24 steps are too few for a profile: table and trace need 25 steps" in ended.out


class Event:
    """A CUDA event at the time of a clock that only the test moves on."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def elapsed_time(self, other):
        return other.at - self.at


PHASES_MS = {"data": 1.0, "forward": 2.0, "backward": 3.0, "allreduce": 4.0, "update": 5.0, "rest": 5.0}


def test_on_a_gpu_events_are_the_clock(monkeypatch, tmp_path):
    ranges, waits = [], []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    profiled = profiler.Profiler(tmp_path, torch.device("cuda"))
    results = []
    for step in range(profiler.WARM_STEPS + profiler.TIMED_STEPS + 1):
        for index, name in enumerate(profiler.PHASES):
            with profiled.phase(name):
                Event.now += index + 1 if step >= profiler.WARM_STEPS else 1000
        Event.now += 5
        results.append(profiled.step())
    assert results.pop() == [] and not any(results[:-1])
    assert results[-1] == [
        "phase            ms      %  (mean of 10 steps, by CUDA events)",
        *(f"{name:10}{ms:9.2f}{5 * ms:7.1f}" for name, ms in [*PHASES_MS.items(), ("step", 20.0)]),
    ]
    assert profiled.lacking() == ["the run's 14 steps are too few for a profile: table and trace need 25 steps"]
    written = json.loads((tmp_path / "phases.json").read_text())
    assert written == {"steps": 10, "clock": "CUDA events", "step_ms": 20.0, "phases_ms": PHASES_MS}
    assert waits == [1]
    assert ranges[:4] == ["data", "end", "forward", "end"]


GRAPH = {
    "one GPU": ({}, "local", "cuda", True),
    "one CPU": ({}, "local", "cpu", False),
    "ranks": ({}, "ddp", "cuda", False),
    "plain": ({"compile": False}, "local", "cuda", False),
    "with a loss scale": ({"precision": "float16"}, "local", "cuda", False),
    "profiled": ({"profile": True}, "local", "cuda", False),
}


@pytest.mark.parametrize("case", GRAPH)
def test_when_an_update_is_one_graph(case):
    keys, engine, device, expected = GRAPH[case]
    chosen = recipe.load("cifar100:fast", keys)
    assert cuda_graph.is_one_graph(chosen, engine, torch.device(device)) == expected
