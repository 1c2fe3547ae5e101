"""Lightning's adapter before any rank computes: names, ranks, refusals."""

import subprocess
import sys

import pytest
from choices import choice
from ranks import NEEDS, clean_environ, needs_lightning
from refusals import refusal

from hvdtrain.core.compatibility import check
from hvdtrain.core.recipe import load
from hvdtrain.errors import DataError, DeviceError, RecipeError
from hvdtrain.launch.topology import Topology

pytestmark = [NEEDS["torch"], needs_lightning]


def output_of(code, **environ):
    environ = {**clean_environ(), **environ}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_command_reads_its_recipe_before_it_loads_a_framework():
    code = "import runpy, sys; sys.argv = ['-m', '-h']\n"
    code += "try: runpy.run_module('hvdtrain.lightning', run_name='__main__', alter_sys=False)\n"
    code += "except SystemExit: print('loaded:', *({'torch', 'lightning', 'horovod'} & set(sys.modules)))"
    assert output_of(code)[-1] == "loaded:"


def test_importing_the_package_registers_the_strategy_without_horovod():
    code = "import sys, hvdtrain.lightning; from lightning.pytorch.strategies import StrategyRegistry\n"
    code += "print('horovod' in StrategyRegistry, 'horovod' in sys.modules, 'tensorflow' in sys.modules)\n"
    code += "from lightning.pytorch import Trainer; import hvdtrain.lightning as ours\n"
    code += "strategy = Trainer(strategy='horovod', accelerator='cpu', logger=False).strategy\n"
    code += "print(type(strategy) is ours.HorovodStrategy, strategy.world_size)"
    assert output_of(code)[-5:] == ["True", "False", "False", "True", "1"]


SLOW = ("made[lightning.pytorch",)
ON_RANK_1 = {f"OMPI_COMM_WORLD_{name}": value for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1"}.items()}


@pytest.mark.parametrize("first", ["lightning.pytorch", "hvdtrain.lightning"])
def test_the_rank_is_known_before_a_trainer_is_made(first):
    code = f"import {first}, hvdtrain.lightning, lightning.pytorch\n"
    code += "from lightning.pytorch.loggers import CSVLogger\n"
    code += "from lightning.pytorch.utilities import rank_zero_only as pytorch\n"
    code += "from lightning.fabric.utilities import rank_zero_only as fabric\n"
    code += "print(pytorch.rank, fabric.rank, type(CSVLogger('/dev/null').experiment).__name__)"
    assert output_of(code, **ON_RANK_1, OMPI_COMM_WORLD_LOCAL_SIZE="2") == ["1", "1", "_DummyExperiment"]
    broken = {**ON_RANK_1, "OMPI_COMM_WORLD_RANK": "none"}
    assert output_of("import hvdtrain.lightning, lightning.pytorch; print('imported')", **broken) == ["imported"]


def test_the_package_lists_its_classes_and_loads_none():
    code = "import sys, hvdtrain.lightning as ours; assert {*ours.MODULES} == {*ours.__all__} <= {*dir(ours)}\n"
    code += "print('loaded:', hasattr(ours, 'Strategy'), *({'torch', 'lightning', 'horovod'} & set(sys.modules)))"
    assert output_of(code) == ["loaded:", "False"]


REFUSED = {
    "adasum": ({"reduction": "adasum"}, "reduction adasum is hvdtrain.torch's; drop it, or train with hvdtrain.torch."),
    "profile": ({"profile": True}, "profile is hvdtrain.torch's; drop it, or train with hvdtrain.torch."),
    "compile": ({"compile": True}, "compile is hvdtrain.torch's; drop it, or train with hvdtrain.torch."),
    "fused float16 clipped": (
        {"precision": "float16", "clip_norm": 1.0, "fused_optimizer": True},
        "clip_norm with precision float16 needs a plain optimizer in Lightning: the fused one unscales by itself; drop "
        "fused_optimizer.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_lightning_cannot_do_is_refused(case):
    overrides, message = REFUSED[case]
    assert refusal(RecipeError, check, choice("horovod", "lightning", load("linear", overrides)), {}) == message


@pytest.mark.parametrize(
    ("devices", "nodes", "fits"),
    [(1, 1, True), (4, 1, True), (4, 2, True), (1, 2, True), (2, 1, False), (4, 3, False), (8, 1, False)],
)
def test_a_trainer_must_fit_the_ranks(devices, nodes, fits):
    from hvdtrain.lightning import RankEnvironment

    environment = RankEnvironment(Topology(5, 8, 1, 4, 1, "n1", "srun", "7"))
    found = environment.global_rank(), environment.world_size(), environment.local_rank(), environment.node_rank()
    assert found == (5, 8, 1, 1)
    if fits:
        environment.validate_settings(devices, nodes)
        return
    assert refusal(DeviceError, environment.validate_settings, devices, nodes) == (
        f"Trainer(devices={devices}, num_nodes={nodes}) must fit the 8 ranks, 4 of them on n1, that srun started; "
        "leave both out, or give devices=4."
    )


def test_rank_0_is_found_where_the_run_or_the_launcher_says(monkeypatch):
    from hvdtrain.lightning import RankEnvironment

    environment = RankEnvironment(Topology(1, 2, 1, 2, None, "n0", "mpirun", None))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMIX_NAMESPACE", "one")
    assert environment.main_address == "127.0.0.1"
    assert environment.main_port == RankEnvironment(Topology(0, 2, 0, 2, None, "n0", "mpirun", None)).main_port
    monkeypatch.setenv("MASTER_ADDR", "n7")
    monkeypatch.setenv("MASTER_PORT", "29")
    assert (environment.main_address, environment.main_port) == ("n7", 29)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_sampler_gives_every_example_once(size):
    from hvdtrain.lightning import UnpaddedSampler

    samplers = [UnpaddedSampler(range(17), rank, size) for rank in range(size)]
    assert [index for sampler in samplers for index in sampler] == list(range(17))
    assert [len(list(sampler)) for sampler in samplers] == [len(sampler) for sampler in samplers]


def test_the_sampler_refuses_ranks_without_an_example():
    from hvdtrain.lightning import UnpaddedSampler

    with pytest.raises(DataError, match=r"^the examples must be at least the 3 ranks, got 2; take fewer ranks\.$"):
        UnpaddedSampler(range(2), 0, 3)


def test_an_unknown_compression_is_refused():
    from hvdtrain.lightning import HorovodStrategy

    with pytest.raises(RecipeError, match=r"^compression must be one of none, fp16, fp64, got 'int8'\.$"):
        HorovodStrategy(compression="int8")
