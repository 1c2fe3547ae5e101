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
        with contextlib.suppress(OSError):  # its thread then reads EOF
            oldest.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request):
        self.proven(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        logging.debug("a request failed", exc_info=True)
