"""Acts as another user of the same node, who knows what all users may know: `stranger.py WHAT JSON`, with his `uid`.

WHAT is one of

- `joins`: calls itself a rank of the run, and reports its failure;
- `leads`: takes rank 0's port before rank 0, and answers ranks as rank 0 does;
- `relays`: takes that port, and passes on what rank 0 and a rank send;
- `squats`: takes some ports, and sends nothing;
- `idles`: connects, and sends nothing or reads nothing;
- `floods`: the same, as fast as it can.

Prints a line when it is ready, and one for each success.
"""

import contextlib
import encodings.idna  # noqa: F401  connecting needs it, and the other user cannot read its file
import json
import os
import select
import socket
import sys
import threading
import time

ENDPOINT = {"host": "evil\x1b[2Jhost", "node": 0, "local_rank": 1, "address": "127.0.0.1", "port": 1}
MESSAGE = "\x1b[31mYou have been hacked\x1b[0m"
NONCE = "0" * 32


def lines(*messages):
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


def member(token):
    """What a rank sends: in the protocol without keys, which hvdtrain had before, and in today's, unsigned and with a
    wrong signature."""
    before = [
        {"is": "hello", "token": token},
        {"is": "here", "token": token, "rank": 1, "seat": ENDPOINT},
        {"is": "ready"},
        {"is": "failed", "text": MESSAGE, "code": 0},
    ]
    identity = {"kind": "identity", "rank": 1, "endpoint": ENDPOINT}
    failed = {"kind": "failed", "text": MESSAGE, "code": 0}
    today = lines({"kind": "hello", "nonce": NONCE}) + b"0" * 32 + lines(identity) + b"0" * 32 + lines(failed)
    return [lines(*before), today, lines({"kind": "hello", "nonce": NONCE}, identity, failed)]


def joins(port, token, hosts):
    print("ready", flush=True)
    while True:
        for host in hosts:
            for content in member(token):
                with contextlib.suppress(OSError), socket.create_connection((host, port), 1) as connection:
                    print("connected", flush=True)
                    connection.settimeout(0.2)
                    connection.sendall(content)
                    with contextlib.suppress(OSError):
                        connection.recv(1000)
        time.sleep(0.01)


def leads(port, token, size):
    go = {"rendezvous": 6666, "interface": "lo", "seats": [ENDPOINT] * size}
    before = lines({"is": "welcome", "seat": ENDPOINT}, {"is": "go", **go})
    ready = {"kind": "all_ready", "horovod_port": 6666, "interface": "lo", "endpoints": [ENDPOINT] * size}
    proof = {"kind": "challenge", "nonce": NONCE, "proof": "0" * 64, "credential": "MUNGE:AwQFAAB:"}
    signed = [lines({"kind": "welcome", "endpoint": ENDPOINT}), lines(ready)]
    today = lines(proof) + b"".join(b"0" * 32 + line for line in signed)
    listener = socket.create_server(("", port), backlog=100)
    print("ready", flush=True)
    answers = [before, today]
    while True:
        connection = listener.accept()[0]
        threading.Thread(target=answered, args=(connection, answers[0]), daemon=True).start()
        answers.append(answers.pop(0))


def answered(connection, content):
    with contextlib.suppress(OSError), connection:
        connection.recv(1000)
        connection.sendall(content)
        connection.settimeout(3)
        while connection.recv(1000):
            pass


def relays(port, to, hosts):
    listener = socket.create_server(("", port), backlog=100)
    print("ready", flush=True)
    while True:
        connection = listener.accept()[0]
        threading.Thread(target=relayed, args=(connection, to, hosts), daemon=True).start()


def relayed(one, to, hosts):
    for host in hosts * 50:
        with contextlib.suppress(OSError), socket.create_connection((host, to), 1) as other, one:
            while True:
                for source in select.select([one, other], [], [])[0]:
                    if not (received := source.recv(65536)):
                        return
                    (other if source is one else one).sendall(received)
                    print("passed", flush=True)
        time.sleep(0.05)


def squats(port, count):
    kept = [socket.create_server(("", port + number)) for number in range(count)]
    print("ready", flush=True)
    while kept:
        time.sleep(1)


def floods(port, hosts):
    idles(port, 300, hosts, pause=0)


def idles(port, count, hosts, pause=0.0005):
    kept = []
    print("ready", flush=True)
    while True:
        for host in hosts:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, port), 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                connection.setblocking(False)
                if len(kept) % 2:
                    connection.send(lines({"kind": "hello", "nonce": NONCE}, {"is": "hello", "token": "0.0"}))
                kept.append(connection)
                if len(kept) == 150:  # five times as many as rank 0 keeps
                    print("connected", flush=True)
        if len(kept) > count:
            kept.pop(0).close()
        time.sleep(pause)


def become(uid):
    """That user, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


if __name__ == "__main__":
    what, given = sys.argv[1], json.loads(sys.argv[2])
    become(given.pop("uid"))  # as root it was started: another user may not see this Python
    globals()[what](**given)
