"""Rank 0 among hundreds of ranks: `python many_ranks.py limited SIZE` is rank 0.

The other ranks are real connections with real handshakes, but one process holds all of them, and trains nothing.
"""

import os
import socket
import sys
import time
from collections import Counter

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.rendezvous import Endpoint, Rendezvous
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import messages
from hvdtrain.ranks.admission import Handshake, allow_files
from hvdtrain.ranks.peers import Peer, Peers
from hvdtrain.ranks.world import World
from hvdtrain.run.process import RankProcess

KEY, TOKEN, PORTS, ON_A_HOST = bytes(32), "22.0", range(9_851, 9_859), 8
TRAFFIC = (messages.Traffic(own="10.0.0.1", other="10.0.0.2", size=1e6, busy=0.01),)
TIMES = messages.Times(reading=0.001, rest=0.1, waiting=0.01, traffic=TRAFFIC)


def topology(rank: int, size: int) -> Topology:
    """The topology of a rank on hosts with eight ranks each."""
    node, local_rank = divmod(rank, ON_A_HOST)
    return Topology(rank, size, local_rank, ON_A_HOST, node, f"nid{node}", "srun", "22")


def world_of(rank: int, size: int) -> World:
    """That rank's world, which has started, with the listener of a run."""
    world = RankProcess(topology(rank, size), Rendezvous("127.0.0.1", PORTS, TOKEN, KEY)).world
    world.start()
    return world


class Fakes:
    """All ranks but rank 0, over one selector. Counts the messages and bytes that they received, by kind."""

    def __init__(self, size: int, world: World | None = None) -> None:
        """`world`: that of rank 0, if it is in this process too."""
        allow_files(size)
        self.size, self.peers = size, Peers(topology(1, size))
        self.messages, self.bytes = Counter[str](), Counter[str]()
        self.handshakes: dict[Peer, Handshake] = {}
        listener = world and world.readiness.admission.listener
        self.port = listener.getsockname()[1] if listener else PORTS[0]

    def connect(self, rank: int, key: bytes | None) -> None:
        """Connects this rank, and begins its handshake."""
        own = topology(rank, self.size)
        shakes = Handshake(self.peers, Endpoint(own.host, own.node or 0, own.local_rank, port=10_000), print)
        shakes.topology, shakes.key, shakes.token = own, key, TOKEN
        peer = self.peers.add(socket.create_connection(("127.0.0.1", self.port)), time.monotonic())
        self.handshakes[peer] = shakes
        shakes.begin(peer)

    def serve(self, seconds: float) -> None:
        """Reads the messages that have come. A rank that is admitted reports that it is ready; one that was dropped
        before connects again."""
        for peer in self.peers.wait(seconds):
            try:
                lines = peer.receive(time.monotonic())
            except OSError:
                if peer.rank >= 0:
                    raise
                self.peers.drop(peer)
                shakes = self.handshakes.pop(peer)
                self.connect(shakes.topology.rank, shakes.key)
                continue
            for line in lines:
                if peer.rank < 0:
                    if self.handshakes[peer].advance(peer, line):
                        peer.send(messages.Ready())
                    continue
                kind = peer.read(line, messages.FROM_RANK_0).kind
                self.messages[kind] += 1
                self.bytes[kind] += len(line) + 1
                if kind == "all_ready":
                    peer.send(messages.Heartbeat())
        self.peers.flush()

    def start(self, key: bytes) -> None:
        """Connects all ranks, and waits until rank 0 has informed each that all are ready."""
        for rank in range(1, self.size):
            self.connect(rank, key)
            if rank % max(8, self.size // 100) == 0:
                self.serve(0.01)
        while self.messages["all_ready"] < self.size - 1:
            self.serve(0.5)


class Engine:
    waited = 0.0


def limited(size: int) -> None:
    """Runs rank 0 until its stdin ends. Prints its key and port once it listens."""
    world = world_of(0, size)
    print(world.readiness.handshake.key.hex(), world.readiness.admission.listener.getsockname()[1], flush=True)
    try:
        world.wait_until_ready(lambda endpoints: None)
    except HvdtrainError as error:
        os._exit(error.exit_code)
    sys.stdin.read()
    world.leave()


if __name__ == "__main__":
    limited(int(sys.argv[2]))
