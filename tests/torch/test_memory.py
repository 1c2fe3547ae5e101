"""What a step keeps: activations that are computed again, bytes that are kept, and micro-batches that do not fit."""

import copy
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")

from ranks import command, run  # noqa: E402
from refusals import refusal  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils.parametrizations import spectral_norm  # noqa: E402

from hvdtrain.core.recipe import load  # noqa: E402
from hvdtrain.errors import RecipeError  # noqa: E402
from hvdtrain.run import main as runs  # noqa: E402
from hvdtrain.tools import plan  # noqa: E402
from hvdtrain.torch.__main__ import train  # noqa: E402
from hvdtrain.torch.memory import Kept, checkpointed, divided, lack  # noqa: E402
from hvdtrain.torch.objective import Batch  # noqa: E402


class Blocks(nn.Module):
    """Blocks with whatever forward changes or draws."""

    def __init__(self):
        super().__init__()
        self.begin = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8, momentum=None), nn.Dropout(0.5))
            for _ in range(3)
        )

    def forward(self, x):
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().sum()


@pytest.mark.parametrize(
    "patterns", [("true",), ("layers.*",), ("layers.0", "begin"), ("layers.1.0", "layers"), ("layers.*", "!layers.2")]
)
def test_activations_that_are_computed_again_change_no_bit(patterns):
    plain = Blocks()
    ours, found = checkpointed(copy.deepcopy(plain), patterns), []
    for model in (plain, ours):
        torch.manual_seed(0)
        for _ in range(3):
            with Kept(model) as kept:
                loss = model(torch.randn(16, 8))
            loss.backward()
        found.append((loss, [each.grad for each in model.parameters()], list(model.buffers()), kept.bytes))
    (loss, gradients, buffers, kept), (ours_loss, ours_gradients, ours_buffers, ours_kept) = found
    assert torch.equal(loss, ours_loss)
    assert all(map(torch.equal, gradients, ours_gradients)) and all(map(torch.equal, buffers, ours_buffers))
    assert 0 < ours_kept < kept
    assert type(copy.deepcopy(ours).layers[1]).__name__ == type(ours.layers[1]).__name__


BAD = {
    "layr.*": "checkpoint_activations 'layr.*' matches no name.",
    "true": "checkpoint_activations true finds no repeated blocks in the model; name modules, as 0.",
}


@pytest.mark.parametrize("pattern", BAD)
def test_a_pattern_without_a_module_is_refused(pattern):
    model = nn.Sequential(nn.Linear(2, 2)) if pattern == "true" else Blocks()
    assert refusal(RecipeError, checkpointed, model, (pattern,)).startswith(BAD[pattern])


@pytest.mark.parametrize("model", ["resnet50", "torchvision:resnet18"])
def test_the_plan_refuses_a_pattern_without_a_module(model):
    line = refusal(RecipeError, plan.main, ["digits", "--model", model, "--checkpoint-activations", "nosuch*"])
    assert line.startswith("checkpoint_activations 'nosuch*' matches no name. There are conv1, bn1, ")


@pytest.mark.parametrize("value", ["true", "[layer1.*]", "false"])
def test_the_key_is_true_or_patterns(tmp_path, value):
    (tmp_path / "mine.yaml").write_text(f"default:\n  extends: digits\n  checkpoint_activations: {value}\n")
    expected = {"true": ("true",), "false": ()}.get(value, ("layer1.*",))
    assert load(str(tmp_path / "mine.yaml")).checkpoint_activations == expected


def test_the_plan_counts_what_forward_keeps(capsys):
    """64 images through the first convolution, its BatchNorm and ReLU keep 64 x 64 x 8 x 8 numbers three times."""
    found = []
    for flags in ([], ["--checkpoint-activations", "true"]):
        assert plan.main(["digits", "--memory", *flags]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("activations ")]
        found.append(float(line.split()[1].replace(",", "")))
        assert "MiB of a micro-batch of 64 examples are kept for backward: " in line
    assert 100 < found[0] < 110 and found[1] < found[0] / 3
    # of the flags of `plan` itself those without a value may stand before the recipe
    assert plan.main(["--memory", "linear"]) == 0


