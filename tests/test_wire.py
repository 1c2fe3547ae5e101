"""What comes over a connection: signed, of a known kind, within bounds; anything else is refused."""

import json
import random
import socket
import threading
import time

import pytest

from hvdtrain import keys, lifeline, messages, wire
from hvdtrain.meeting import Meeting, Seat
from hvdtrain.topology import Topology
from hvdtrain.wire import Peer, Signatures, Wires

CHIEF, RANK = (Topology(rank, 3, rank, 3, 0, "nid1", "srun", "22") for rank in range(2))
SEAT = Seat("nid1", 0, 1, "127.0.0.1", 10_000)
ONE_OF_EACH = {
    messages.HELLO: [messages.Hello(nonce="0" * 32)],
    messages.CHALLENGE: [messages.Challenge(nonce="0" * 32, proof="0" * 64, credential="MUNGE:")],
    messages.HERE: [messages.Here(rank=1, seat=SEAT)],
    messages.WELCOME: [messages.Welcome(seat=SEAT)],
    messages.FROM_RANK: [
        messages.Ready(), messages.Doing(text="reads"), messages.Beat(), messages.Wish(signal=15),
        messages.Stopping(), messages.Left(), messages.Failed(text="no", code=2),
    ],
    messages.FROM_CHIEF: [
        messages.Go(rendezvous=6, interface="lo", seats=[SEAT]), messages.Go(rendezvous=None, interface=None, seats=[]),
        messages.Stop(step=3, signal=12), messages.Lost(text="gone", code=1), messages.Left(),
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


BAD = {
    "an exit code of 0": (messages.FROM_RANK, {"kind": "failed", "text": "", "code": 0}),
    "an exit code of 256": (messages.FROM_RANK, {"kind": "failed", "text": "", "code": 256}),
    "a truth for a code": (messages.FROM_RANK, {"kind": "failed", "text": "", "code": True}),
    "a text for a code": (messages.FROM_RANK, {"kind": "failed", "text": "", "code": "1"}),
    "a long text": (messages.FROM_RANK, {"kind": "failed", "text": "x" * 1001, "code": 1}),
    "a list for a text": (messages.FROM_RANK, {"kind": "failed", "text": [], "code": 1}),
    "more than it has": (messages.FROM_RANK, {"kind": "beat", "more": 1}),
    "no kind": (messages.FROM_RANK, {}),
    "a signal that kills": (messages.FROM_RANK, {"kind": "wish", "signal": 9}),
    "a rank that stops all": (messages.FROM_RANK, {"kind": "stop", "step": 1, "signal": 15}),
    "a rank that tells of a loss": (messages.FROM_RANK, {"kind": "lost", "text": "", "code": 1}),
    "a rank that lets go": (messages.FROM_RANK, {"kind": "go", "rendezvous": 1, "interface": None, "seats": []}),
    "a chief that wishes": (messages.FROM_CHIEF, {"kind": "wish", "signal": 15}),
    "a step below 0": (messages.FROM_CHIEF, {"kind": "stop", "step": -1, "signal": 15}),
    "a step of 400 digits": (messages.FROM_CHIEF, {"kind": "stop", "step": 10**400, "signal": 15}),
    "a port of another kind": (
        messages.FROM_CHIEF,
        {"kind": "go", "rendezvous": 65536, "interface": None, "seats": []},
    ),
    "an interface with words": (messages.FROM_CHIEF, {"kind": "go", "rendezvous": 1, "interface": "lo;x", "seats": []}),
    "an address that is a name": (
        messages.HERE,
        {"kind": "here", "rank": 1, "seat": {"host": "a", "node": 0, "local_rank": 0, "address": "evil.org"}},
    ),
    "a rank below 0": (messages.HERE, {"kind": "here", "rank": -1, "seat": {"host": "", "node": 0, "local_rank": 0}}),
}


@pytest.mark.parametrize(("kind", "content"), BAD.values(), ids=BAD.keys())
def test_what_no_rank_sends_is_refused(kind, content, pair):
    one, other = pair
    line = json.dumps(content).encode()
    with pytest.raises(ValueError):
        other.read(one.signatures.signed(line), kind)


def test_no_line_is_left_out_changed_or_sent_again(pair):
    one, other = pair
    first, second = (one.signatures.signed(b'{"kind":"beat"}') for _ in range(2))
    other.read(first, messages.FROM_RANK)
    for line in (first, second[:-1] + b" ", b"", b"0" * 32 + b'{"kind":"beat"}'):
        with pytest.raises(ValueError, match="signature"):
            other.read(line, messages.FROM_RANK)


def test_what_is_printed_has_no_escape_codes():
    failed = messages.FROM_RANK.validate_json('{"kind": "failed", "text": "\\u001b[31mred\\u202e\\n", "code": 1}')
    assert failed.text == r"\x1b[31mred\u202e\n"
    seat = messages.HERE.validate_json(
        '{"kind": "here", "rank": 1, "seat": {"host": "\\u001b[2J", "node": 0, "local_rank": 0}}'
    ).seat
    assert seat.host == r"\x1b[2J"


def test_any_text_can_be_sent():
    for text in ("\udcff", "\x1b" * 1000, "x" * 100_000, ""):
        failed = messages.Failed(text=messages.cut(text), code=1)
        assert messages.FROM_RANK.validate_json(failed.model_dump_json(), strict=True) == failed


def mutated(random_of, line):
    """The line with a few of its bytes, digits or brackets changed."""
    changed = bytearray(line)
    for _ in range(random_of.randrange(1, 6)):
        place = random_of.randrange(len(changed) + 1)
        what = random_of.choice(
            [b"", b"[" * 3000, b"9" * 5000, b'"', b"\xff", b"null", b"{}", b"\\u0000", b"1e999", b"-"]
        )
        changed[place : place + random_of.randrange(4)] = what or random_of.randbytes(3)
    return bytes(changed)


def fuzz(seed, count):
    """How many of so many changed messages of each kind were refused; the slowest reading, in seconds."""
    random_of, refused, slowest = random.Random(seed), 0, 0.0
    for kind, ones in ONE_OF_EACH.items():
        for _ in range(count):
            line = mutated(random_of, random_of.choice(ones).model_dump_json().encode())
            began = time.monotonic()
            try:
                kind.validate_json(line, strict=True)
            except ValueError:
                refused += 1
            slowest = max(slowest, time.monotonic() - began)
    return refused, slowest


def test_changed_messages_are_refused_or_harmless():
    refused, slowest = fuzz(0, 1000)
    assert refused > 3000
    assert slowest < 0.5


@pytest.fixture
def chief():
    wires = Wires(CHIEF, 20.0, print)
    wires.key, wires.token = b"k" * 32, "22.0"
    port = wires.listen("127.0.0.1", range(1))
    yield wires, port
    wires.close()


def served(wires, seconds=0.05):
    """Lets the wires do what there is to do; the errors of their strangers."""
    errors = []
    for source in wires.wait(seconds):
        if source is wires.listener:
            wires.accept(time.monotonic())
        elif peer := wires.peer_at(source):
            try:
                for line in peer.receive(time.monotonic()):
                    wires.introduce(peer, line)
            except (OSError, ValueError) as error:
                errors.append(error)
                wires.drop(peer)
    return errors


def test_strangers_of_every_kind_are_dropped(chief):
    wires, port = chief
    random_of, errors = random.Random(1), []
    hello = messages.Hello(nonce="0" * 32).model_dump_json().encode() + b"\n"
    for number in range(1000):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            words = mutated(random_of, hello) + b"\n"
            stranger.sendall(words if number % 2 else hello + words)
            for _ in range(2):
                errors += served(wires)
    while wires.peers:
        errors += served(wires)
    assert len(errors) >= 1000  # who scans this machine's ports is refused too
    assert not wires.came


def test_few_strangers_stay_at_a_time(chief):
    wires, port = chief
    connected = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for _ in range(120):
        served(wires, 0.001)
    assert 0 < len(wires.peers) <= wire.FEWEST_STRANGERS
    for stranger in connected:
        stranger.close()


def test_sending_never_waits(pair):
    one, other = pair
    began = time.monotonic()
    for _ in range(3_000):
        one.send(messages.Doing(text="x" * 900))
    assert one.unsent
    assert time.monotonic() - began < 2
    received = 0
    while received < 3_000:
        one.flush()
        received += len([other.read(line, messages.FROM_RANK) for line in other.receive(0.0)])


@pytest.fixture
def rank(chief):
    wires = Wires(RANK, 20.0, print)
    wires.key, wires.token = b"k" * 32, "22.0"
    yield wires
    wires.close()


def connected(rank, address):
    """Lets the rank connect there, as its thread would."""
    rank.addresses = [address]
    rank.greet(rank.connect(), time.monotonic())


def served_together(chief, rank, turns=20):
    """The errors of the rank, while both do what there is to do."""
    errors = []
    for _ in range(turns):
        served(chief, 0.01)
        errors += served(rank, 0.01)
    return errors


def test_a_rank_and_rank_0_come_to_know_one_another(chief, rank):
    wires, port = chief
    connected(rank, ("127.0.0.1", port))
    assert served_together(wires, rank) == []
    assert (wires.came, rank.came) == ({1}, {0})


@pytest.mark.parametrize("what", ["key", "token"])
def test_ranks_of_another_run_do_not(what, chief, rank):
    wires, port = chief
    setattr(rank, what, b"o" * 32 if what == "key" else "22.1")
    connected(rank, ("127.0.0.1", port))
    (error,) = served_together(wires, rank)
    assert str(error) == "another key"
    assert wires.came == rank.came == set()


def test_nobody_passes_the_answers_on_at_the_same_port_of_another_address(chief, rank):
    wires, port = chief
    with socket.create_server(("127.0.0.2", port)) as relay, socket.create_connection(("127.0.0.1", port)) as onward:
        connected(rank, ("127.0.0.2", port))
        rank.note = lambda text: None
        taken = relay.accept()[0]
        errors = []
        for _ in range(20):
            for one, other in ((taken, onward), (onward, taken)):
                one.settimeout(0.01)
                try:
                    other.sendall(one.recv(2**16))
                except OSError:
                    continue
            errors += [*served(wires, 0.01), *served(rank, 0.01)]
        taken.close()
    assert "another key" in map(str, errors)
    assert wires.came == rank.came == set()


def test_a_welcome_may_take_longer_than_a_strangers_proof(chief, monkeypatch):
    monkeypatch.setattr(lifeline, "WELCOME", 0.3)
    monkeypatch.setenv("HVDTRAIN_KEY", (b"k" * 32).hex())
    wires, port = chief
    wires.token = f"22.0 {keys.boot_id()}"
    line = lifeline.Lifeline(RANK, Meeting("127.0.0.1", range(port, port + 2), "22.0"))
    begins = threading.Thread(target=line.begin)  # signals are the main thread's
    begins.start()
    begins.join()
    while not (wires.peers and wires.peers[0].signatures):
        served(wires)
    time.sleep(1.5)  # rank 0 is inside C, say, and holds Python's lock
    errors = []
    while not (wires.came or errors):
        errors += served(wires)
    while not line._wires.came:
        time.sleep(0.01)
    line.leave()
    assert errors == []
