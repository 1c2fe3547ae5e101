"""Edits that let Horovod's servers hear only who knows the run's key, and the ranks only the server that knows it."""

from hvdtrain.build.table import Edit

_SERVER = "horovod/runner/http/http_server.py"
_CLIENT = "horovod/runner/http/http_client.py"
_GLOO_RUN = "horovod/runner/gloo_run.py"
_LAUNCH = "horovod/runner/launch.py"
_NETWORK = "horovod/runner/common/util/network.py"
_STORE = "horovod/common/gloo/http_store"
_REQUEST = "third_party/HTTPRequest/include/HTTPRequest.hpp"
_OPEN = "anyone could change, fill and read the store"
_IMPOSTOR = "whoever took the port could hand out addresses, or keep the ranks waiting"

_BOUNDED = Edit(
    "a server that strangers cannot exhaust",
    "horovod/runner/common/util/bounded.py",
    "",
    '''\
import contextlib
import logging
import socket
import socketserver
import threading
import time

STRANGER_SECONDS = 10


class BoundedServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread a connection; of those that have not proved themselves, the newest max_strangers, for 10 seconds."""

    max_strangers = 256  # no fewer than may rightly come at the same time
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, addr, handler):
        self.lock = threading.Lock()
        self._strangers = {}  # connection -> since when, oldest first
        super().__init__(addr, handler)

    def proven(self, connection):
        """To be called once the connection has proved itself."""
        with self.lock:
            self._strangers.pop(connection, None)

    def process_request(self, request, client_address):
        with self.lock:
            self._strangers[request] = time.monotonic()
            if len(self._strangers) > self.max_strangers:
                self._hang_up_on_the_oldest()
        super().process_request(request, client_address)

    def service_actions(self):
        too_long = time.monotonic() - STRANGER_SECONDS
        with self.lock:
            while self._strangers and next(iter(self._strangers.values())) < too_long:
                self._hang_up_on_the_oldest()

    def _hang_up_on_the_oldest(self):
        oldest = next(iter(self._strangers))
        del self._strangers[oldest]
        with contextlib.suppress(OSError):  # its thread then reads the end
            oldest.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request):
        self.proven(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        logging.debug('a request failed', exc_info=True)
''',
    "idle connections took a thread and a file each, and what a stranger sent made tracebacks",
)

_SIGNED = Edit(
    "signed requests and answers",
    "horovod/runner/http/http_auth.py",
    "",
    '''\
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
            logging.warning('Horovod refused a request from %s, which is not signed with the key of this run '
                            '(it refuses further ones in silence).', client_address[0])


class SignedRequestHandler(BaseHTTPRequestHandler):
    """Its do_ methods are called for signed requests alone, their body whole in rfile; answer() signs."""

    timeout = 3
    server_version = 'Horovod'
    sys_version = ''
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
            logging.error('%s %s: %r', self.command, self.path, error)
            with contextlib.suppress(OSError):
                self.answer(400)

    def parse_request(self):
        return super().parse_request() and self._is_proven() and self._has_its_body()

    def changes_something(self):
        """Whether this request must not be heard twice."""
        return self.command != 'GET'

    def answer(self, status, body=b''):
        self.send_response(status)
        self.send_header('Content-Length', str(len(body)))
        self.send_header('Authentication-Info', _answer_mac(self.server.key, self._nonce, status, body))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass

    def _is_proven(self):
        found = re.fullmatch('Horovod ([0-9a-f]{32}) ([0-9a-f]{64}) ([0-9a-f]{64})',
                             self.headers.get('Authorization', ''))
        if found:
            nonce, self._body_hash, mac = found.groups()
            signed = hmac.compare_digest(mac, _request_mac(self.server.key, self.command, self.path, nonce,
                                                           self._body_hash))
            if signed and (not self.changes_something() or self.server.is_new(nonce)):
                self.server.proven(self.connection)
                self._nonce = nonce
                return True
        self.server.refused(self.client_address)
        self.send_response(401)
        self.send_header('Content-Length', '0')
        self.end_headers()
        return False

    def _has_its_body(self):
        length = self.headers.get('Content-Length', '')
        if not re.fullmatch('[0-9]{1,12}', length) or int(length) > self.server.body_limit:
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


def request(secret_key, addr, port, method, scope, name, body=b''):
    """(status, body) of the answer. Raises RuntimeError where there is none that the key signs."""
    path = '/{}/{}'.format(scope, name)
    server = 'the key-value store at {}:{}'.format(addr, port)
    nonce, body_hash = secrets.token_hex(16), _hash(body)
    headers = {'Content-Length': str(len(body)),
               'Authorization': ' '.join(('Horovod', nonce, body_hash,
                                          _request_mac(secret_key, method, path, nonce, body_hash)))}
    try:
        answer, content = _ask(addr, port, method, path, body, headers)
    except (OSError, http.client.HTTPException) as error:
        raise RuntimeError('{} does not answer: {!r}'.format(server, error)) from None
    if answer.status == 401:
        raise RuntimeError(server + " refused the key of this run: it has another.")
    mac = answer.getheader('Authentication-Info', '').encode('latin-1')
    if not hmac.compare_digest(mac, _answer_mac(secret_key, nonce, answer.status, content).encode()):
        raise RuntimeError(server + ' did not sign its answer with the key of this run: another program is there.')
    return answer.status, content


def _ask(addr, port, method, path, body, headers):
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
    return _mac(key, 'horovod request', method, path, nonce, body_hash)


def _answer_mac(key, nonce, status, body):
    return _mac(key, 'horovod answer', nonce, str(int(status)), _hash(body))


def _mac(key, *parts):
    return hmac.new(key, '\\n'.join(parts).encode('latin-1'), hashlib.sha256).hexdigest()


def _hash(body):
    return hashlib.sha256(body).hexdigest()
''',
    _OPEN,
)

