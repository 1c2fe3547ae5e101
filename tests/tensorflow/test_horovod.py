"""Every public function of horovod.tensorflow[.keras] on two ranks with different data, beside plain Keras on the data
of both: as Keras 3, as Keras 2 (tf_keras), and through hvdtrain.keras instead of horovod.tensorflow.keras."""

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import warm
from paths import SUPPORT
from ranks import NEEDS, needs_our_horovod, run

pytestmark = [pytest.mark.launched, NEEDS["tensorflow"], needs_our_horovod]
SLOW = ("hvdtrain.keras", ", all", "another mistake", "another backend")
ONLY_CI = ("[Keras 2]",)  # as with Keras 3
FEW = ("fit", "averaged passes", "loss scale", "warm-up", "load_model", "elastic state")
"""The cases of Horovod's Keras modules; all cases take a minute and a half of processor time."""
MORE = (*FEW, "sparse", "tape with groups", "partial tape", "grouped", "batch norm")
"""These, and cases of horovod.tensorflow, whose code for Keras 3 is ours."""
KERAS_2 = pytest.mark.skipif(not find_spec("tf_keras"), reason="no Keras 2: pip install --no-deps tf_keras")


@pytest.mark.parametrize(
    ("module", "keras_2", "cases"),
    [
        ("horovod.tensorflow.keras", "", MORE),
        ("horovod.tensorflow.keras", "", ()),
        ("hvdtrain.keras", "", ()),
        pytest.param("horovod.tensorflow.keras", "1", FEW, marks=KERAS_2),
        pytest.param("horovod.tensorflow.keras", "1", (), marks=KERAS_2),
    ],
    ids=["Keras 3", "Keras 3, all", "hvdtrain.keras", "Keras 2", "Keras 2, all"],
)
def test_every_function_combines_the_ranks(tmp_path, module, keras_2, cases):
    kind = "keras2" if keras_2 else "tensorflow"
    program = warm.command(kind, SUPPORT / "horovod_tensorflow.py", tmp_path, module)
    run("gloo", 2, program, TF_USE_LEGACY_KERAS=keras_2, CASES=",".join(cases)).good()
    for rank in (0, 1):
        results = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert results.keys() == {*cases} if cases else len(results) > 35
        for name, (found, expected) in results.items():
            assert not isinstance(found, str), f"{name}: {found}"
            np.testing.assert_allclose(found, expected, 1e-4, 2e-3 if name == "compression" else 2e-6, err_msg=name)


ENDS = {
    "a name of Keras 2": (
        "keras.optimizers.SGD(lr=0.1)",
        {},
        "it runs unchanged after: pip install --no-deps 'tf_keras~=2.",
    ),
    "another mistake": ("keras.optimizers.SGD(momentum=-1)", {}, "ValueError: "),
    "Keras on another backend": (
        "",
        {"KERAS_BACKEND": "torch"},
        "ImportError: Keras runs on torch, and Horovod averages it",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_ends_a_program_of_keras_2_or_of_another_backend_is_named(case):
    line, environ, last = ENDS[case]
    python = [sys.executable] if environ else warm.command("tensorflow")
    ended = run("alone", 1, [*python, "-c", f"import horovod.keras as hvd, keras\n{line}"], **environ)
    assert ended.code == 1
    assert last in ended.err.strip().splitlines()[-1]
