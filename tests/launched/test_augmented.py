"""Augmentation and unequal classes: both frameworks and 1, 2 and 4 ranks have one curve from one checkpoint, and a run
that was left inside an epoch goes on to the same bits."""

import shutil

import numpy as np
import pytest
import small
from marks import marked
from ranks import needs_horovod, needs_tensorflow, needs_torch, once, programs
from worlds import losses

from hvdtrain.core import network
from hvdtrain.tools import convert

pytestmark = [pytest.mark.launched, needs_torch, needs_tensorflow, needs_horovod, pytest.mark.timeout(900)]

BASE = [
    "digits", "--batch-size", "16", "--log-every-steps", "1", "--precision", "float64", "--batch-norm", "frozen",
    "--base-lr", "1e-3", "--lr-rule", "none", "--warmup-epochs", "0", "--lr-schedule", "constant",
]  # fmt: skip
RUNS = {
    "weighed": ["--class-weights", "balanced", "--sample", "balanced"],
    "mixed": [
        "--augment", "randaugment", "--mixup", "0.4", "--cutmix", "1", "--random-erasing", "0.5",
        "--label-smoothing", "0.1", "--accumulation-steps", "2", "--class-weights", "0=0", "3=2.5",
    ],
    "one probability a class": [
        "--mixup", "0.4", "--loss", "bce_with_logits", "--augment", "trivialaugment", "--augment-repeats", "3",
    ],
}  # fmt: skip
STEPS = 4
RANKS = (1, 2, 4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`trained(framework, ranks)`: the folder of those ranks' runs, all from one checkpoint, and what they returned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "RESNETS", {"resnet50": tuple(small.SMALL_BLOCKS.values())})
        folder = tmp_path_factory.mktemp("augmented")
        first = folder / "first"
        programs(
            "torch", "alone", 1, folder / "results-first", {"initial": {"given": {"": [*BASE, "--output", first]}}}
        )
        convert.main([str(first), "--to", "tensorflow"])

        @once
        def of(framework, ranks):
            own, given = folder / f"{framework}-{ranks}", {}
            source = first.with_name("first-tensorflow") if framework == "tensorflow" else first
            for name, more in RUNS.items():
                for kind, steps in (("whole", STEPS), ("left", 1), ("left", STEPS)):
                    output = own / f"{name}-{kind}"
                    shutil.copytree(source / "checkpoints", output / "checkpoints", dirs_exist_ok=True)
                    argv = [*BASE, *more, "--max-steps", str(steps), "--output", str(output)]
                    given[f"{name} {kind} {steps}" + " curve" * (kind == "whole")] = argv
            launcher = "alone" if ranks == 1 else "mpi"
            return own, programs(framework, launcher, ranks, own / "results", {"trainings": {"given": given}})

        yield of


CASES = [(name, framework, ranks) for name in RUNS for framework in ("torch", "tensorflow") for ranks in RANKS]
ONLY_CI = {("torch", 1), ("torch", 2), ("tensorflow", 2)}
SLOW = {("torch", 4), ("tensorflow", 1), ("tensorflow", 4)}


@pytest.mark.parametrize(("name", "framework", "ranks"), marked(CASES, only_ci=ONLY_CI, slow=SLOW))
def test_one_curve_for_any_framework_and_number_of_ranks(trained, name, framework, ranks):
    folder, results = trained(framework, ranks)
    ours, expected = (losses(each / f"{name}-whole") for each in (folder, trained("torch", 1)[0]))
    assert len(ours) == STEPS and len(set(ours)) == STEPS
    np.testing.assert_allclose(ours, expected, rtol=1e-12)
    for of_rank in results["trainings"]:
        kinds = f"whole {STEPS} curve", f"left {STEPS}"
        whole, left = (of_rank[f"{name} {kind}"]["state"] for kind in kinds)
        assert whole == left, "resumed inside the epoch"
