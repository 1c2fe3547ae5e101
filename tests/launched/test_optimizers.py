"""Every optimizer resumed on one rank and on two: to the bit what an undisturbed run ends with."""

import pytest
from worlds import RESUMED, on

SLOW = ("tensorflow", "alone", "ddp")
pytestmark = [pytest.mark.launched, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("framework", "launch"), on("alone-1-resumed", "mpi-2-resumed", "ddp-2-resumed"))
def test_a_resumed_run_ends_with_the_same_state(world, framework, launch):
    ranks = world(launch, framework).results["resumed_states"]
    for case in RESUMED[framework]["cases"]:
        whole = ranks[0][case][0]
        assert all(rank[case] == [whole, whole] for rank in ranks), case
    assert len({rank[0] for rank in ranks[0].values()}) == len(ranks[0])
