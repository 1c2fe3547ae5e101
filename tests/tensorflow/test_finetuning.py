"""Which weights of Keras's files a recipe starts from, in a process that has no PyTorch."""

import os
import subprocess
import sys

from paths import REPOSITORY, SUPPORT
from ranks import needs_tensorflow


@needs_tensorflow
def test_weights_of_keras_and_parts_that_learn():
    """TensorFlow and PyTorch's Triton end a process that has both, as pytest's would."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-q",
        "-p",
        "no:cacheprovider",
        SUPPORT / "tensorflow_finetuning.py",
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    ended = subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout and "skipped" not in ended.stdout
