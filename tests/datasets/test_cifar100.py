"""The CIFAR-100 files: read without trusting them, augmented as Pillow would, and fetched from a web server on this
machine."""

import contextlib
import hashlib
import io
import math
import os
import pickle
import re
import socket
import subprocess
import sys
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from cifar100_files import batch, write
from images import draws
from paths import DATA
from PIL import Image, ImageOps
from refusals import refusal

from hvdtrain import datasets
from hvdtrain.datasets import cifar100
from hvdtrain.datasets.base import default_data_dir
from hvdtrain.datasets.cifar100 import download_cifar100
from hvdtrain.errors import DataError

UNPACK = DATA / "unpack_cifar100.py"


def python2_pickle(contents):
    """As Python 2's cPickle wrote the published files: byte strings, and numpy.core by its old name."""
    data, labels = contents[b"data"], contents[b"fine_labels"]
    shape = b"".join(b"J" + side.to_bytes(4, "little") for side in data.shape)
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    pixels = b"T" + data.nbytes.to_bytes(4, "little") + data.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    array += b"(K\x01(" + shape + b"t" + dtype + b"\x89" + pixels + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x0bfine_labels" + numbers + b"u."


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "cifar-100-python", pickle.dumps(batch(50)), pickle.dumps(batch(10, seed=1)))


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """The published folder with 10,000 real training images."""
    if not UNPACK.is_file():
        pytest.skip(f"{UNPACK} is missing: put the shared data folder beside the repository")
    dest = tmp_path_factory.mktemp("cifar100")
    subprocess.run([sys.executable, UNPACK, dest, "--only", "2"], check=True)
    return dest


def pillow_augmented(image, numbers):
    """The NERSC tutorial's operations, as torchvision calls Pillow for them."""
    top, left = (math.floor(float(number) * 9) for number in numbers[:2])
    padded = ImageOps.expand(Image.fromarray(image), 4)
    cropped = padded.crop((left, top, left + 32, top + 32))
    flipped = ImageOps.mirror(cropped) if numbers[2] < 0.5 else cropped
    return np.asarray(flipped.rotate((float(numbers[3]) * 2 - 1) * 15, Image.Resampling.NEAREST))


EDGES = np.array([0, 0.5, np.nextafter(np.float32(1), np.float32(0))], np.float32)


@pytest.mark.parametrize(
    "numbers",
    [draws(2000), np.stack(np.meshgrid(*[EDGES] * 4), -1).reshape(-1, 4)],
    ids=["random", "smallest, middle and largest draws"],
)
def test_augmentation_equals_pillow_to_the_bit(folder, numbers):
    split = datasets.load("cifar100", data_dir=folder).train
    indices = np.arange(len(numbers)) % len(split)
    plain, _ = split.read(indices, None)
    augmented, _ = split.read(indices, numbers)
    for image, ours, drawn in zip(plain, augmented, numbers, strict=True):
        np.testing.assert_array_equal(ours, pillow_augmented(image, drawn))


def test_the_crop_the_flip_and_the_angle_are_spread_evenly():
    from hvdtrain.datasets import cifar100

    placed = cifar100.placements(draws(20000))
    pixel, inside = cifar100.source_pixels(placed, np.arange(32, dtype=np.int32))
    assert inside.mean() == pytest.approx(0.83, abs=0.02)
    leftmost = pixel[:, 16, 0] % 32 < pixel[:, 16, 31] % 32
    assert leftmost[inside[:, 16, 0] & inside[:, 16, 31]].mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    "to_bytes",
    [python2_pickle, *(lambda b, p=p: pickle.dumps(b, protocol=p) for p in (2, 3, 4))],
    ids=["python 2, as published", "protocol 2", "protocol 3", "protocol 4"],
)
def test_every_published_form_is_read(tmp_path, to_bytes):
    contents = batch(20)
    content = to_bytes(contents)
    assert set(pickle.loads(content, encoding="bytes")) == {b"data", b"fine_labels"}
    dataset = datasets.load("cifar100", data_dir=write(tmp_path / "cifar-100-python", content))
    x, y = dataset.train.read(np.arange(20), None)
    np.testing.assert_array_equal(x, contents[b"data"].reshape(20, 3, 32, 32).transpose(0, 2, 3, 1))
    assert y.tolist() == contents[b"fine_labels"]


