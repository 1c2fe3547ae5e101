"""One global batch on 1, 2 and 4 ranks gives one curve, with every feature; and a resumed run ends with the state of an
undisturbed one."""

import socket

import numpy as np
import pytest
from marks import marked
from ranks import FRAMEWORKS, NEEDS, programs
from small import WHOLE
from worlds import NETWORKS, SYNC, World, alone, furthest, having, of_kind, on

from hvdtrain import datasets

pytestmark = [pytest.mark.launched, pytest.mark.timeout(900)]

SEVERAL = ["gloo-1", "ddp-1", "mpi-2", "gloo-2", "ddp-2", "mpi-4", "gloo-4", "ddp-4"]
on_both = pytest.mark.parametrize("framework", FRAMEWORKS)
torch_alone = NEEDS["torch"]


@pytest.mark.parametrize(
    ("framework", "launch"),
    marked(on(*SEVERAL), slow={"mpi-4", "gloo-4", "gloo-1", "ddp-1", "ddp-4", ("tensorflow", "gloo-2")}),
)
def test_the_line_has_one_curve(world, framework, launch):
    theirs = world("alone-1", framework).losses("line")
    assert len(theirs) == 200
    assert furthest(world(launch, framework).losses("line"), theirs) < 1e-5


@pytest.mark.parametrize(
    ("framework", "launch"),
    marked(on("alone-1", *SEVERAL), slow={"mpi-4", "gloo-4", "gloo-1", "ddp-1", "ddp-4", ("tensorflow", "gloo-2")}),
)
def test_the_line_is_the_least_squares_one(world, framework, launch):
    points = datasets.load("linear").train
    expected = np.polyfit(points.x[:, 0], points.y[:, 0], 1)
    for rank in world(launch, framework).of("line"):
        assert rank["line"] == pytest.approx(expected, abs=1e-2)
    assert world(launch, framework).losses("line")[-10:].mean() == pytest.approx(1 / 12, rel=0.1)


@pytest.mark.parametrize(
    ("framework", "launch"),
    marked(
        on("mpi-2", "mpi-2-more", "gloo-2", "ddp-2", "ddp-2-more", "mpi-4", "gloo-4", "ddp-4"),
        slow={"mpi-2-more", "mpi-4", "gloo-4", "ddp-2-more", "ddp-4", ("tensorflow", "gloo-2")},
    ),
)
def test_all_ranks_end_with_one_state_to_the_bit(world, framework, launch):
    for run in world(launch, framework).results["trainings"][0]:
        assert len({rank["state"] for rank in world(launch, framework).of(run)}) == 1, run


# Steps, and the largest relative difference in any of them. At so small an LR a gradient that is added up instead of
# averaged over two ranks moves a loss by no more than 3e-6.
CURVES = {
    "sync curve": (8, 1e-6),
    "frozen curve": (6, 1e-6),
    "sync float64 curve": (4, 1e-12),
    "frozen float64 curve": (4, 1e-12),
}


@pytest.mark.parametrize(
    ("framework", "launch", "run"),
    marked(
        [
            param
            for launch in (*SEVERAL, "mpi-2-more", "ddp-2-more")
            for run in NETWORKS
            for param in having(launch, run)
        ],
        slow={"mpi-2-more", "sync curve", "frozen float64 curve"},
    ),
)
def test_resnet50_has_one_curve(world, framework, launch, run):
    steps, limit = CURVES[run]
    theirs = world(alone(framework, run), framework).losses(run)
    assert len(theirs) == steps
    assert furthest(world(launch, framework).losses(run), theirs) < limit


# By run: the run of one process with the same curve, and the largest relative difference.
SAME = {
    "line a rank": ("line", 1e-5),  # 25 a rank are the global batch of 100 on 4 ranks alone
    "micro-batches": ("short", 1e-5),
    "clipped": ("clipped", 1e-5),
    "clipped micro-batches": ("clipped", 1e-5),
    "compressed": ("short", 2e-3),
    "bfloat16": ("short", 2e-2),
    "float16": ("short", 2e-2),
    "float16 clipped": ("clipped", 2e-2),
    "split curve": ("frozen curve", 1e-6),
    "split micro-batches curve": ("frozen curve", 1e-6),
    "unfused curve": ("nesterov curve", 1e-5),
    "channels last curve": ("nesterov curve", 1e-4),
    "xla": ("short", 1e-5),
}
COMPARED = ("alone-1", "alone-1-more", "mpi-2", "mpi-2-more", "ddp-2", "ddp-2-more", "mpi-4", "ddp-4")


@pytest.mark.parametrize(
    ("framework", "launch", "run"),
    marked(
        [param for run in SAME for launch in COMPARED for param in having(launch, run)],
        slow={"alone-1-more", "mpi-4", "mpi-2-more", "ddp-4", "ddp-2-more"},
    ),
)
def test_ranks_give_what_one_process_gives(world, framework, launch, run):
    theirs, limit = SAME[run]
    assert furthest(world(launch, framework).losses(run), world("alone-1", framework).losses(theirs)) < limit


@torch_alone
@pytest.mark.parametrize("ranks", marked([2, 4], slow={4}))
@pytest.mark.parametrize("run", ["line", "short", "micro-batches"])
def test_ddp_and_horovod_add_to_the_same_bit(world, ranks, run):
    np.testing.assert_array_equal(world(f"ddp-{ranks}").losses(run), world(f"mpi-{ranks}").losses(run))


