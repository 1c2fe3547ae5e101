"""A file of arrays: the bytes are those of safetensors' own `save_file`."""

import errno
import fcntl
import hashlib
import os
import random

import numpy as np
import odd_json
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save, save_file

from hvdtrain.record import tensor_file
from hvdtrain.record.checkpoint import ARRAYS, Checkpoint, commit

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


LARGE = {"large": np.arange(1_400_001, dtype=np.float32), "small": np.arange(3)}


def test_blocks_are_small_and_whole(tmp_path):
    sizes = [len(block) for block in tensor_file.blocks(LARGE)]
    save_file(LARGE, tmp_path / "theirs")
    path = commit(tmp_path, Checkpoint(LARGE, {"step": 1}), keep=1)
    assert sizes[:-1] == [tensor_file.BLOCK] * 2
    assert sum(sizes) == (path / ARRAYS).stat().st_size
    assert (path / ARRAYS).read_bytes() == (tmp_path / "theirs").read_bytes()


def never(_: int, direct: bool) -> None:
    if direct:
        raise OSError(errno.EINVAL, "no O_DIRECT here")


WAYS = {  # what replaces _set_direct, whether writes with O_DIRECT are refused, what writes are direct
    "past the page cache, but for the end": (tensor_file._set_direct, False, [True, True, False]),
    "a file system without O_DIRECT": (never, False, [False] * 3),
    "one that refuses each such write": (tensor_file._set_direct, True, [False] * 3),
}


@pytest.mark.parametrize(("set_direct", "refused", "direct"), WAYS.values(), ids=WAYS)
def test_the_bytes_are_the_same_past_the_page_cache_and_through_it(set_direct, refused, direct, tmp_path, monkeypatch):
    found, write = [], os.write

    def watched(file: int, block: memoryview) -> int:
        is_direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and (refused or len(block) % 4096):
            raise OSError(errno.EINVAL, "Invalid argument")
        found.append(is_direct)
        return write(file, block[: 1 << 20] if len(found) == 2 else block)  # once not all of it

    monkeypatch.setattr(tensor_file, "_set_direct", set_direct)
    monkeypatch.setattr(os, "write", watched)
    tensor_file.write(tmp_path / "ours", LARGE, lambda block: None)
    assert (tmp_path / "ours").read_bytes() == save(LARGE)
    assert found == [direct[0], direct[1], direct[1], direct[2]]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSPC])
def test_what_the_page_cache_refuses_too_is_raised(number, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(number, "refused")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(OSError, match="refused"):
        tensor_file.write(tmp_path / "ours", LARGE, lambda block: None)


def test_a_dtype_that_the_format_has_not():
    with pytest.raises(SafetensorError, match=r"^x is of complex128, which the format has not$"):
        list(tensor_file.blocks({"x": np.zeros(2, np.complex128)}))