_PYTHON_SERVERS = (
    Edit(
        "Horovod's servers are signed ones",
        _SERVER,
        """\
import socketserver
import threading

from http.server import HTTPServer, SimpleHTTPRequestHandler

from horovod""",
        """\
import threading

from horovod.runner.common.util import secret
from horovod.runner.http.http_auth import SignedRequestHandler, SignedServer
from horovod""",
        _OPEN,
    ),
    Edit(
        "no file handler",
        _SERVER,
        """\
class KVStoreHandler(SimpleHTTPRequestHandler):
    # Set timeout
    timeout = SINGLE_REQUEST_TIMEOUT

""",
        """\
# What all values may have together, in bytes
STORE_LIMIT = 1 << 30


class KVStoreHandler(SignedRequestHandler):
    timeout = SINGLE_REQUEST_TIMEOUT

""",
        "HEAD told anyone which files are there, and a PUT was read without a limit",
    ),
    Edit(
        "a path is a scope and a key",
        _SERVER,
        "        if len(paths) < 3:\n",
        "        if len(paths) != 3:\n",
        "another number of parts was a traceback",
        count=3,
    ),
    Edit(
        "a value is signed",
        _SERVER,
        """\
            self.send_response(200)
            self.send_header("Content-Length", str(len(value)))
            self.end_headers()
            self.wfile.write(value)
""",
        "            self.answer(200, value)\n",
        _IMPOSTOR,
    ),
    Edit(
        "a status is signed",
        _SERVER,
        """\
        self.send_response(status_code)
        self.send_header("Content-Length", 0)
        self.end_headers()

    # Override this function to prevent SimpleHTTPServer printing every
    # request out.
    def log_message(self, format, *args):
        pass
""",
        "        self.answer(status_code)\n",
        _IMPOSTOR,
    ),
    Edit(
        "the store has a limit",
        _SERVER,
        """\
            scope_dict = self.server.cache.setdefault(scope, {})
            scope_dict[key] = value
""",
        """\
            scope_dict = self.server.cache.setdefault(scope, {})
            self.server.stored += len(value)
            if self.server.stored > STORE_LIMIT:  # counted anew: values may have been replaced or deleted
                kept = sum(len(v) for values in self.server.cache.values() for v in values.values())
                self.server.stored = len(value) + kept - len(scope_dict.get(key, b''))
                if self.server.stored > STORE_LIMIT:
                    raise ValueError('the store is full')
            scope_dict[key] = value
""",
        "three PUTs filled the launcher's memory",
    ),
    Edit(
        "the rendezvous is a signed server",
        _SERVER,
        """\
class RendezvousHTTPServer(socketserver.ThreadingMixIn, HTTPServer, object):
    def __init__(self, addr, handler, verbose):
        # This class has to inherit from object since HTTPServer is an old-style
        # class that does not inherit from object.
        super(RendezvousHTTPServer, self).__init__(addr, handler)

        # Cache that provides the store
""",
        """\
class RendezvousHTTPServer(SignedServer):
    def __init__(self, addr, handler, verbose, key):
        super(RendezvousHTTPServer, self).__init__(addr, handler, key)

        # Cache that provides the store
        self.stored = 0
""",
        _OPEN,
    ),
    Edit(
        "all ranks may come at once",
        _SERVER,
        """\
        for slot_info in host_alloc_plan:
            self.scope_size['global'] = slot_info.size
""",
        """\
        for slot_info in host_alloc_plan:
            self.max_strangers = max(self.max_strangers, 2 * slot_info.size)
            self.scope_size['global'] = slot_info.size
""",
        "a rank is a stranger until its request has been read",
    ),
    Edit(
        "the rendezvous has the run's key",
        _SERVER,
        """\
    def __init__(self, verbose=0):
        self._httpd = None
""",
        """\
    def __init__(self, verbose=0, key=None):
        self._key = key or secret.rendezvous_key()
        self._httpd = None
""",
        _OPEN,
    ),
    Edit(
        "the rendezvous listens where the ranks call",
        _SERVER,
        """\
    def start(self, handler_cls=RendezvousHandler):
        self._httpd, port = find_port(
            lambda addr: RendezvousHTTPServer(
                addr, handler_cls, self._verbose))
""",
        """\
    def start(self, handler_cls=RendezvousHandler, address=''):
        self._httpd, port = find_port(
            lambda addr: RendezvousHTTPServer(
                addr, handler_cls, self._verbose, self._key), address)
""",
        "it listened on all interfaces",
    ),
    Edit(
        "the store of horovod.run is a signed server",
        _SERVER,
        """\
class KVStoreHTTPServer(HTTPServer, object):
    def __init__(self, addr, handler, verbose):
        super(KVStoreHTTPServer, self).__init__(addr, handler)

        # Cache that provides the store
""",
        """\
class KVStoreHTTPServer(SignedServer):
    body_limit = STORE_LIMIT  # a function's result may be a whole model

    def __init__(self, addr, handler, verbose, key):
        super(KVStoreHTTPServer, self).__init__(addr, handler, key)

        # Cache that provides the store
        self.stored = 0
""",
        "the launcher unpickled what anyone PUT as a result",
    ),
    Edit(
        "the store of horovod.run has the run's key",
        _SERVER,
        """\
    def __init__(self, verbose):
        self.httpd = None
""",
        """\
    def __init__(self, verbose, key=None):
        self._key = key or secret.rendezvous_key()
        self.httpd = None
""",
        _OPEN,
    ),
    Edit(
        "the store of horovod.run listens where the ranks call",
        _SERVER,
        """\
    def start_server(self):
        self.httpd, port = find_port(
            lambda addr: KVStoreHTTPServer(
                addr, KVStoreHandler, self.verbose))
""",
        """\
    def start_server(self, address=''):
        self.httpd, port = find_port(
            lambda addr: KVStoreHTTPServer(
                addr, KVStoreHandler, self.verbose, self._key), address)
""",
        "it listened on all interfaces",
    ),
    Edit(
        "a port at an address",
        "horovod/runner/util/network.py",
        "def find_port(server_factory):\n",
        "def find_port(server_factory, address=''):\n",
        "it listened on all interfaces",
    ),
    Edit(
        "a port at that address",
        "horovod/runner/util/network.py",
        "            addr = ('', port)\n",
        "            addr = (address, port)\n",
        "as above",
    ),
    Edit(
        "an elastic rank is ready once",
        "horovod/runner/elastic/rendezvous.py",
        "    class ElasticRendezvousHandler(RendezvousHandler):\n",
        """\
    class ElasticRendezvousHandler(RendezvousHandler):
        def changes_something(self):
            asks_its_rank = self.path.startswith('/{}/'.format(GET_RANK_AND_SIZE))  # and is ready with that
            return asks_its_rank or super(ElasticRendezvousHandler, self).changes_something()

""",
        "this GET has an effect, and a recorded one must not have it again",
    ),
)

