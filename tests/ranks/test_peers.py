"""What comes over a connection: signed, of a known kind, within bounds; anything else is refused."""

import json
import random
import socket
import threading
import time

import pytest

from hvdtrain.launch import keys
from hvdtrain.launch.rendezvous import Endpoint, Rendezvous, own_endpoint
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import admission, messages, timeouts
from hvdtrain.ranks.admission import Admission, Handshake
from hvdtrain.ranks.peers import Peer, Peers, Signatures
from hvdtrain.ranks.stacks import Process
from hvdtrain.ranks.world import World

RANK_0, RANK_1 = (Topology(rank, 3, rank, 3, 0, "nid1", "srun", "22") for rank in range(2))
ENDPOINT = Endpoint("nid1", 0, 1, "127.0.0.1", 10_000)
PROCESS = Process(pid=7, started=10**6, thread=2**64 - 1, memory=5)
ONE_OF_EACH = {
    messages.HELLO: [messages.Hello(nonce="0" * 32)],
    messages.CHALLENGE: [messages.Challenge(nonce="0" * 32, proof="0" * 64, credential="MUNGE:")],
    messages.IDENTITY: [
        messages.Identity(rank=1, endpoint=ENDPOINT), messages.Identity(rank=1, endpoint=ENDPOINT, process=PROCESS)
    ],
    messages.WELCOME: [messages.Welcome(endpoint=ENDPOINT, process=PROCESS)],
    messages.FROM_RANK: [
        messages.Ready(), messages.Busy(text="reads"), messages.Heartbeat(), messages.StopRequest(signal=15),
        messages.StopPrepared(steps=7), messages.Left(), messages.Failed(text="no", code=2),
        messages.Exited(steps=7, code=0),
        messages.Stack(place="outside", long=False, where="a.py:3, in f"),
        messages.Times(reading=0.0, rest=1.5, waiting=0.25), messages.Times(reading=1e-9, rest=0.0, waiting=None),
        messages.ProcessState(rank=2, state="stopped", where=""),
    ],
    messages.FROM_RANK_0: [
        messages.AllReady(horovod_port=6, interface="lo", endpoints=[ENDPOINT, ENDPOINT]),
        messages.AllReady(horovod_port=None, interface=None, endpoints=[ENDPOINT]),
        messages.StopPrepare(), messages.StopAt(step=3, signal=12), messages.Lost(text="gone", code=1), messages.Left(),
        messages.Exited(steps=7, code=255),
        messages.StackRequest(), messages.ProcessRequest(rank=2, process=PROCESS),
    ],
}  # fmt: skip
EVERY = [(kind, message) for kind, ones in ONE_OF_EACH.items() for message in ones]
ENDS = {"rank 0": ("rank 0", "rank"), "rank": ("rank", "rank 0")}


@pytest.fixture
def pair():
    """The two ends of a connection whose lines are signed with one key."""
    sockets = socket.socketpair()
    ends = [
        Peer(end, 0, 0, signatures=Signatures(b"key", *names))
        for end, names in zip(sockets, ENDS.values(), strict=True)
    ]
    for end in sockets:
        end.setblocking(False)
    yield ends
    for end in sockets:
        end.close()


@pytest.mark.parametrize(("kind", "message"), EVERY, ids=lambda value: type(value).__name__)
def test_each_message_comes_as_it_was(kind, message, pair):
    one, other = pair
    for _ in range(2):
        one.send(message)
        (line,) = other.receive(1.0)
        assert other.read(line, kind) == message


