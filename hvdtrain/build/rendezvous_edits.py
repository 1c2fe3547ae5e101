"""Edits that let Horovod's servers hear only who knows the run's key, and its clients only the server that knows it."""

from hvdtrain.build.signed_http import IMPOSTOR, OPEN, SIGNED_HTTP
from hvdtrain.build.signed_http_native import SIGNED_HTTP_NATIVE
from hvdtrain.build.table import Edit

_SERVER = "horovod/runner/http/http_server.py"
_CLIENT = "horovod/runner/http/http_client.py"
_GLOO_RUN = "horovod/runner/gloo_run.py"
_LAUNCH = "horovod/runner/launch.py"
_NETWORK = "horovod/runner/common/util/network.py"

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
        OPEN,
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
        IMPOSTOR,
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
        IMPOSTOR,
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
        OPEN,
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
        OPEN,
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
        OPEN,
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
        OPEN,
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
        OPEN,
    ),
    Edit(
        "the elastic function's results",
        _GLOO_RUN,
        "read_data_from_kvstore(server_ip, run_func_server_port, 'runfunc_result', str(i))\n",
        """\
read_data_from_kvstore(server_ip, run_func_server_port, 'runfunc_result', str(i),
                                                    settings.rendezvous_key)
""",
        OPEN,
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
        OPEN,
    ),
    Edit(
        "the results of horovod.run",
        _LAUNCH,
        "                                                    'runfunc_result', str(i))\n",
        "                                                    'runfunc_result', str(i), settings.rendezvous_key)\n",
        OPEN,
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

RENDEZVOUS = (*SIGNED_HTTP, *_PYTHON_SERVERS, *_PYTHON_CLIENTS, *_SERVICES, *SIGNED_HTTP_NATIVE)
