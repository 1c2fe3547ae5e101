"""The part of `make check` that looks for known vulnerabilities, against a service of the test's own."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import audit
import pytest


class Service(BaseHTTPRequestHandler):
    """Knows two vulnerabilities, both of requests."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = [{"id": f"PYSEC-{number}", "aliases": [], "summary": "it leaks", "affected": []} for number in (1, 2)]
        answer = {"vulns": known} if request["package"]["name"] == "requests" else {}
        self.send_response(502 if request["package"]["name"] == "broken" else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments):
        """Says nothing."""


@pytest.fixture
def service():
    server = HTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def audited(tmp_path, url, *names):
    for name in names:
        (tmp_path / f"{name}-2.0.dist-info").mkdir()
        (tmp_path / f"{name}-2.0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n"
        )
    where = [f"--path={tmp_path}", f"--cache-dir={tmp_path}/cache"]
    return audit.main([*where, "--vulnerability-service=osv", f"--osv-url={url}"])


def test_a_known_vulnerability_fails_the_check_but_for_one_with_a_reason(tmp_path, service, capsys, monkeypatch):
    monkeypatch.setitem(audit.IGNORED, "PYSEC-2", "nothing here requests it")
    assert audited(tmp_path, service, "requests", "numpy") == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("pip-audit: requests 2.0 has PYSEC-1: ")
    assert printed[1:] == ["pip-audit: 2 packages, 1 vulnerabilities"]


@pytest.mark.parametrize("name", ["broken", pytest.param("numpy", marks=pytest.mark.slow)])
def test_a_service_that_cannot_be_reached_is_reported_and_fails_nothing(tmp_path, service, capsys, name):
    assert audited(tmp_path, service if name == "broken" else "http://127.0.0.1:9/", name) == 0
    assert re.fullmatch("pip-audit: NOT AUDITED, the service cannot be reached: .*\n", capsys.readouterr().out)


def test_what_the_service_does_not_know_is_named(capsys):
    unknown = {"name": "horovod", "skip_reason": "not found"}
    assert audit._report([unknown]) == 0
    assert audit._report([unknown, {"name": "numpy", "version": "2", "vulns": []}]) == 0
    assert capsys.readouterr().out == (
        "pip-audit: NOT AUDITED, the service knows none of 1 packages\n"
        "pip-audit: 1 packages, 0 vulnerabilities; unknown to the service: horovod\n"
    )


def test_a_wrong_call_is_no_missing_service(capsys):
    assert audit.main(["--no-such-flag"]) == 1
    assert "unrecognized arguments" in capsys.readouterr().err
