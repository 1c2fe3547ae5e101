"""Every public function of horovod.tensorflow[.keras] on two ranks with different data, beside plain Keras on the data
of both: as Keras 3, as Keras 2 (tf_keras), and through hvdtrain.keras instead of horovod.tensorflow.keras."""

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import warm
from marks import marked
from paths import SUPPORT
from ranks import NEEDS, needs_our_horovod, run

pytestmark = [pytest.mark.launched, NEEDS["tensorflow"], needs_our_horovod]
FEW = (
    "fit",
    "plain tape",
    "plain tape and passes",
    "plain tape in a model",
    "averaged passes",
    "loss scale",
    "warm-up",
    "load_model",
    "elastic state",
)
"""The cases of Horovod's Keras modules; all cases take a minute and a half of processor time."""
MORE = (
    *FEW,
    "tape and optimizer of sums",
    "built by its first batch",
    "sparse",
    "tape with groups",
    "partial tape",
    "grouped",
    "batch norm",
)
"""These, and cases of horovod.tensorflow, whose code for Keras 3 is ours."""
OWN_STEP = ("plain tape in a model", "built by its first batch")
KERAS_2 = pytest.mark.skipif(not find_spec("tf_keras"), reason="no Keras 2: pip install --no-deps tf_keras")


@pytest.mark.parametrize(
    ("module", "keras_2", "cases"),
    [
        pytest.param("horovod.tensorflow.keras", "", MORE, id="Keras 3"),
        pytest.param("horovod.tensorflow.keras", "", (), id="Keras 3, all", marks=pytest.mark.slow),
        pytest.param("hvdtrain.keras", "", OWN_STEP, id="hvdtrain.keras, own step", marks=pytest.mark.only_ci),
        pytest.param("hvdtrain.keras", "", (), id="hvdtrain.keras", marks=pytest.mark.slow),
        pytest.param("horovod.tensorflow.keras", "1", FEW, id="Keras 2", marks=[KERAS_2, pytest.mark.only_ci]),
        pytest.param("horovod.tensorflow.keras", "1", (), id="Keras 2, all", marks=[KERAS_2, pytest.mark.slow]),
    ],
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


WITH_KERAS = "import horovod.keras as hvd, keras\n"
ADVICE = "it runs after: pip install --no-deps 'tf_keras~=2."
FIRST_LINE = "import sys, tf_keras; sys.modules['keras'] = tf_keras"
FIRST_LINE_OF_1 = (
    "import sys, horovod.tensorflow, tensorflow.compat.v1 as tf; tf.disable_v2_behavior(); "
    "sys.modules['tensorflow'] = tf"
)
AND_KERAS_OF_1 = "; from tf_keras.api._v1 import keras; sys.modules['keras'] = keras"
ENDS = {
    "a name of Keras 2": (WITH_KERAS + "keras.optimizers.SGD(lr=0.1)", {}, ADVICE),
    "and with another keras": (WITH_KERAS + "keras.optimizers.SGD(lr=0.1)", {}, FIRST_LINE),
    "a loop with a tape": (
        "import horovod.tensorflow as hvd, tensorflow as tf\ntf.keras.metrics.Mean().reset_states()",
        {},
        ADVICE,
    ),
    "a name of TensorFlow 1": (
        "import horovod.tensorflow as hvd, tensorflow as tf\ntf.ConfigProto()",
        {},
        FIRST_LINE_OF_1,
    ),
    "another mistake": (WITH_KERAS + "keras.optimizers.SGD(momentum=-1)", {}, "ValueError: "),
    "Keras on another backend": (
        WITH_KERAS,
        {"KERAS_BACKEND": "torch"},
        "ImportError: Keras runs on torch, and Horovod averages it",
    ),
}


@pytest.mark.parametrize("case", marked(ENDS, slow={"another mistake", "Keras on another backend"}))
def test_what_ends_a_program_of_keras_2_or_of_another_backend_is_named(case):
    line, environ, last = ENDS[case]
    python = [sys.executable] if environ else warm.command("tensorflow")
    ended = run("alone", 1, [*python, "-c", line], **environ)
    assert ended.code == 1
    assert last in ended.err.strip().splitlines()[-1]


OF_KERAS_2 = """
import json, sys
import numpy as np, tensorflow as tf
from hvdtrain.keras.horovod_names import of_keras_2
keras = tf.keras
def known(line):
    try:
        exec(line)
    except Exception as error:
        return of_keras_2(error)
print(json.dumps({line: known(line) for line in sys.argv[1:]}))
"""
REMOVED = (
    "keras.optimizers.legacy.SGD()", "keras.optimizers.SGD(lr=0.1)", "from keras.utils import np_utils",
    "from tensorflow.keras.layers.experimental import preprocessing", "tf.concat([keras.Input((3,))], -1)",
    "keras.Input(5)", "keras.layers.Dense(1).output_shape",
    "keras.Sequential([keras.layers.Dense(1)]).fit(1, 1, workers=3)",
    "keras.backend.set_session(1)", "keras.Input((3,)).get_shape()", "keras.layers.Dense(1, batch_input_shape=(2, 3))",
    "keras.Sequential([keras.layers.Dense(1)]).predict(np.ones((2, 2)), steps=np.ceil(2.0))",
)  # fmt: skip
OTHERS = ("keras.layers.Dense(1)(np.ones(()))", "np.zeros(2).foo", "(lambda a: 1)(b=1)", "tf.constant(1.0).foo")


def test_what_keras_3_no_longer_has_is_told_from_other_mistakes():
    ended = run("alone", 1, [*warm.command("tensorflow"), "-c", OF_KERAS_2, *REMOVED, *OTHERS])
    known = json.loads(ended.good().out)
    assert known == dict.fromkeys(REMOVED, True) | dict.fromkeys(OTHERS, False)


@KERAS_2
def test_with_the_advised_first_line_a_program_that_imports_keras_runs_as_keras_2():
    program = f"{FIRST_LINE}\n{WITH_KERAS}print(keras.__version__, keras.optimizers.SGD(lr=0.1).lr)"
    ended = run("alone", 1, [sys.executable, "-c", program], TF_USE_LEGACY_KERAS="1").good()
    assert ended.out.split()[0].startswith("2.")


SESSION = """
import horovod.tensorflow as hvd, tensorflow as tf
hvd.init()
weight = tf.get_variable("weight", initializer=float(1 + hvd.rank()))
train = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0)).minimize((1.0 + 2 * hvd.rank()) * weight)
with tf.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]) as session:
    session.run(train)
    print("weight", session.run(weight))
"""
FIT = """
import horovod.keras as hvd, keras, numpy as np, tensorflow as tf
hvd.init()
keras.backend.set_session(tf.Session(config=tf.ConfigProto()))
model = keras.models.Sequential([keras.layers.Dense(1, use_bias=False, input_shape=(1,))])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mae")
model.set_weights([np.full((1, 1), 1.0 + hvd.rank())])
x = np.full((1, 1), 1.0 + 2 * hvd.rank())
model.fit(x, x - 9, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], verbose=0)
print("weight", model.get_weights()[0].item())
"""


@KERAS_2
@pytest.mark.only_ci  # as with Keras 2 by itself
@pytest.mark.parametrize(
    "and_keras, program, weight", [("", SESSION, -1.0), (AND_KERAS_OF_1, FIT, 0.0)], ids=["session", "fit"]
)
def test_with_the_advised_first_line_a_program_of_tensorflow_1_starts_alike_and_averages(and_keras, program, weight):
    """On one start, 1, and by the mean of the ranks' gradients, 1 and 3, at the LR."""
    line = FIRST_LINE_OF_1 + and_keras
    ended = run("gloo", 2, [sys.executable, "-c", f"{line}\n{program}"], TF_USE_LEGACY_KERAS="1").good()
    assert ended.out.count(f"weight {weight}\n") == 2


@KERAS_2
def test_a_sum_of_what_a_plain_tape_gave_is_refused():
    program = """
import horovod.tensorflow.keras as hvd, horovod.tensorflow as hvdt, tensorflow as tf
hvd.init()
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvdt.Sum)
optimizer.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
"""
    ended = run("gloo", 2, [*warm.command("keras2"), "-c", program], TF_USE_LEGACY_KERAS="1")
    assert ended.code == 1
    assert "got gradients of a plain tape, and DistributedOptimizer has op=Sum: take hvd.Distributed" in ended.err