_PYTHON_CLIENTS = (
    Edit(
        "the store's clients sign",
        _CLIENT,
        """\
from urllib.error import HTTPError, URLError
from urllib.request import Request
from urllib.request import urlopen

from horovod.runner.common.util import codec


def read_data_from_kvstore(addr, port, scope, key):
    try:
        url = "http://{addr}:{port}/{scope}/{key}".format(
            addr=addr, port=str(port), scope=scope, key=key
        )
        req = Request(url)
        resp = urlopen(req)
        # TODO: remove base64 encoding because base64 is not efficient
        return codec.loads_base64(resp.read())
    except (HTTPError, URLError) as e:
        raise RuntimeError("Read data from KVStore server failed.", e)


def put_data_into_kvstore(addr, port, scope, key, value):
    try:
        url = "http://{addr}:{port}/{scope}/{key}".format(
            addr=addr, port=str(port), scope=scope, key=key
        )
        req = Request(url, data=codec.dumps_base64(value, to_ascii=False))
        req.get_method = lambda: "PUT"  # for urllib2 compatibility
        urlopen(req)
    except (HTTPError, URLError) as e:
        raise RuntimeError("Put data input KVStore server failed.", e)
""",
        """\
from horovod.runner.common.util import codec, secret
from horovod.runner.http.http_auth import request


def read_data_from_kvstore(addr, port, scope, key, secret_key=None):
    status, value = request(secret_key or secret.rendezvous_key(), addr, port, 'GET', scope, key)
    if status != 200:
        raise RuntimeError('the key-value store has no {}/{} (status {}).'.format(scope, key, status))
    # TODO: remove base64 encoding because base64 is not efficient
    return codec.loads_base64(value)


def put_data_into_kvstore(addr, port, scope, key, value, secret_key=None):
    encoded = codec.dumps_base64(value, to_ascii=False)
    status, _ = request(secret_key or secret.rendezvous_key(), addr, port, 'PUT', scope, key, encoded)
    if status != 200:
        raise RuntimeError('the key-value store took no {}/{} (status {}).'.format(scope, key, status))
""",
        "they unpickled what whoever had the port answered",
    ),
    Edit(
        "Gloo's rendezvous has the run's key",
        _GLOO_RUN,
        "    rendezvous = RendezvousServer(settings.verbose)\n",
        "    rendezvous = RendezvousServer(settings.verbose, settings.rendezvous_key)\n",
        _OPEN,
        count=2,
    ),
    Edit(
        "Gloo's rendezvous listens at one address",
        _GLOO_RUN,
        "    global_rendezv_port = rendezvous.start()\n",
        "    global_rendezv_port = rendezvous.start(address=server_ip)\n",
        "it listened on all interfaces",
    ),
    Edit(
        "the elastic rendezvous listens later",
        _GLOO_RUN,
        "    global_rendezv_port = rendezvous.start(handler)\n    driver.wait_for",
        "    driver.wait_for",
        "at which address, the common interfaces decide",
    ),
    Edit(
        "the elastic rendezvous listens at one address",
        _GLOO_RUN,
        "    server_ip = network.get_driver_ip(nics)\n",
        "    server_ip = network.get_driver_ip(nics)\n    global_rendezv_port = rendezvous.start(handler, server_ip)\n",
        "it listened on all interfaces",
    ),
    Edit(
        "the elastic function's store",
        _GLOO_RUN,
        """\
        run_func_server = KVStoreServer(verbose=settings.verbose)
        run_func_server_port = run_func_server.start_server()
        put_data_into_kvstore(server_ip, run_func_server_port, 'runfunc', 'func', command_or_func)
""",
        """\
        run_func_server = KVStoreServer(verbose=settings.verbose, key=settings.rendezvous_key)
        run_func_server_port = run_func_server.start_server(server_ip)
        put_data_into_kvstore(server_ip, run_func_server_port, 'runfunc', 'func', command_or_func,
                              settings.rendezvous_key)
""",
        _OPEN,
    ),
    Edit(
        "the elastic function's results",
        _GLOO_RUN,
        "read_data_from_kvstore(server_ip, run_func_server_port, 'runfunc_result', str(i))\n",
        """\
read_data_from_kvstore(server_ip, run_func_server_port, 'runfunc_result', str(i),
                                                    settings.rendezvous_key)
""",
        _OPEN,
    ),
    Edit(
        "the store of horovod.run",
        _LAUNCH,
        """\
        run_func_server = KVStoreServer(verbose=settings.verbose)
        run_func_server_port = run_func_server.start_server()
        put_data_into_kvstore(driver_ip, run_func_server_port,
                              'runfunc', 'func', args.run_func)
""",
        """\
        run_func_server = KVStoreServer(verbose=settings.verbose, key=settings.rendezvous_key)
        run_func_server_port = run_func_server.start_server(driver_ip)
        put_data_into_kvstore(driver_ip, run_func_server_port,
                              'runfunc', 'func', args.run_func, settings.rendezvous_key)
""",
        _OPEN,
    ),
    Edit(
        "the results of horovod.run",
        _LAUNCH,
        "                                                    'runfunc_result', str(i))\n",
        "                                                    'runfunc_result', str(i), settings.rendezvous_key)\n",
        _OPEN,
    ),
)

