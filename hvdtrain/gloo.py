"""Horovod over Gloo without horovodrun: the rendezvous and the variables that horovodrun would have given."""

from collections.abc import Sequence

from hvdtrain.errors import EngineUnavailable
from hvdtrain.meeting import Seat
from hvdtrain.topology import Topology


class Rendezvous:
    """Horovod's rendezvous server, in a thread of this process, at `address` and `port`, for runs one after another.

    It hears only who signs with `key`, of 32 bytes. Raises EngineUnavailable.
    """

    def __init__(self, key: bytes, address: str = "127.0.0.1") -> None:
        try:
            from horovod.runner.http.http_server import RendezvousServer
        except ImportError as error:
            raise EngineUnavailable(
                f"Horovod cannot be imported ({error}); build it: python -m hvdtrain build"
            ) from None
        try:
            self._server = RendezvousServer(key=key)
        except TypeError:  # a Horovod from elsewhere, whose rendezvous hears everybody
            raise EngineUnavailable(
                "this Horovod's rendezvous takes no key; build it: python -m hvdtrain build"
            ) from None
        self.port = int(self._server.start(address=address))

    def expect(self, seats: Sequence[Seat]) -> None:
        """Forgets the ranks of before and waits for ranks in these seats."""
        from horovod.runner.common.util.hosts import SlotInfo

        self._server.init(
            [
                SlotInfo(
                    seat.label, rank, seat.local_rank, cross_rank, len(seats), _local_size(seats, seat), cross_size
                )
                for rank, seat in enumerate(seats)
                for cross_rank, cross_size in (_cross(seats, seat),)
            ]
        )


def serve(seats: Sequence[Seat], key: bytes) -> int:
    """The port of a new rendezvous server for these ranks, at rank 0's address. Raises EngineUnavailable."""
    rendezvous = Rendezvous(key, seats[0].address)
    rendezvous.expect(seats)
    return rendezvous.port


def variables(
    topology: Topology, seats: Sequence[Seat], address: str, port: int, interface: str | None, key: bytes
) -> dict[str, str]:
    """What Horovod's Gloo controller reads at its start. `interface` None leaves the choice to Gloo."""
    own = seats[topology.rank]
    cross_rank, cross_size = _cross(seats, own)
    told = {
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "HOSTNAME": own.label,
        "RANK": topology.rank,
        "SIZE": topology.size,
        "LOCAL_RANK": own.local_rank,
        "LOCAL_SIZE": _local_size(seats, own),
        "CROSS_RANK": cross_rank,
        "CROSS_SIZE": cross_size,
        "GLOO_RENDEZVOUS_ADDR": address,
        "GLOO_RENDEZVOUS_PORT": port,
        "RENDEZVOUS_KEY": key.hex(),
        **({"GLOO_IFACE": interface} if interface else {}),
    }
    return {f"HOROVOD_{name}": str(value) for name, value in told.items()}


def _local_size(seats: Sequence[Seat], own: Seat) -> int:
    return sum(seat.node == own.node for seat in seats)


def _cross(seats: Sequence[Seat], own: Seat) -> tuple[int, int]:
    """The seat's place among the hosts that have its local rank, and their number."""
    nodes = sorted(seat.node for seat in seats if seat.local_rank == own.local_rank)
    return nodes.index(own.node), len(nodes)
