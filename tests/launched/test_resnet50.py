"""ResNet50 itself, for which the other tests that train take a smaller network: one curve on one rank and on two."""

import pytest
from ranks import FRAMEWORKS, programs
from small import WHOLE
from worlds import SYNC, World, furthest

pytestmark = [pytest.mark.launched, pytest.mark.slow, pytest.mark.timeout(900)]

EXACT = [*SYNC, "--base-lr", "1e-3", "--max-steps", "2", "--precision", "float64"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_resnet50_has_one_curve(framework, tmp_path):
    curves = []
    for launcher, ranks in (("alone", 1), ("mpi", 2)):
        folder = tmp_path / launcher
        given = {"trainings": {"given": {"curve": [*EXACT, "--output", str(folder / "curve")]}}}
        results = programs(framework, launcher, ranks, folder, given, **{WHOLE: "1"})
        world = World(ranks, folder, results)
        assert len({rank["state"] for rank in world.of("curve")}) == 1
        assert {rank["parameters"] for rank in world.of("curve")} == {23_528_522}
        curves.append(world.losses("curve"))
    assert len(curves[0]) == 2
    assert furthest(*curves) < 1e-12