def test_the_data_set_is_described_as_in_the_nersc_tutorial(folder, monkeypatch):
    """Whether the folder is named, its parent, or neither."""
    monkeypatch.setenv("HVDTRAIN_DATA", str(folder.parent))
    for data_dir in (folder, folder.parent, None):
        dataset = datasets.load("cifar100", data_dir=data_dir)
        assert (len(dataset.train), len(dataset.valid)) == (50, 10)
        x, y = dataset.train.read(np.array([1, 2]), draws(2))
        assert (x.dtype, x.shape, y.dtype, y.shape) == (np.uint8, (2, 32, 32, 3), np.int64, (2,))
        assert (dataset.classes, dataset.sample_shape) == (100, (32, 32, 3))
        assert dataset.mean == (0.50708, 0.48655, 0.44092)
        assert dataset.std == (0.26733, 0.25644, 0.27615)


def test_draws_decide_whatever_the_batch_and_the_copy(folder):
    split = datasets.load("cifar100", data_dir=folder).train
    numbers, indices = draws(50), np.arange(50)[::-1]
    x, _ = split.read(indices, numbers)
    halves = [split.read(indices[half], numbers[half])[0] for half in (slice(20), slice(20, 50))]
    np.testing.assert_array_equal(np.concatenate(halves), x)
    copy = pickle.loads(pickle.dumps(split))
    np.testing.assert_array_equal(copy.read(indices, numbers)[0], x)


@pytest.mark.slow
def test_real_images(published):
    dataset = datasets.load("cifar100", data_dir=published)
    x, y = dataset.train.read(np.arange(10000), None)
    assert (len(dataset.train), len(dataset.valid)) == (10000, 10000)
    assert len(np.unique(y)) == 100
    assert dataset.mean == pytest.approx((x / 255).mean(axis=(0, 1, 2)), abs=0.01)
    assert dataset.std == pytest.approx((x / 255).std(axis=(0, 1, 2)), abs=0.01)
    numbers = draws(200)
    augmented, _ = dataset.train.read(np.arange(200), numbers)
    for image, ours, drawn in zip(x, augmented, numbers, strict=False):
        np.testing.assert_array_equal(ours, pillow_augmented(image, drawn))


def refusal_of(folder):
    message = refusal(DataError, datasets.load, "cifar100", data_dir=folder)
    assert "\n" not in message
    remedy = f": unpack the published cifar-100-python.tar.gz into {folder.parent}, or leave data_dir out"
    assert message.endswith(remedy)
    return message.removesuffix(remedy)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_truncated_or_missing_file_is_named(folder, split):
    content = (folder / split).read_bytes()
    for kept in (0, 1, 30, 5000):
        (folder / split).write_bytes(content[:kept])
        assert refusal_of(folder).startswith(f"{folder / split} is damaged (")
    (folder / split).unlink()
    assert refusal_of(folder) == f"{folder / split} is missing"


