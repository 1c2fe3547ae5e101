"""A release of Lightning without one of the private members that hvdtrain needs is refused by name."""

from types import SimpleNamespace

from ranks import NEEDS, needs_lightning
from refusals import refusal

pytestmark = [NEEDS["torch"], needs_lightning]


def test_a_member_that_is_not_there_is_named():
    import lightning

    from hvdtrain.errors import LoopError
    from hvdtrain.lightning import private

    assert private.checkpoint_connector(SimpleNamespace(_checkpoint_connector=1)) == 1
    remedy = f"hvdtrain needs a release that it was tried with: pip install lightning=={private.TRIED[-1]}."
    rule = f"lightning {lightning.__version__} has no SimpleNamespace."
    assert refusal(LoopError, private.signals, SimpleNamespace()) == f"{rule}_signal_connector; {remedy}"
    assert refusal(LoopError, private.set_stepped, _trainer(), 1) == f"{rule}_batches_that_stepped; {remedy}"


def _trainer():
    return SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace()))