def test_micro_batches_are_divided_into_neighbours():
    x, y = torch.arange(14).view(7, 2), torch.arange(7)
    assert [len(part[1]) for part in divided((x, y), 4)] == [1, 2, 2, 2]
    assert torch.equal(torch.cat([part[0] for part in divided((x, y), 4)]), x)
    assert len(divided((x, y), 16)) == 7
    parts = divided(Batch({"a": x, "b": [y]}, 7), 2)
    assert [(each.count, len(each.data["b"][0])) for each in parts] == [(3, 3), (4, 4)]
    assert "batches whose tensors have one row for each example" in refusal(
        RecipeError, divided, Batch({"a": x, "n": 7}, 7), 2
    )


def test_errors_that_are_a_lack_of_memory():
    assert lack(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")) == (
        "2.00 GiB could not be had"
    )
    cpu = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 3145728 bytes."
    assert lack(RuntimeError(cpu)) == "3.0 MiB could not be had"
    wrapped = RuntimeError("of the model")
    wrapped.__cause__ = MemoryError()
    assert lack(wrapped) == "memory could not be had"
    assert lack(RuntimeError("something else")) == lack(None) == ""


OWN = """
import resource, torch
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset

def pairs(n=16):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, torch.arange(n) % 3), TensorDataset(x[:4], torch.arange(4) % 3)

class Wide(nn.Module):
    "Keeps 256 MiB of each example; memory ends 1.2 GiB above what is there before its first batch."
    def __init__(self):
        super().__init__()
        self.narrow, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.limit = 0
    def forward(self, x):
        x = self.narrow(x)
        if self.training:
            if not self.limit:
                now = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
                self.limit = now + (1200 << 20)
                resource.setrlimit(resource.RLIMIT_AS, (self.limit, -1))
            x = x + Kept.apply(x)
        return self.head(x)

class Kept(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(torch.empty(len(x), 2 ** 28, dtype=torch.uint8))
        return x.sin()
    @staticmethod
    def backward(context, gradient):
        return gradient * len(context.saved_tensors)
"""


@pytest.mark.parametrize("fits", [True, False])
def test_a_batch_that_memory_does_not_hold(tmp_path, fits):
    """By an address-space limit: the run goes on with smaller micro-batches, or ends with one line."""
    (tmp_path / "wide.py").write_text(OWN)
    keys = {"model": "wide:Wide", "dataset": "wide:pairs", "loss": "cross_entropy", "epochs": 1, "batch_size": 8}
    keys |= {"base_lr": 0.1, "precision": "float64", "log_every_steps": 1, "fit_memory": fits}
    (tmp_path / "wide.yaml").write_text(json.dumps({"default": keys}))
    ended = run("alone", 1, command("torch", "wide.yaml", "--output", "run", "--engine", "local"), cwd=tmp_path)
    if fits:
        ended.good()
        note = "step 1: a micro-batch of 8 examples did not fit into the memory of a rank; each is divided into "
        assert note in ended.out
        assert "the same samples make the same update" in ended.out
        return
    assert ended.code == 1, ended.out
    (line,) = [line for line in ended.lines if line.startswith("OutOfMemoryError: ")]
    assert "rank 0: a micro-batch of 8 examples does not fit at step 1: 2,048.0 MiB could not be had, the peak" in line
    assert line.endswith("; give accumulation_steps: 2 or checkpoint_activations: true or fit_memory: true.")


REFUSED = {
    "compile": (
        ["--compile"],
        "fit_memory goes without compile, which does not let ranks leave a step tog",
    ),
    "sync": (["--batch-norm", "sync"], "fit_memory goes without batch_norm sync, "),
    "several devices": (["--engine", "dataparallel"], "fit_memory goes with engines horovod, ddp and local, got datap"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_fit_memory_does_not_go_with(tmp_path, capsys, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    flags, line = REFUSED[case]
    assert runs.main("torch", ["digits", "--fit-memory", *flags, "--output", "run"], train) == 2
    assert line in capsys.readouterr().err
    assert not Path("run").exists()
