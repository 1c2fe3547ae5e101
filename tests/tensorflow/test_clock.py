"""The clock inside a graph: how long a rank waits for others."""

import json

import pytest
import warm
from paths import SUPPORT
from ranks import needs_tensorflow, run

pytestmark = [pytest.mark.launched, needs_tensorflow]


@pytest.fixture(scope="module")
def found():
    command = warm.command("tensorflow", SUPPORT / "tensorflow_clock.py")
    return json.loads(run("alone", 1, command).good().out.splitlines()[-1])


@pytest.mark.parametrize("how", ["in a graph", "eagerly"])
def test_waiting_is_measured_apart_from_computing(found, how):
    assert found[how] == [[3.0, pytest.approx(0.2)], [3.0, pytest.approx(0.4)]]


def test_the_clock_waits_for_all_gradients_and_no_average_for_the_clock(found):
    """Each gradient is communicated while backward computes the next one."""
    assert found["waited for"] == {
        "average of early": ["early"],
        "average of late": ["late"],
        "began": ["early", "late"],
        "ended": ["average of early", "average of late", "began", "early", "late"],
    }


def test_a_system_clock_that_is_set_back_takes_no_time_away(found):
    assert found["set back"] == 0.0


def test_with_a_gpu_it_is_not_known_how_long_a_rank_waits(found):
    assert found["on a GPU"] == [None, []]


def test_the_gradients_norm_is_that_of_the_first_update_after_a_request(found):
    assert found["norms"] == [None, 10.0, 20.0]


def test_a_batch_of_weight_0_does_not_count(found):
    assert found["totals"] == [2.0, 4.0, {"right": [3.0, 4.0]}]