_SERVICES = (
    Edit(
        "the services' server is bounded",
        _NETWORK,
        "            lambda addr: socketserver.ThreadingTCPServer(\n",
        "            lambda addr: BoundedServer(\n",
        "idle connections took a thread and a file each, and what a stranger sent made tracebacks",
    ),
    Edit(
        "the bounded server for it",
        _NETWORK,
        "from horovod.runner.common.util import secret\n",
        "from horovod.runner.common.util import secret\nfrom horovod.runner.common.util.bounded import BoundedServer\n",
        "as above",
    ),
    Edit(
        "a service knows who has proved himself",
        _NETWORK,
        """\
            def handle(self):
                try:
                    req = server._wire.read(self.rfile)
""",
        """\
            timeout = 10

            def handle(self):
                try:
                    req = server._wire.read(self.rfile, REQUEST_LIMIT)
                    self.server.proven(self.connection)
""",
        "as above",
    ),
    Edit(
        "a request to a service has a limit",
        _NETWORK,
        """\
    def read(self, rfile):
        digest = rfile.read(secret.DIGEST_LENGTH)
        # Unpack message length into 4-byte integer.
        message_len = struct.unpack('i', rfile.read(4))[0]
""",
        """\
    def read(self, rfile, limit=2 ** 31 - 1):
        digest = rfile.read(secret.DIGEST_LENGTH)
        # Unpack message length into 4-byte integer.
        message_len = struct.unpack('i', rfile.read(4))[0]
        if not 0 <= message_len <= limit:
            raise EOFError('a message of {} bytes'.format(message_len))
""",
        "its signature can be checked only once it has been read",
    ),
    Edit(
        "the limit of a request to a service",
        _NETWORK,
        "class PingRequest(object):\n",
        "REQUEST_LIMIT = 1 << 20\n\n\nclass PingRequest(object):\n",
        "as above",
    ),
)