SHAPE = ": wrong image shape: 'data' must be [N, 3 * 32 * 32], got"
LABELS = ": 'fine_labels' must be 5 numbers from 0 to 99"
LACKING = " lacks the array 'data' of uint8 or the list 'fine_labels'"
OBJECTS = " is damaged (UnpicklingError: an array of 'O8', where numbers or text are expected)"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({b"data": np.zeros((5, 784), np.uint8)}, f"{SHAPE} [5, 784]"),
        ({b"data": np.zeros((5, 3, 32, 32), np.uint8)}, f"{SHAPE} [5, 3, 32, 32]"),
        ({b"data": np.zeros((0, 3072), np.uint8)}, f"{SHAPE} [0, 3072]"),
        ({b"fine_labels": [1, 2]}, LABELS),
        ({b"fine_labels": [1, 2, 3, 4, 100]}, LABELS),
        ({b"fine_labels": None}, LACKING),
        ({b"data": [1, 2, 3]}, LACKING),
        ({b"data": np.zeros((5, 3072), np.float32)}, LACKING),
        ({b"data": np.zeros(5, object)}, OBJECTS),
    ],
)
def test_wrong_contents_are_refused(tmp_path, changes, complaint):
    folder = write(tmp_path / "cifar-100-python", pickle.dumps({**batch(5), **changes}, protocol=4))
    assert refusal_of(folder) == f"{folder / 'train'}{complaint}"


