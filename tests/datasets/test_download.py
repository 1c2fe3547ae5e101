"""Fetching CIFAR-100 from a real web server on this machine."""

import contextlib
import hashlib
import io
import os
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

import pytest
from paths import REPOSITORY
from refusals import refusal

from hvdtrain.datasets import cifar100 as download
from hvdtrain.datasets.base import default_data_dir
from hvdtrain.datasets.cifar100 import download_cifar100
from hvdtrain.errors import DataError

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
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with Server(GOOD) as server:
        server.released.clear()
        command = [sys.executable, "-c", code, tmp_path, server.url, sha256(GOOD)]
        ranks = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
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
    monkeypatch.setattr(download, "MOST_BYTES", 100)
    assert "cannot be fetched (it sends more than 100 bytes)" in refused(tmp_path, sha256(GOOD), GOOD)


def test_a_server_that_sends_a_byte_now_and_then_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "FETCH_SECONDS", 1)
    message = refused(tmp_path, sha256(GOOD), GOOD, pause=0.1)
    assert re.search(r"cannot be fetched \(.* bytes came in 1 s\)", message)


def test_the_published_sum_is_the_one_that_keras_has():
    keras = find_spec("keras")
    if keras is None:
        pytest.skip("needs Keras: make horovod")
    source = Path(keras.origin).parent / "src" / "datasets" / "cifar100.py"
    assert download.SHA256 in source.read_text() and download.URL in source.read_text()


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
