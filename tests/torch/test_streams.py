"""What the code takes of GPUs that compute beside the host: copies are waited for, and memory lives as long as it is
read; the engine that divides the layers over devices."""

import gc

import numpy as np
import pytest
from ranks import needs_torch
from streams import CPU, Recorder

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
pytestmark = needs_torch

from hvdtrain import datasets  # noqa: E402
from hvdtrain.core import recipe  # noqa: E402
from hvdtrain.torch import models, resnet  # noqa: E402
from hvdtrain.torch.data import Loader  # noqa: E402
from hvdtrain.torch.engines.cuda_graph import record_cuda_graph  # noqa: E402
from hvdtrain.torch.engines.local import LocalEngine, ModelParallelEngine  # noqa: E402
from hvdtrain.torch.state import Copies  # noqa: E402
from hvdtrain.torch.step import Step  # noqa: E402

GPU = torch.device("cuda", 0)


@pytest.fixture
def recorder():
    with Recorder() as recorder:
        yield recorder


@pytest.mark.parametrize("name", ["linear", "digits"])
def test_a_loader_copies_ahead_on_one_stream(name):
    chosen = recipe.load(name)
    dataset = datasets.load(name)
    wanted = [(indices, None) for indices in np.random.default_rng(1).permutation(100).reshape(4, 25)]
    expected = [pair[0].tolist() for pair in Loader(chosen, dataset, CPU).batches(dataset.train, wanted)]
    with Recorder() as recorder:
        loader = Loader(chosen, dataset, GPU)
        batches = loader.batches(dataset.train, wanted)
        assert next(batches)[0].tolist() == expected[0]
        assert len(recorder.streams[0].under_way) == 2  # the next pair is copied while this one is computed
        recorder.copies.clear()
        for _ in range(2):
            assert [pair[0].tolist() for pair in loader.batches(dataset.train, wanted)] == expected
            assert len(list(loader.batches(dataset.valid, wanted))) == 4
    assert len(recorder.streams) == 1
    assert len(recorder.copies) == 2 * 2 * 4 * 2 and all(pinned for *_, pinned in recorder.copies)


NARROWED, WIDENED = torch.arange(4.0).double() / 3, torch.arange(4.0).half() / 3
MOVED = {  # what a user's data set gives, and the bytes that are to be copied of it
    "narrowed": (NARROWED, 16),
    "widened": (WIDENED, 8),
    "of other numbers": (torch.arange(4), 32),
    "as it is": (torch.ones(4), 16),
}


@pytest.mark.parametrize("case", MOVED)
def test_a_users_batch_is_pinned_as_it_is_copied(recorder, case):
    given, size = MOVED[case]
    loader = Loader(recipe.load("linear"), datasets.load("linear"), GPU)
    recorder.copies.clear()
    found = loader._moved({"x": given})["x"]
    assert recorder.copies == [("cpu", "cuda:0", size, True)]
    assert found.device == GPU and found.dtype == (torch.float32 if given.is_floating_point() else given.dtype)
    assert found.tolist() == given.to(found.dtype).tolist()


def test_a_checkpoints_copies_are_waited_for_once(recorder):
    live = {str(k): torch.full((3, 2), float(k), device=f"cuda:{k % 2}") for k in range(6)}
    live |= {"a part": torch.arange(12.0, device=GPU).reshape(3, 4)[:, 1], "host": torch.ones(2)}
    copies = Copies()
    for offset in (0, 10):
        recorder.log.clear()
        found = copies.copy(live)
        for name in "012345":
            np.testing.assert_array_equal(found[name], np.full((3, 2), int(name) + offset, np.float32))
            live[name].add_(10)
        np.testing.assert_array_equal(found["a part"], [1, 5, 9])
        waits = [line for line in recorder.log if line.startswith("the host waits for cuda")]
        assert sorted(waits) == ["the host waits for cuda:0", "the host waits for cuda:1"]
    assert sum(pinned for *_, pinned in recorder.copies) == len(recorder.copies) == 14


@pytest.mark.parametrize(("parameters", "most"), [(10, 8 * 10), (2**21, 8 * 2**20)], ids=["small", "large"])
def test_a_fingerprint_takes_little_memory(recorder, parameters, most):
    model = torch.nn.Linear(parameters // 2, 2, bias=False).to(GPU)
    recorder.largest = 0
    models.fingerprint(model, True)
    assert recorder.largest <= max(most, 4 * parameters)  # the weights themselves are among what is looked at


def test_garbage_is_collected_before_a_capture_and_not_within(recorder):
    log, (collect, was_enabled) = recorder.log, (gc.collect, gc.isenabled())
    gc.collect = lambda: log.append("collected")
    try:
        replay, results = record_cuda_graph(lambda: log.append(f"collector {gc.isenabled()}") or [7])
        with pytest.raises(ZeroDivisionError):
            record_cuda_graph(lambda: 1 // 0)
    finally:
        gc.collect = collect
    replay()
    mode = "into a graph, {'capture_error_mode': 'thread_local'}"
    assert log == ["collected", mode, "collector False", "end", "collected", mode, "replay"]
    assert results == [7] and gc.isenabled() == was_enabled


def updated(engine, **keys):
    """The losses of two updates, the dtypes of the network's outputs, and the step that made them."""
    chosen = recipe.load("digits", {"seed": 3, "accumulation_steps": 2, **keys})
    step = Step(chosen, engine, models.build(chosen, 10, engine), 0.1)
    step.model.train()
    torch.manual_seed(0)
    batches = [(torch.randn(2, 3, 8, 8), torch.randint(10, (2,))) for _ in range(2)]
    dtypes = []
    step.model.fc.register_forward_hook(lambda layer, given, out: dtypes.append(out.dtype))
    moved = [(x.to(engine.device), y.to(engine.device)) for x, y in batches]
    losses = [float(seen.loss) for _ in range(2) for seen in step(moved, 0.1)]
    return losses, dtypes, step


DIVIDED = {
    "two GPUs": (["cuda:0", "cuda:1"], {}),
    "two GPUs, AdamW": (["cuda:0", "cuda:1"], {"optimizer": "adamw", "nesterov": False, "momentum": 0.0}),
    "GPU and CPU": (["cuda:1", "cpu"], {}),
    "two CPUs, bfloat16": (["cpu", "cpu"], {"precision": "bfloat16"}),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_a_network_on_several_devices_learns_the_same(monkeypatch, case):
    devices, keys = DIVIDED[case]
    monkeypatch.setattr(resnet, "BLOCKS", {"layer1": 1, "layer2": 1})
    expected, dtypes, _ = updated(LocalEngine(CPU), **keys)
    with Recorder() as recorder:
        losses, found, step = updated(ModelParallelEngine(*map(torch.device, devices)), **keys)
        held = {recorder.device_of(each) for each in step.model.parameters()}
        assert held == set(map(torch.device, devices))
        for parameter, slots in step.optimizer.state.items():
            for name, slot in slots.items():
                assert name == "step" or recorder.device_of(slot) == recorder.device_of(parameter), name
    assert losses == expected and found == dtypes