class Forged:
    """Pickles as a call of that function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_forged_file_runs_nothing(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    content = pickle.dumps({**batch(5), b"more": Forged(os.mkdir, "ran")}, protocol=protocol)
    folder = write(tmp_path / "cifar-100-python", content)
    complaint = refusal_of(folder)
    assert complaint.startswith(f"{folder / 'train'} is damaged (UnpicklingError: it requests ")
    assert complaint.endswith(", which no CIFAR file needs)")
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-100-python"]


def test_bytes_cannot_be_passed_off_as_pointers(tmp_path):
    """A dtype whose flags deny that it holds objects would let NumPy follow any address in the file."""
    honest = pickle.dumps({**batch(1), b"data": np.zeros(1, [("pointer", "O")])}, protocol=2)
    folder = write(tmp_path / "cifar-100-python", honest)
    assert "where numbers or text are expected" in refusal_of(folder)


def test_no_codec_but_latin1_is_run(tmp_path):
    content = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R."
    folder = write(tmp_path / "cifar-100-python", content)
    assert refusal_of(folder) == f"{folder / 'train'} is damaged (UnpicklingError: the codec 'rot13')"


@pytest.mark.parametrize(
    "named",
    [b"c_codecs\nencode\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy\nndarray\n", b"cnumpy\ndtype\n"],
    ids=["codec", "function", "array", "dtype"],
)
@pytest.mark.parametrize(
    "state", [b"}X\x04\x00\x00\x00codeNs", b"N}X\x0c\x00\x00\x00__defaults__)s\x86"], ids=["entries", "attributes"]
)
def test_a_pickle_cannot_change_the_stand_ins(tmp_path, named, state):
    folder = write(tmp_path / "cifar-100-python", b"\x80\x02" + named + state + b"b.")
    assert "is damaged (TypeError: " in refusal_of(folder)


CONTENT = {"train": b"images", "test": b"more images", "meta": b"names"}


def archive(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-100-python/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


GOOD = archive({**CONTENT, "file.txt~": b"more"})


class Server:
    """Answers every path with the same bytes once it is released, and counts the requests."""

    def __init__(self, body, status=200, promised=None, pause=0):
        self.requests = 0
        self.released = threading.Event()
        self.released.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.requests += 1
                outer.released.wait()
                self.send_response(status)
                self.send_header("Content-Length", str(promised or len(body)))
                self.end_headers()
                if not pause:
                    self.wfile.write(body)
                with contextlib.suppress(OSError):
                    for k in range(len(body) if pause else 0):
                        self.wfile.write(body[k : k + 1])
                        time.sleep(pause)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/cifar.tar.gz"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def sha256(body):
    return hashlib.sha256(body).hexdigest()


def visible(dest):
    return sorted(path.name for path in dest.iterdir() if not path.name.endswith(".lock"))


def test_it_is_fetched_once(tmp_path):
    with Server(GOOD) as server:
        folder = download_cifar100(tmp_path / "new" / "place", server.url, sha256(GOOD))
        assert download_cifar100(tmp_path / "new" / "place", server.url, sha256(GOOD)) == folder
    assert server.requests == 1
    assert folder == tmp_path / "new" / "place" / "cifar-100-python"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT
    assert visible(folder.parent) == ["cifar-100-python"]


def test_processes_that_ask_at_once_fetch_it_once(tmp_path):
    code = (
        "import sys, pathlib; from hvdtrain.datasets.cifar100 import download_cifar100 as get;"
        "print('asking', flush=True);"
        "print(len(list(get(pathlib.Path(sys.argv[1]), *sys.argv[2:]).iterdir())))"
    )
    with Server(GOOD) as server:
        server.released.clear()
        command = [sys.executable, "-c", code, tmp_path, server.url, sha256(GOOD)]
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for rank in ranks:
            assert rank.stdout.readline() == "asking\n"
        server.released.set()
        assert [rank.communicate()[0] for rank in ranks] == ["3\n"] * 2
    assert server.requests == 1
    assert visible(tmp_path) == ["cifar-100-python"]


def refused(dest, expected, body, **served):
    """Why what the server sends, at URL, is refused, which leaves nothing."""
    with Server(body, **served) as server:
        message = refusal(DataError, download_cifar100, dest, server.url, expected)
    assert visible(dest) == []
    return message.replace(server.url, "URL")


def test_a_wrong_checksum_and_a_transfer_cut_short_leave_nothing(tmp_path):
    expected = "0" * 32
    message = f"URL has the SHA-256 {sha256(GOOD)}, not {expected}: try again, or fetch it by hand"
    assert refused(tmp_path, expected, GOOD) == message
    assert "has the SHA-256" in refused(tmp_path, sha256(GOOD), GOOD[:100], promised=len(GOOD))


def test_a_server_that_sends_too_much_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar100, "MOST_BYTES", 100)
    assert "cannot be fetched (it sends more than 100 bytes)" in refused(tmp_path, sha256(GOOD), GOOD)


def test_a_server_that_sends_a_byte_now_and_then_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar100, "FETCH_SECONDS", 1)
    message = refused(tmp_path, sha256(GOOD), GOOD, pause=0.1)
    assert re.search(r"cannot be fetched \(.* bytes came in 1 s\)", message)


def test_the_published_sum_is_the_one_that_keras_has():
    keras = find_spec("keras")
    if keras is None:
        pytest.skip("needs Keras: make horovod")
    source = Path(keras.origin).parent / "src" / "datasets" / "cifar100.py"
    assert cifar100.SHA256 in source.read_text() and cifar100.URL in source.read_text()


def test_a_page_that_is_gone_is_named(tmp_path):
    message = f"URL cannot be fetched (Not Found): fetch it where there is a network, and unpack it into {tmp_path}"
    assert refused(tmp_path, sha256(GOOD), b"", status=404) == message


def test_without_a_network_the_remedy_is_named(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/cifar.tar.gz"
        message = refusal(DataError, download_cifar100, tmp_path, url, sha256(GOOD))
    assert message.startswith(f"{url} cannot be fetched (")
    assert message.endswith(f"): fetch it where there is a network, and unpack it into {tmp_path}")
    assert visible(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    dest = tmp_path / "file"
    dest.touch()
    assert refusal(DataError, download_cifar100, dest, "http://127.0.0.1:1/", "") == (
        f"{dest} cannot take CIFAR-100 (File exists): free some space or choose another folder with HVDTRAIN_DATA"
    )


def test_the_default_folder(monkeypatch):
    for name in ("HVDTRAIN_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value, folder in (
        ("HOME", "/home/me", "/home/me/.cache/hvdtrain/data"),
        ("XDG_CACHE_HOME", "/cache", "/cache/hvdtrain/data"),
        ("HVDTRAIN_DATA", "/data", "/data"),
    ):
        monkeypatch.setenv(name, value)
        assert default_data_dir() == Path(folder)
