"""Horovod over Gloo without horovodrun: the rendezvous server and the variables that horovodrun would provide."""

from collections import Counter
from collections.abc import Sequence

from hvdtrain.errors import EngineUnavailable
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.launch.topology import Topology


class RendezvousServer:
    """Horovod's rendezvous server, in a thread of this process, at `address` and `port`. It can serve several runs, one
    after the other.

    It answers only requests that are signed with `key`, of 32 bytes. Raises EngineUnavailable.
    """

    def __init__(self, key: bytes, address: str = "127.0.0.1") -> None:
        try:
            from horovod.runner.http import http_server
        except ImportError as error:
            raise EngineUnavailable(
                f"Horovod cannot be imported ({error}); build it: python -m hvdtrain build"
            ) from None
        try:
            self._server = http_server.RendezvousServer(key=key)
        except TypeError:  # a Horovod from elsewhere, whose rendezvous answers everybody
            raise EngineUnavailable(
                "this Horovod's rendezvous takes no key; build it: python -m hvdtrain build"
            ) from None
        self.port = int(self._server.start(address=address))

    def expect(self, endpoints: Sequence[Endpoint]) -> None:
        """Forgets all earlier ranks, and waits for these."""
        from horovod.runner.common.util.hosts import SlotInfo

        self._server.init([SlotInfo(*slot) for slot in _slots(endpoints)])


def serve(endpoints: Sequence[Endpoint], key: bytes) -> int:
    """Starts a rendezvous server for these ranks at rank 0's address, and returns its port. Raises
    EngineUnavailable."""
    server = RendezvousServer(key, endpoints[0].address)
    server.expect(endpoints)
    return server.port


def variables(
    topology: Topology, endpoints: Sequence[Endpoint], address: str, port: int, interface: str | None, key: bytes
) -> dict[str, str]:
    """The environment variables that Horovod's Gloo controller reads at its start. `interface` None leaves
    the choice to Gloo."""
    label, rank, local_rank, cross_rank, size, local_size, cross_size = _slots(endpoints)[topology.rank]
    given = {
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "HOSTNAME": label,
        "RANK": rank,
        "SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": local_size,
        "CROSS_RANK": cross_rank,
        "CROSS_SIZE": cross_size,
        "GLOO_RENDEZVOUS_ADDR": address,
        "GLOO_RENDEZVOUS_PORT": port,
        "RENDEZVOUS_KEY": key.hex(),
        **({"GLOO_IFACE": interface} if interface else {}),
    }
    return {f"HOROVOD_{name}": str(value) for name, value in given.items()}


def _slots(endpoints: Sequence[Endpoint]) -> list[tuple[str, int, int, int, int, int, int]]:
    """For each rank: its host's label, rank, local rank, the index of its host among the hosts that have this local
    rank, the number of all ranks, of its host's ranks, and of those hosts."""
    nodes, local_sizes = dict[int, list[int]](), Counter(each.node for each in endpoints)
    for each in sorted(endpoints, key=lambda each: each.node):
        nodes.setdefault(each.local_rank, []).append(each.node)
    index = {(node, local): index for local, of in nodes.items() for index, node in enumerate(of)}
    return [
        (e.label, rank, local, index[e.node, local], len(endpoints), local_sizes[e.node], len(nodes[local]))
        for rank, e in enumerate(endpoints)
        for local in (e.local_rank,)
    ]
