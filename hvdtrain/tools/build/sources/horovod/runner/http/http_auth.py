"""HTTP in which both sides prove that they know one key.

A request has `Authorization: Horovod NONCE BODY MAC`: BODY is the body's SHA-256, MAC the HMAC-SHA256 of method, path,
NONCE and BODY. Its answer has `Authentication-Info: MAC`, of the request's NONCE, the status and the body's SHA-256.
horovod/common/gloo/http_auth.h is the same in C++.
"""

import contextlib
import hashlib
import hmac
import http.client
import io
import logging
import re
import secrets
import time
from http.server import BaseHTTPRequestHandler

from horovod.runner.common.util.bounded import BoundedServer

HEADERS_LIMIT = 1 << 14
ANSWER_LIMIT = 1 << 30
CLIENT_SECONDS = 60
TRIES = 3


class SignedServer(BoundedServer):
    """Serves whoever knows the key."""

    body_limit = 1 << 20

    def __init__(self, addr, handler, key):
        super().__init__(addr, handler)
        self.key = key
        self._nonces = set()
        self._refused = False

    def is_new(self, nonce):
        with self.lock:
            new = nonce not in self._nonces
            self._nonces.add(nonce)
            return new

    def refused(self, client_address):
        if not self._refused:
            self._refused = True
            logging.warning(
                "Horovod refused a request from %s, which is not signed with the key of this run "
                "(it refuses further ones in silence).",
                client_address[0],
            )


class SignedRequestHandler(BaseHTTPRequestHandler):
    """Its do_ methods are called for signed requests alone, their body whole in rfile; answer() signs."""

    timeout = 3
    server_version = "Horovod"
    sys_version = ""
    _nonce = None

    def setup(self):
        super().setup()
        self.rfile = _Headers(self.rfile)

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except Exception as error:
            if self._nonce is None:  # a stranger's nonsense, or one who went
                return
            logging.error("%s %s: %r", self.command, self.path, error)
            with contextlib.suppress(OSError):
                self.answer(400)

    def parse_request(self):
        return super().parse_request() and self._is_proven() and self._has_its_body()

    def changes_something(self):
        """Whether this request must not be heard twice."""
        return self.command != "GET"

    def answer(self, status, body=b""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Authentication-Info", _answer_mac(self.server.key, self._nonce, status, body))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

    def _is_proven(self):
        found = re.fullmatch(
            "Horovod ([0-9a-f]{32}) ([0-9a-f]{64}) ([0-9a-f]{64})", self.headers.get("Authorization", "")
        )
        if found:
            nonce, self._body_hash, mac = found.groups()
            signed = hmac.compare_digest(
                mac, _request_mac(self.server.key, self.command, self.path, nonce, self._body_hash)
            )
            if signed and (not self.changes_something() or self.server.is_new(nonce)):
                self.server.proven(self.connection)
                self._nonce = nonce
                return True
        self.server.refused(self.client_address)
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def _has_its_body(self):
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,12}", length) or int(length) > self.server.body_limit:
            self.answer(413)
            return False
        body = self.rfile.read(int(length))
        if _hash(body) != self._body_hash:
            self.answer(400)
            return False
        self.rfile = io.BytesIO(body)
        return True


class _Headers:
    """A connection's file, of whose lines only so many bytes are read."""

    def __init__(self, file):
        self._file = file
        self._left = HEADERS_LIMIT
        self.read = file.read
        self.close = file.close

    def readline(self, size):
        line = self._file.readline(min(size, self._left))
        self._left -= len(line)
        return line


def request(secret_key, addr, port, method, scope, name, body=b""):
    """(status, body) of the answer. Raises RuntimeError where there is none that the key signs."""
    path = f"/{scope}/{name}"
    server = f"the key-value store at {addr}:{port}"
    nonce, body_hash = secrets.token_hex(16), _hash(body)
    headers = {
        "Content-Length": str(len(body)),
        "Authorization": " ".join(
            ("Horovod", nonce, body_hash, _request_mac(secret_key, method, path, nonce, body_hash))
        ),
    }
    try:
        answer, content = _ask(addr, port, method, path, body, headers)
    except (OSError, http.client.HTTPException) as error:
        raise RuntimeError(f"{server} does not answer: {error!r}") from None
    if answer.status == 401:
        raise RuntimeError(f"{server} refused the key of this run: it has another.")
    mac = answer.getheader("Authentication-Info", "").encode("latin-1")
    if not hmac.compare_digest(mac, _answer_mac(secret_key, nonce, answer.status, content).encode()):
        raise RuntimeError(f"{server} did not sign its answer with the key of this run: another program is there.")
    return answer.status, content


def _ask(addr, port, method, path, body, headers):  # noqa: RET503  the last try returns or raises
    for tries_left in reversed(range(TRIES)):
        connection = http.client.HTTPConnection(addr, int(port), timeout=CLIENT_SECONDS)
        with contextlib.closing(connection):
            try:
                connection.request(method, path, body=body, headers=headers)
                answer = connection.getresponse()
                return answer, answer.read(ANSWER_LIMIT)
            except ConnectionResetError:  # the server makes room for newer connections
                if not tries_left:
                    raise
        time.sleep(0.5)


def _request_mac(key, method, path, nonce, body_hash):
    return _mac(key, "horovod request", method, path, nonce, body_hash)


def _answer_mac(key, nonce, status, body):
    return _mac(key, "horovod answer", nonce, str(int(status)), _hash(body))


def _mac(key, *parts):
    return hmac.new(key, "\n".join(parts).encode("latin-1"), hashlib.sha256).hexdigest()


def _hash(body):
    return hashlib.sha256(body).hexdigest()
