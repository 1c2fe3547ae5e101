"""Horovod over Gloo without horovodrun: the rendezvous server and the variables that horovodrun would have given."""

from collections.abc import Sequence

from hvdtrain.errors import EngineUnavailable
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.launch.topology import Topology


class RendezvousServer:
    """Horovod's rendezvous server, in a thread of this process, at `address` and `port`, for runs one after another.

    It answers only who signs with `key`, of 32 bytes. Raises EngineUnavailable.
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
        """Forgets the ranks of before and waits for these."""
        from horovod.runner.common.util.hosts import SlotInfo

        self._server.init(
            [
                SlotInfo(
                    own.label, rank, own.local_rank, cross_rank, len(endpoints), _local_size(endpoints, own), cross_size
                )
                for rank, own in enumerate(endpoints)
                for cross_rank, cross_size in (_cross(endpoints, own),)
            ]
        )


def serve(endpoints: Sequence[Endpoint], key: bytes) -> int:
    """The port of a new rendezvous server for these ranks, at rank 0's address. Raises EngineUnavailable."""
    server = RendezvousServer(key, endpoints[0].address)
    server.expect(endpoints)
    return server.port


def variables(
    topology: Topology, endpoints: Sequence[Endpoint], address: str, port: int, interface: str | None, key: bytes
) -> dict[str, str]:
    """What Horovod's Gloo controller reads at its start. `interface` None leaves the choice to Gloo."""
    own = endpoints[topology.rank]
    cross_rank, cross_size = _cross(endpoints, own)
    given = {
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "HOSTNAME": own.label,
        "RANK": topology.rank,
        "SIZE": topology.size,
        "LOCAL_RANK": own.local_rank,
        "LOCAL_SIZE": _local_size(endpoints, own),
        "CROSS_RANK": cross_rank,
        "CROSS_SIZE": cross_size,
        "GLOO_RENDEZVOUS_ADDR": address,
        "GLOO_RENDEZVOUS_PORT": port,
        "RENDEZVOUS_KEY": key.hex(),
        **({"GLOO_IFACE": interface} if interface else {}),
    }
    return {f"HOROVOD_{name}": str(value) for name, value in given.items()}


def _local_size(endpoints: Sequence[Endpoint], own: Endpoint) -> int:
    return sum(other.node == own.node for other in endpoints)


def _cross(endpoints: Sequence[Endpoint], own: Endpoint) -> tuple[int, int]:
    """The endpoint's index among the hosts that have its local rank, and their number."""
    nodes = sorted(other.node for other in endpoints if other.local_rank == own.local_rank)
    return nodes.index(own.node), len(nodes)