FIRST = {"host": "a", "node": 0, "local_rank": 0}
BAD = {
    "an exit code of 256": (messages.FROM_RANK, {"kind": "failed", "text": "", "code": 256}),
    "a truth for a code": (messages.FROM_RANK, {"kind": "failed", "text": "", "code": True}),
    "a long text": (messages.FROM_RANK, {"kind": "failed", "text": "x" * 1001, "code": 1}),
    "a list for a text": (messages.FROM_RANK, {"kind": "failed", "text": [], "code": 1}),
    "more than it has": (messages.FROM_RANK, {"kind": "heartbeat", "more": 1}),
    "no kind": (messages.FROM_RANK, {}),
    "a signal that kills": (messages.FROM_RANK, {"kind": "stop_request", "signal": 9}),
    "a rank that stops all": (messages.FROM_RANK, {"kind": "stop_at", "step": 1, "signal": 15}),
    "a rank that reports a loss": (messages.FROM_RANK, {"kind": "lost", "text": "", "code": 1}),
    "a rank that says all are ready": (
        messages.FROM_RANK,
        {"kind": "all_ready", "horovod_port": 1, "interface": None, "endpoints": [FIRST]},
    ),
    "a rank 0 that requests a stop": (messages.FROM_RANK_0, {"kind": "stop_request", "signal": 15}),
    "a step of 400 digits": (messages.FROM_RANK_0, {"kind": "stop_at", "step": 10**400, "signal": 15}),
    "a port of another kind": (
        messages.FROM_RANK_0,
        {"kind": "all_ready", "horovod_port": 65536, "interface": None, "endpoints": [FIRST]},
    ),
    "an interface with more": (
        messages.FROM_RANK_0,
        {"kind": "all_ready", "horovod_port": 1, "interface": "lo;x", "endpoints": [FIRST]},
    ),
    "an address that is a name": (
        messages.IDENTITY,
        {"kind": "identity", "rank": 1, "endpoint": {"host": "a", "node": 0, "local_rank": 0, "address": "evil.org"}},
    ),
    "a place that is none": (messages.FROM_RANK, {"kind": "stack", "place": "x", "long": False, "where": ""}),
    "no number": (messages.FROM_RANK, {"kind": "times", "reading": 0.0, "rest": float("nan"), "waiting": None}),
    "a rank that looks into processes": (
        messages.FROM_RANK,
        {"kind": "process_request", "rank": 0, "process": {"pid": 1, "started": 0, "thread": 0, "memory": 1}},
    ),
    "every process": (
        messages.FROM_RANK_0,
        {"kind": "process_request", "rank": 0, "process": {"pid": -1, "started": 0, "thread": 0, "memory": 1}},
    ),
    "a thread without bounds": (
        messages.IDENTITY,
        {
            "kind": "identity",
            "rank": 1,
            "endpoint": {"host": "", "node": 0, "local_rank": 0},
            "process": {"pid": 1, "started": 0, "thread": 2**64, "memory": 1},
        },
    ),
}


@pytest.mark.parametrize(("kind", "content"), BAD.values(), ids=BAD.keys())
def test_what_no_rank_sends_is_refused(kind, content, pair):
    one, other = pair
    line = json.dumps(content).encode()
    with pytest.raises(ValueError):
        other.read(one.signatures.signed(line), kind)


def test_no_line_is_left_out_changed_or_sent_again(pair):
    one, other = pair
    first, second = (one.signatures.signed(b'{"kind":"heartbeat"}') for _ in range(2))
    other.read(first, messages.FROM_RANK)
    for line in (first, second[:-1] + b" ", b"", b"0" * 32 + b'{"kind":"heartbeat"}'):
        with pytest.raises(ValueError, match="signature"):
            other.read(line, messages.FROM_RANK)


def test_what_is_printed_has_no_escape_codes():
    failed = messages.FROM_RANK.validate_json('{"kind": "failed", "text": "\\u001b[31mred\\u202e\\n", "code": 1}')
    assert failed.text == r"\x1b[31mred\u202e\n"
    endpoint = messages.IDENTITY.validate_json(
        '{"kind": "identity", "rank": 1, "endpoint": {"host": "\\u001b[2J", "node": 0, "local_rank": 0}}'
    ).endpoint
    assert endpoint.host == r"\x1b[2J"


def test_any_text_can_be_sent():
    for text in ("\udcff", "\x1b" * 1000, "x" * 100_000, ""):
        failed = messages.Failed(text=messages.cut(text), code=1)
        assert messages.FROM_RANK.validate_json(failed.model_dump_json(), strict=True) == failed


def mutated(random_of, line):
    """The line with a few of its bytes, digits or brackets changed."""
    changed = bytearray(line)
    for _ in range(random_of.randrange(1, 6)):
        index = random_of.randrange(len(changed) + 1)
        what = random_of.choice(
            [b"", b"[" * 3000, b"9" * 5000, b'"', b"\xff", b"null", b"{}", b"\\u0000", b"1e999", b"-"]
        )
        changed[index : index + random_of.randrange(4)] = what or random_of.randbytes(3)
    return bytes(changed)


def fuzz(seed, count):
    """How many of so many changed messages of each kind were refused."""
    random_of, refused = random.Random(seed), 0
    for kind, ones in ONE_OF_EACH.items():
        for _ in range(count):
            line = mutated(random_of, random_of.choice(ones).model_dump_json().encode())
            try:
                kind.validate_json(line, strict=True)
            except ValueError:
                refused += 1
    return refused


def test_changed_messages_are_refused_or_harmless():
    assert fuzz(0, 300) > 900


def admitting(topology):
    """A rank of a run whose key and token are known."""
    rank = Admission(peers := Peers(topology), Handshake(peers, own_endpoint(topology), print))
    rank.handshake.key, rank.handshake.token = b"k" * 32, "22.0"
    return rank


@pytest.fixture
def rank_0():
    """Rank 0, which listens, and its port."""
    rank_0 = admitting(RANK_0)
    yield rank_0, rank_0.listen("127.0.0.1", range(1))
    rank_0.close()


