"""A file of arrays: the bytes are those of safetensors' own `save_file`."""

import hashlib
import random

import numpy as np
import odd_json
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save, save_file

from hvdtrain.run import tensor_file
from hvdtrain.run.checkpoint import ARRAYS, Checkpoint, commit

ODD_NAMES = ["", "é", 'a"b\\', "\x01\x7f\n\t", "\u2028", "😀", "b", "B", "a.b"]


def drawn(draw: random.Random) -> dict[str, np.ndarray]:
    """Arrays of all dtypes, of odd names and shapes, some not contiguous."""
    arrays = {}
    for count in range(draw.randrange(12)):
        shape = [draw.choice([0, 1, 2, 3, 5]) for _ in range(draw.randrange(4))]
        array = np.array(np.random.default_rng(count).integers(0, 2, shape)).astype(
            draw.choice(list(tensor_file.NAMES))
        )
        arrays[draw.choice(ODD_NAMES) + draw.choice(ODD_NAMES)] = array.T if draw.random() < 0.3 else array
    return arrays


def test_the_bytes_are_the_librarys(tmp_path):
    draw = random.Random(odd_json.SEED)
    for count in range(200):
        arrays, digest = drawn(draw), hashlib.sha256()
        contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        path = tmp_path / str(count)
        tensor_file.write(path, arrays, digest.update)
        content = path.read_bytes()
        assert content == save(contiguous), arrays
        assert digest.hexdigest() == hashlib.sha256(content).hexdigest()


def test_blocks_are_small_and_whole(tmp_path):
    arrays = {"large": np.arange(700_001, dtype=np.float32), "small": np.arange(3)}
    sizes = [len(block) for block in tensor_file.blocks(arrays)]
    assert sizes[1:] == [24, 1 << 20, 1 << 20, 4 * 700_001 - (2 << 20)]
    save_file(arrays, tmp_path / "theirs")
    path = commit(tmp_path, Checkpoint(arrays, {"step": 1}), keep=1)
    assert (path / ARRAYS).read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_dtype_that_the_format_has_not():
    with pytest.raises(SafetensorError, match=r"^x is of complex128, which the format has not$"):
        list(tensor_file.blocks({"x": np.zeros(2, np.complex128)}))