_NATIVE = (
    Edit(
        "SHA-256 and HMAC",
        "horovod/common/gloo/http_auth.h",
        "",
        r"""// Signed requests to the rendezvous server: horovod/runner/http/http_auth.py in C++.
#ifndef HOROVOD_GLOO_HTTP_AUTH_H
#define HOROVOD_GLOO_HTTP_AUTH_H

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>

namespace horovod {
namespace common {
namespace http_auth {

// FIPS 180-4
inline std::string Sha256(const std::string& message) {
  static const uint32_t k[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto rotated = [](uint32_t x, int by) { return x >> by | x << (32 - by); };
  std::string data = message + '\x80';
  data.append((120 - data.size() % 64) % 64, '\0');
  for (int shift = 56; shift >= 0; shift -= 8) {
    data += static_cast<char>(static_cast<uint64_t>(message.size()) * 8 >> shift & 0xff);
  }
  for (size_t at = 0; at < data.size(); at += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      w[i] = 0;
      for (int byte = 0; byte < 4; ++byte) {
        w[i] = w[i] << 8 | static_cast<uint8_t>(data[at + 4 * i + byte]);
      }
    }
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3) + w[i - 7] +
             (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
    }
    uint32_t v[8];
    for (int i = 0; i < 8; ++i) v[i] = h[i];
    for (int i = 0; i < 64; ++i) {
      const uint32_t one = v[7] + (rotated(v[4], 6) ^ rotated(v[4], 11) ^ rotated(v[4], 25)) +
                           ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
      const uint32_t two = (rotated(v[0], 2) ^ rotated(v[0], 13) ^ rotated(v[0], 22)) +
                           ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
      for (int j = 7; j > 0; --j) v[j] = v[j - 1];
      v[4] += one;
      v[0] = one + two;
    }
    for (int i = 0; i < 8; ++i) h[i] += v[i];
  }
  std::string digest;
  for (uint32_t word : h) {
    for (int shift = 24; shift >= 0; shift -= 8) digest += static_cast<char>(word >> shift & 0xff);
  }
  return digest;
}

// RFC 2104
inline std::string HmacSha256(std::string key, const std::string& message) {
  if (key.size() > 64) key = Sha256(key);
  std::string inner(64, '\x36'), outer(64, '\x5c');
  for (size_t i = 0; i < key.size(); ++i) {
    inner[i] ^= key[i];
    outer[i] ^= key[i];
  }
  return Sha256(outer + Sha256(inner + message));
}

inline std::string Hex(const std::string& bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (unsigned char byte : bytes) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

// The bytes of so many pairs of digits; none where a character is no digit.
inline std::string FromHex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    unsigned int byte;
    int read;
    if (std::sscanf(text.substr(i, 2).c_str(), "%2x%n", &byte, &read) != 1 || read != 2) return "";
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

inline std::string Nonce() {
  std::random_device random;
  std::string bytes;
  for (int i = 0; i < 16; ++i) bytes += static_cast<char>(random() & 0xff);
  return Hex(bytes);
}

// In a time that does not depend on where they differ.
inline bool AreSame(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

} // namespace http_auth
} // namespace common
} // namespace horovod

#endif // HOROVOD_GLOO_HTTP_AUTH_H
""",
        "the source tree has neither",
    ),
    Edit(
        "what a rendezvous error is",
        "horovod/common/gloo/gloo_context.h",
        "struct GlooContext {\n",
        """\
// The rendezvous cannot be reached, or shares no key with this rank.
struct RendezvousError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct GlooContext {
""",
        "a rank says in one line what is wrong",
    ),
    Edit(
        "a rendezvous error ends hvd.init()",
        "horovod/common/operations.cc",
        "    global_gloo_context.Initialize(ParseGlooIface());\n",
        """\
    try {
      global_gloo_context.Initialize(ParseGlooIface());
    } catch (const RendezvousError& error) {
      LOG(ERROR) << error.what();
      state.initialization_failed = true;
      return;
    }
""",
        "the process was aborted from a thread of its own",
    ),
    Edit(
        "the store's constructor reads the key",
        _STORE + ".h",
        """\
            int rank)
      : rank_(rank) {
    url_prefix_ +=
        "http://" + server_ip + ":" + std::to_string(port) + "/" + scope + "/";
  }
""",
        "            int rank);\n",
        _OPEN,
    ),
    Edit(
        "the store signs by method and path",
        _STORE + ".h",
        """\
  // Send HTTP request to server, retry if the status code is not 200 (OK) or
  // 404 (Key not found).
  http::Response PerformHTTP(http::Request& request, const std::string& method,
                             const std::string& body);
""",
        """\
  // Send signed HTTP request to server, retry if the status code is not 200 (OK)
  // or 404 (Key not found), or the answer is not signed.
  http::Response PerformHTTP(const std::string& key, const std::string& method,
                             const std::string& body);
""",
        _OPEN,
    ),
    Edit(
        "the store's members",
        _STORE + ".h",
        "  std::string url_prefix_;\n",
        """\
  std::string server_;
  std::string path_prefix_;
  std::string secret_key_;
  int timeout_seconds_;
""",
        _OPEN,
    ),
    Edit(
        "signing for the store",
        _STORE + ".cc",
        '#include "gloo_context.h"\n',
        '#include "gloo_context.h"\n#include "http_auth.h"\n#include "../utils/env_parser.h"\n',
        _OPEN,
    ),
    Edit(
        "the run's key in a rank",
        _STORE + ".cc",
        "void HTTPStore::Finalize() {",
        """\
#define HOROVOD_RENDEZVOUS_KEY "HOROVOD_RENDEZVOUS_KEY"

HTTPStore::HTTPStore(const std::string& server_ip, int port,
                     const std::string& scope, int rank)
    : server_(server_ip + ":" + std::to_string(port)),
      path_prefix_("/" + scope + "/"),
      // An elastic rank waits there until the others are ready.
      timeout_seconds_(scope == HOROVOD_GLOO_GET_RANK_AND_SIZE
                           ? 0 : GetIntEnvOrDefault(HOROVOD_GLOO_TIMEOUT_SECONDS, 10)),
      rank_(rank) {
  const char* key = std::getenv(HOROVOD_RENDEZVOUS_KEY);
  const std::string digits = key == nullptr ? "" : key;
  secret_key_ = http_auth::FromHex(digits);
  if (digits.size() != 64 || secret_key_.size() != 32) {
    throw RendezvousError(HOROVOD_RENDEZVOUS_KEY " must be 64 hexadecimal digits, as horovodrun and horovod.run set "
                          "it, got " + std::to_string(digits.size()) + " characters.");
  }
}

void HTTPStore::Finalize() {""",
        _OPEN,
    ),
    Edit(
        "requests and answers are signed",
        _STORE + ".cc",
        """\
HTTPStore::PerformHTTP(http::Request& request,
                       const std::string& method = HTTP_GET_METHOD,
                       const std::string& body = "") {
  for (int retry_cnt = 0; retry_cnt < MAX_RETRY_TIMES; ++retry_cnt) {
    try {
      http::Response response = request.send(method, body);
      if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND) {
        LOG(WARNING) << "HTTP response not OK, got " << response.status;
      } else {
        return response;
      }
    } catch (std::exception& e) {
      LOG(DEBUG) << "Exception: " << e.what();
    }
""",
        """\
HTTPStore::PerformHTTP(const std::string& key,
                       const std::string& method = HTTP_GET_METHOD,
                       const std::string& body = "") {
  using http_auth::Hex;
  const std::string path = path_prefix_ + key;
  const std::string body_hash = Hex(http_auth::Sha256(body));
  const std::string header = "Authentication-Info: ";
  std::string why;
  for (int retry_cnt = 0; retry_cnt < MAX_RETRY_TIMES; ++retry_cnt) {
    try {
      const std::string nonce = http_auth::Nonce();
      const std::string mac = Hex(http_auth::HmacSha256(
          secret_key_, "horovod request\\n" + method + "\\n" + path + "\\n" + nonce + "\\n" + body_hash));
      http::Request request("http://" + server_ + path);
      http::Response response = request.send(
          method, body, {"Authorization: Horovod " + nonce + " " + body_hash + " " + mac}, timeout_seconds_);
      const std::string answer(response.body.begin(), response.body.end());
      const std::string expected = header + Hex(http_auth::HmacSha256(
          secret_key_, "horovod answer\\n" + nonce + "\\n" + std::to_string(response.status) + "\\n" +
                       Hex(http_auth::Sha256(answer))));
      const bool is_signed = std::any_of(
          response.headers.begin(), response.headers.end(),
          [&](const std::string& line) { return http_auth::AreSame(line, expected); });
      if (is_signed && (response.status == HTTP_OK || response.status == HTTP_NOT_FOUND)) {
        return response;
      }
      if (is_signed) {
        why = "it answered with status " + std::to_string(response.status);
      } else if (response.status == 0) {
        why = "it closed the connection";
      } else if (response.status == 401) {
        why = "it refused the key in " HOROVOD_RENDEZVOUS_KEY ": its own is another";
        break;
      } else {
        why = "its answer is not signed with the key in " HOROVOD_RENDEZVOUS_KEY ": another program listens there";
        break;
      }
    } catch (std::exception& e) {
      why = e.what();
    }
    LOG(DEBUG) << why;
""",
        _IMPOSTOR,
    ),
    Edit(
        "why there is no rendezvous",
        _STORE + ".cc",
        """\
  LOG(ERROR) << "HTTP GET request failed too many times, aborting. See "
                "exception message above.";
  throw std::runtime_error("HTTP request failed.");
""",
        """\
  throw RendezvousError("No rendezvous with the server at " + server_ + ": " + why + ".");
""",
        "a rank says in one line what is wrong",
    ),
    Edit(
        "algorithms for it",
        _STORE + ".cc",
        "#include <cstring>\n",
        "#include <algorithm>\n#include <cstdlib>\n#include <cstring>\n",
        "as above",
    ),
    Edit(
        "no address in a trace",
        _STORE + ".cc",
        """\
request to " << url;
  http::Request request(url);
""",
        """\
request to " << server_ << path_prefix_ << key;
""",
        "a request is made for each try",
        count=3,
    ),
    Edit(
        "no address before a request",
        _STORE + ".cc",
        "  std::string url = url_prefix_ + key;\n",
        "",
        "as above",
        count=3,
    ),
    Edit(
        "a signed GET",
        _STORE + ".cc",
        "PerformHTTP(request, HTTP_GET_METHOD)",
        "PerformHTTP(key, HTTP_GET_METHOD)",
        _OPEN,
    ),
    Edit(
        "a signed PUT",
        _STORE + ".cc",
        "PerformHTTP(request, HTTP_PUT_METHOD, body)",
        "PerformHTTP(key, HTTP_PUT_METHOD, body)",
        _OPEN,
    ),
    Edit(
        "a signed DELETE",
        _STORE + ".cc",
        "PerformHTTP(request, HTTP_DELETE_METHOD)",
        "PerformHTTP(key, HTTP_DELETE_METHOD)",
        _OPEN,
    ),
    Edit(
        "a request may have a time limit",
        _REQUEST,
        """\
                      const std::string& body = "",
                      const std::vector<std::string>& headers = {})
        {
            Response response;
""",
        """\
                      const std::string& body = "",
                      const std::vector<std::string>& headers = {},
                      int timeoutSeconds = 0)
        {
            const auto start = std::chrono::steady_clock::now();
            Response response;
""",
        _IMPOSTOR,
    ),
    Edit(
        "its clock",
        _REQUEST,
        "#include <algorithm>\n#include <functional>\n",
        "#include <algorithm>\n#include <chrono>\n#include <functional>\n",
        "as above",
    ),
    Edit(
        "its socket's time limit",
        _REQUEST,
        "#  include <sys/socket.h>\n",
        "#  include <sys/socket.h>\n#  include <sys/time.h>\n",
        "as above",
    ),
    Edit(
        "a socket waits no longer",
        _REQUEST,
        "            Socket socket(internetProtocol);\n",
        """\
            Socket socket(internetProtocol);
            const timeval wait = {timeoutSeconds, 0};  // 0: for ever
            setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
            setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
""",
        _IMPOSTOR,
    ),
    Edit(
        "an answer has a limit",
        _REQUEST,
        "                responseData.insert(responseData.end(), TEMP_BUFFER, TEMP_BUFFER + size);\n",
        """\
                responseData.insert(responseData.end(), TEMP_BUFFER, TEMP_BUFFER + size);

                if (responseData.size() + response.body.size() + 64 * response.headers.size() > (1 << 24))
                    throw std::runtime_error("the answer is too long");
                if (timeoutSeconds > 0 &&
                    std::chrono::steady_clock::now() - start > std::chrono::seconds(timeoutSeconds))
                    throw std::runtime_error("the answer takes too long");
""",
        _IMPOSTOR,
    ),
)

RENDEZVOUS = (_BOUNDED, _SIGNED, *_PYTHON_SERVERS, *_PYTHON_CLIENTS, *_SERVICES, *_NATIVE)