def served(rank, seconds=0.05):
    """Lets the rank do what there is to do; the errors of its strangers."""
    errors = []
    for source in rank.peers.wait(seconds):
        if source is rank.listener:
            rank.accept(0.0)
        elif isinstance(source, Peer):
            try:
                for line in source.receive(0.0):
                    rank.advance(source, line)
            except (OSError, ValueError) as error:
                errors.append(error)
                rank.peers.drop(source)
    return errors


def test_strangers_of_every_kind_are_dropped(rank_0):
    listening, port = rank_0
    random_of, errors = random.Random(1), []
    hello = messages.Hello(nonce="0" * 32).model_dump_json().encode() + b"\n"
    for number in range(300):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            changed = mutated(random_of, hello) + b"\n"
            stranger.sendall(changed if number % 2 else hello + changed)
            for _ in range(2):
                errors += served(listening)
    while listening.peers.connections:
        errors += served(listening)
    assert len(errors) >= 300  # who scans this machine's ports is refused too
    assert not listening.peers.came


def test_few_strangers_stay_at_a_time(rank_0):
    listening, port = rank_0
    connected = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for _ in range(120):
        served(listening, 0.001)
    assert 0 < len(listening.peers.connections) <= admission.FEWEST_STRANGERS
    for stranger in connected:
        stranger.close()


def test_sending_never_waits(pair):
    one, other = pair
    for _ in range(3_000):
        one.send(messages.Busy(text="x" * 900))
    assert one.unsent
    received = 0
    while received < 3_000:
        one.flush()
        received += len([other.read(line, messages.FROM_RANK) for line in other.receive(0.0)])


@pytest.fixture
def rank_1(rank_0):
    rank_1 = admitting(RANK_1)
    yield rank_1
    rank_1.close()


def connect(rank_1, address):
    """Lets the rank connect there, as its thread would."""
    rank_1.addresses = [address]
    rank_1.greet(rank_1.connect(), 0.0)


def served_together(rank_0, rank_1, times=20):
    """The errors of rank 1, while both do what there is to do."""
    errors = []
    for _ in range(times):
        served(rank_0, 0.01)
        errors += served(rank_1, 0.01)
    return errors


def test_a_rank_and_rank_0_come_to_know_one_another(rank_0, rank_1):
    listening, port = rank_0
    connect(rank_1, ("127.0.0.1", port))
    assert served_together(listening, rank_1) == []
    assert (listening.peers.came, rank_1.peers.came) == ({1}, {0})


def test_a_name_that_no_host_can_have_is_nowhere(rank_1):
    for host in ("a" * 64, "a..b", "\udcff", "a\0b"):
        rank_1.addresses = [(host, 9_801)]
        assert rank_1.connect() is None


@pytest.mark.parametrize("what", ["key", "token"])
def test_ranks_of_another_run_do_not(what, rank_0, rank_1):
    listening, port = rank_0
    setattr(rank_1.handshake, what, b"o" * 32 if what == "key" else "22.1")
    connect(rank_1, ("127.0.0.1", port))
    (error,) = served_together(listening, rank_1)
    assert str(error) == "another key"
    assert listening.peers.came == rank_1.peers.came == set()


def test_nobody_passes_the_answers_on_at_the_same_port_of_another_address(rank_0, rank_1):
    listening, port = rank_0
    with socket.create_server(("127.0.0.2", port)) as relay, socket.create_connection(("127.0.0.1", port)) as onward:
        connect(rank_1, ("127.0.0.2", port))
        rank_1.handshake.warn = lambda text: None
        taken = relay.accept()[0]
        errors = []
        for _ in range(20):
            for one, other in ((taken, onward), (onward, taken)):
                one.settimeout(0.01)
                try:
                    other.sendall(one.recv(2**16))
                except OSError:
                    continue
            errors += [*served(listening, 0.01), *served(rank_1, 0.01)]
        taken.close()
    assert "another key" in map(str, errors)
    assert listening.peers.came == rank_1.peers.came == set()


def test_a_welcome_may_take_longer_than_a_strangers_proof(rank_0, monkeypatch):
    monkeypatch.setattr(timeouts, "HANDSHAKE", 0.3)
    monkeypatch.setenv("HVDTRAIN_KEY", (b"k" * 32).hex())
    listening, port = rank_0
    listening.handshake.token = f"22.0 {keys.boot_id()}"
    world = World(RANK_1, Rendezvous("127.0.0.1", range(port, port + 2), "22.0"))
    begins = threading.Thread(target=world.start)  # signals are the main thread's
    begins.start()
    begins.join()
    while not (listening.peers.connections and listening.peers.connections[0].signatures):
        served(listening)
    time.sleep(1.5)  # rank 0 is inside C, say, and holds Python's lock
    errors = []
    while not (listening.peers.came or errors):
        errors += served(listening)
    while not world.peers.came:
        time.sleep(0.01)
    world.leave()
    assert errors == []
