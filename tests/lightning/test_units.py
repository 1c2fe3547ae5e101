"""The Lightning adapter before any rank trains: imports, names, ranks, refusals."""

import json
import subprocess
import sys

import pytest
import warm
from choices import choice
from marks import marked
from ranks import NEEDS, clean_environ, needs_lightning
from refusals import refusal

from hvdtrain.core.compatibility import check_choice
from hvdtrain.core.recipe import load
from hvdtrain.errors import RecipeError

pytestmark = [NEEDS["torch"], needs_lightning]


def printed_by(code, *command, **environ):
    """What the code prints, in a bare Python or in a process forked by `command`, as words."""
    done = subprocess.run(
        [*(command or [sys.executable, "-c"]), code],
        capture_output=True,
        text=True,
        check=False,
        env={**clean_environ(), **environ},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_command_reads_its_recipe_before_it_loads_a_framework():
    code = "import runpy, sys; sys.argv = ['-m', '-h']\n"
    code += "try: runpy.run_module('hvdtrain.lightning', run_name='__main__', alter_sys=False)\n"
    code += "except SystemExit: print('loaded:', *({'torch', 'lightning', 'horovod'} & set(sys.modules)))"
    assert printed_by(code)[-1] == "loaded:"


def test_the_package_lists_its_classes_and_loads_none():
    code = "import sys, hvdtrain.lightning as ours; assert {*ours.MODULES} == {*ours.__all__} <= {*dir(ours)}\n"
    code += "print('loaded:', hasattr(ours, 'Strategy'), *({'torch', 'lightning', 'horovod'} & set(sys.modules)))"
    assert printed_by(code) == ["loaded:", "False"]


ON_RANK_1 = {f"OMPI_COMM_WORLD_{name}": value for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1"}.items()}
IMPORTED = """
import os, sys
import {first}, hvdtrain.lightning as ours, lightning.pytorch
from lightning.fabric.utilities import rank_zero_only as fabric
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero, rank_zero_only as pytorch

print("horovod" in StrategyRegistry, "horovod" in sys.modules, "tensorflow" in sys.modules)
print(pytorch.rank, fabric.rank, type(CSVLogger("/dev/null").experiment).__name__)
strategy = Trainer(strategy="horovod", accelerator="cpu", logger=False).strategy
print(type(strategy) is ours.HorovodStrategy, strategy.world_size)
os.environ["OMPI_COMM_WORLD_RANK"] = "none"
ours._know_rank(rank_zero)
print("not refused")
"""


@pytest.mark.parametrize("first", marked(["lightning.pytorch", "hvdtrain.lightning"], slow={"lightning.pytorch"}))
def test_importing_the_package_registers_the_strategy_without_horovod_and_knows_the_rank(first):
    words = printed_by(IMPORTED.format(first=first), **ON_RANK_1, OMPI_COMM_WORLD_LOCAL_SIZE="2")
    assert words[:3] == ["True", "False", "False"]
    assert words[3:6] == ["1", "1", "_DummyExperiment"]
    assert words[-4:] == ["True", "2", "not", "refused"]


REFUSED = {
    "adasum": ({"reduction": "adasum"}, "reduction adasum is hvdtrain.torch's; drop it, or train with hvdtrain.torch."),
    "profile": ({"profile": True}, "profile is hvdtrain.torch's; drop it, or train with hvdtrain.torch."),
    "compile": ({"compile": True}, "compile is hvdtrain.torch's; drop it, or train with hvdtrain.torch."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_lightning_cannot_do_is_refused(case):
    overrides, message = REFUSED[case]
    assert refusal(RecipeError, check_choice, choice("horovod", "lightning", load("linear", overrides)), {}) == message


UNITS = """
import contextlib
import json
import os
import re
import sys
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.topology import Topology
from hvdtrain.lightning import HorovodStrategy, RankEnvironment

def refused(make, *given, **named):
    try:
        make(*given, **named)
    except HvdtrainError as error:
        return f"{type(error).__name__}: {error}"

environment = RankEnvironment(Topology(5, 8, 1, 4, 1, "n1", "srun", "7"))
local = [RankEnvironment(Topology(rank, 2, rank, 2, None, "n0", "mpirun", None)) for rank in (0, 1)]
found = {
    "ranks": [getattr(environment, name)() for name in ("global_rank", "world_size", "local_rank", "node_rank")],
    "fits": [refused(environment.validate_settings, *each) for each in ((1, 1), (4, 1), (4, 2), (1, 2))],
    "does not fit": [refused(environment.validate_settings, *each) for each in ((2, 1), (4, 3), (8, 1))],
    "address": [local[1].main_address, local[0].main_port == local[1].main_port],
    "compression": refused(HorovodStrategy, compression="int8"),
}
os.environ |= {"MASTER_ADDR": "n7", "MASTER_PORT": "29"}
found["given address"] = [local[1].main_address, local[1].main_port]
from torch import nn
from hvdtrain.lightning.program import Program
program = object.__new__(Program)
program.module = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.1))
found["curve"] = [program.curve_line(size) for size in (1, 2)]
import torch
from lightning.pytorch import LightningModule
from hvdtrain.lightning import decisions, environment

class Two(environment.RankDDPStrategy):
    world_size = 2

strategy, found["no mean"] = Two(), []
strategy._lightning_module, decisions.rank_zero_info = program.module, found["no mean"].append
out, labels = torch.randn(3, 2, requires_grad=True), torch.tensor([0, 1, -100])
for _ in range(2):
    strategy.pre_backward(nn.functional.cross_entropy(out, labels) / 1)

def gathered(module, z):
    torch.ops._c10d_functional.all_gather_into_tensor(z, 2, "ranks")

class Module(LightningModule):
    losses = {
        "mean": lambda module, z: z.square().mean(),
        "sum": lambda module, z: z.square().sum(),
        "of the batch": lambda module, z: (z @ z.T).logsumexp(1).mean(),
        "drawn": lambda module, z: (z[torch.randperm(len(z))].T @ z).trace(),
        "of the trainer": lambda module, z: z.mean() * module.trainer.current_epoch,
        "gathered": gathered,
        "queue": lambda module, z: (z @ module.queue.T).logsumexp(1).mean(),
        "by hand": lambda module, z: z.sum(),
    }

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        self.register_buffer("queue", torch.eye(2))
        self.kept = []

    def training_step(self, batch, batch_idx):
        print("printed")
        self.log("z", batch[0].mean())
        z = self.net(batch[0])
        loss = self.losses[self.loss](self, z)
        self.queue.copy_(z.detach()[:2])
        self.kept.append(loss)
        return {"loss": loss}

module, batch, found["by halves"] = Module(), (torch.randn(8, 2), ["text"]), {}
for module.loss in module.losses:
    module.automatic_optimization = module.loss != "by hand"
    before = torch.get_rng_state()
    found["by halves"][module.loss] = [
        re.sub(r" \\(.*|<string> line \\d+: ", "", line) for line in decisions.no_mean(module, batch, 0)
    ]
    assert torch.equal(torch.get_rng_state(), before) and module.training and not module.kept
    assert torch.equal(module.queue, torch.eye(2))
strategy = Two()
strategy._lightning_module, strategy.model, module.loss = module, module, "of the batch"
module.automatic_optimization = True
with contextlib.redirect_stdout(None):
    strategy.pre_backward(strategy.training_step(batch, 0)["loss"] / 1)
found["no mean"][1:] = [line.partition(" (")[0] for line in found["no mean"][1:]]
json.dump(found, sys.stdout)
"""
UNKNOWN = (
    "whether loss of Module is a mean over examples is not known: a copy of the module, without a Trainer and in "
    "inference,"
)
FOUND = {
    "ranks": [5, 8, 1, 1],
    "fits": [None] * 4,
    "does not fit": [
        f"DeviceError: Trainer(devices={devices}, num_nodes={nodes}) must fit the 8 ranks, 4 of them on n1, that srun "
        "started; leave both out, or give devices=4."
        for devices, nodes in ((2, 1), (4, 3), (8, 1))
    ],
    "address": ["127.0.0.1", True],
    "compression": "RecipeError: compression must be one of none, fp16, fp64, got 'int8'.",
    "given address": ["n7", 29],
    "no mean": [
        "Sequential: cross_entropy with weights or labels that are left out is no mean over examples: the result "
        "depends on the number of ranks; hl.mean_loss makes it one",
        "loss of Module is no mean over examples",
    ],
    "by halves": {
        **{of: [] for of in ("mean", "queue", "by hand")},
        **{of: ["loss of Module is no mean over examples"] for of in ("sum", "of the batch")},
        "drawn": [f"{UNKNOWN} gives another one each time"],
        "of the trainer": [f"{UNKNOWN} raises RuntimeError: Module is not attached to a `Trainer`."],
        "gathered": [f"{UNKNOWN} raises RuntimeError: it communicates."],
    },
    "curve": [
        "",
        "depends on the number of ranks: BatchNorm (0) normalises by each rank's part of the batch "
        "(sync_batchnorm=True with RankDDPStrategy makes it equal); dropout draws its random numbers on each rank (a "
        "model without it makes it equal)",
    ],
}


@pytest.fixture(scope="module")
def units():
    """What the classes do that need no other rank, in a process in which Lightning is loaded."""
    return json.loads(" ".join(printed_by(UNITS, *warm.command("lightning", "-c"), PMIX_NAMESPACE="one")))


@pytest.mark.parametrize("name", FOUND)
def test_ranks_and_refusals(units, name):
    assert units[name] == FOUND[name]


BARS = """
from types import SimpleNamespace
from lightning.pytorch import Trainer
from hvdtrain.launch.topology import Topology
from hvdtrain.lightning import FaultTolerance
from hvdtrain.terminal import SCREEN

bars = {}
for SCREEN.display in ("shared", "lines"):
    run, process = FaultTolerance("run"), SimpleNamespace(topology=Topology.alone())
    trainer = Trainer(accelerator="cpu", callbacks=[run], logger=False, enable_checkpointing=False)
    run._session = SimpleNamespace(is_joined=True, engine="local", process=process, opened=lambda engine: None)
    run.setup(trainer, None, "fit")
    bars[SCREEN.display] = trainer.progress_bar_callback.is_enabled
print(*bars.values())
"""


PLAIN_DDP = """
from types import SimpleNamespace
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from hvdtrain.lightning import FaultTolerance
for is_rank_0 in (False, True):
    run = FaultTolerance("run")
    trainer = SimpleNamespace(callbacks=[run], fast_dev_run=False, world_size=2, strategy=DDPStrategy())
    trainer.is_global_zero = is_rank_0
    try:
        run.setup(trainer, None, "fit")
    except SystemExit as error:
        print(error.code)
"""


def test_lightnings_own_strategy_is_refused_in_one_line_of_rank_0():
    command = [*warm.command("lightning", "-c"), PLAIN_DDP]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environ())
    assert done.stdout.split()[-2:] == ["2", "2"]
    rule = "LoopError: FaultTolerance needs the ranks of strategy='horovod' or hl.RankDDPStrategy(), got DDPStrategy; "
    assert [line for line in done.stderr.splitlines() if "Error" in line] == [f"{rule}give the Trainer one of them."]


def test_no_bar_of_lightnings_where_a_launcher_would_tear_it():
    shown = printed_by(BARS, *warm.command("lightning", "-c"))
    assert shown[-2:] == ["True", "False"]  # behind a terminal, through a launcher
