"""A release of Keras without one of the private members that hvdtrain needs is refused by name."""

import pytest
import warm
from ranks import needs_horovod, needs_tensorflow, run

pytestmark = [needs_tensorflow, needs_horovod]

PROGRAM = """
import keras

from hvdtrain.errors import LoopError
from hvdtrain.tensorflow import private

norm = keras.layers.BatchNormalization()
model = keras.Sequential([keras.Input((4,)), norm])
assert private.layers(model)[0] is model and norm in private.layers(model)
private.set_initial_epoch(model, 2)
assert private.initial_epoch(model) == 2

del keras.Layer._flatten_layers, model._initial_epoch, type(norm)._moments
acts = {
    "Sequential._flatten_layers": lambda: private.layers(model),
    "Sequential._initial_epoch": lambda: private.set_initial_epoch(model, 2),
    "BatchNormalization._moments": lambda: private.set_moments_class(norm, object),
}
for name, act in acts.items():
    try:
        act()
    except LoopError as error:
        wanted = f"keras {keras.__version__} has no {name}; hvdtrain needs a release that it was tried with: "
        assert str(error) == f"{wanted}pip install keras=={private.TRIED[-1]}.", error
    else:
        raise AssertionError(name)
"""


@pytest.mark.launched
def test_a_member_that_is_not_there_is_named():
    run("alone", 1, warm.command("tensorflow", "-c", PROGRAM)).good()