@torch_alone
@pytest.mark.parametrize(
    ("launch", "run"), marked([("ddp-2", "compressed bf16"), ("ddp-2-more", "compressed float16")], slow={"ddp-2-more"})
)
def test_ddp_compresses(world, launch, run):
    assert 0 < furthest(world(launch).losses(run), world("alone-1").losses("short")) < 2e-2


@on_both
def test_clipping_changes_the_curve(world, framework):
    one = world("alone-1", framework)
    assert furthest(one.losses("clipped"), one.losses("short")) > 0.1


@on_both
def test_adasum_adds_what_is_at_right_angles(world, framework):
    assert world("mpi-2", framework).results["adasum"] == [[-1.0, -1.0]] * 2  # an average would be half of it


@on_both
def test_adasum_learns(world, framework):
    losses = world("mpi-2", framework).losses("adasum")
    assert losses[-10:].mean() < 0.6 * losses[:3].mean()


@on_both
def test_an_overflow_is_skipped_by_all_ranks(world, framework):
    (first, second, third), other = (rank["seen"] for rank in world("mpi-2", framework).results["overflow"])
    assert [first, second, third] == other
    assert second[0] == first[0] and second[1] == first[1] / 2
    assert third[0] != second[0] and third[1] == second[1]
    assert all(finite for _, _, finite in (first, second, third))


def test_an_update_that_lost_its_gradients_is_made_again(world):
    ranks = world("mpi-2", "torch")
    assert ranks.results["redone"] == [rank["state"] for rank in ranks.of("short")]
    np.testing.assert_array_equal(ranks.losses("redone"), ranks.losses("short"))


@pytest.mark.slow
@on_both
def test_readers_beside_the_loop_change_no_bit(world, framework):
    workers = world("mpi-2-more", framework).losses("workers")
    np.testing.assert_array_equal(workers, world("mpi-2", framework).losses("short"))


@pytest.mark.parametrize(("framework", "launch"), marked(on("mpi-2-more", "ddp-2"), slow={"mpi-2-more"}))
def test_fewer_examples_to_validate_than_ranks(world, framework, launch):
    (epoch,) = of_kind("epoch", world(launch, framework).folder / "few to validate")
    assert epoch["valid_loss"] > 0


@on_both
def test_a_parted_replica_stops_every_rank(world, framework):
    ranks = world("mpi-2", framework)
    for results in ranks.results["parted"]:
        assert results["code"] == 1
    message, other = (results["err"] for results in ranks.results["parted"])
    host = socket.gethostname()
    parted = f"ReplicaError (rank 0 on {host}): after step 30 the ranks differ in weights: rank 1 on {host} has "
    assert message.startswith(parted)
    assert message.endswith("resume from the last checkpoint with the same command, and check that host's memory.\n")
    assert other == ""
    assert of_kind("step", ranks.folder / "parted")[-1]["step"] == 30


@pytest.mark.parametrize(("framework", "launch"), marked(on("gloo-2", "ddp-2-more"), slow={"ddp-2-more", "tensorflow"}))
def test_a_lost_rank_ends_the_other(world, framework, launch):
    ranks = world(launch, framework)
    host = socket.gethostname()
    results, gone = ranks.results["abandoned"]
    assert gone is None
    assert results["code"] == 1
    assert results["err"] == (
        f"AbortedError (rank 0 on {host}): rank 1 on {host} ended without a message: killed, out of memory, or "
        "crashed; all ranks end. The same command continues from the last checkpoint.\n"
    )
    assert of_kind("step", ranks.folder / "abandoned")[-1]["step"] == 26


@on_both
def test_no_process_holds_both_frameworks(world, framework):
    ranks = world("mpi-2", framework)
    for run in ranks.results["trainings"][0]:
        for rank in ranks.of(run):
            assert {"torch", "tensorflow"} & set(rank["modules"]) == {framework}


@pytest.mark.parametrize(
    ("framework", "launch"),
    marked(
        on("alone-1-resumed", "mpi-2-resumed", "ddp-2-resumed"), slow={"mpi-2-resumed", "ddp-2-resumed", "tensorflow"}
    ),
)
def test_with_each_optimizer_a_resumed_run_ends_with_the_same_state(world, framework, launch):
    ranks = world(launch, framework).results["resumed_states"]
    for case, (whole, _) in ranks[0].items():
        assert all(rank[case] == [whole, whole] for rank in ranks), case
    assert len({rank[0] for rank in ranks[0].values()}) == len(ranks[0])


@pytest.mark.slow
@on_both
def test_resnet50_itself_has_one_curve(framework, tmp_path):
    """All other tests train a smaller network in its place."""
    exact = [*SYNC, "--base-lr", "1e-3", "--max-steps", "2", "--precision", "float64"]
    curves = []
    for launcher, ranks in (("alone", 1), ("mpi", 2)):
        folder = tmp_path / launcher
        given = {"trainings": {"given": {"curve": [*exact, "--output", str(folder / "curve")]}}}
        results = programs(framework, launcher, ranks, folder, given, **{WHOLE: "1"})
        world = World(ranks, folder, results)
        assert len({rank["state"] for rank in world.of("curve")}) == 1
        assert {rank["parameters"] for rank in world.of("curve")} == {23_528_522}
        curves.append(world.losses("curve"))
    assert len(curves[0]) == 2
    assert furthest(*curves) < 1e-12
