"""The cluster that TensorFlow asks for, from where the ranks sit: nobody writes TF_CONFIG by hand."""

import json
from collections.abc import Sequence

from hvdtrain.meeting import Seat

Cluster = dict[str, list[str]]
"""Every task's host:port by job, in the order of the tasks' indices."""


def of(cluster: Cluster, job: str, index: int) -> str:
    """TF_CONFIG of one task of the cluster."""
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def workers(seats: Sequence[Seat]) -> Cluster:
    """A cluster in which every rank is a worker; of one rank alone there is none."""
    return {"worker": [f"{seat.address}:{seat.port}" for seat in seats]} if len(seats) > 1 else {}


def with_servers(seats: Sequence[Seat]) -> Cluster:
    """A cluster in which every rank is a worker, some have a parameter server beside it, and rank 0 leads."""
    places = [seats[rank] for rank in servers(seats)]
    return {
        "chief": [f"{seats[0].address}:{seats[0].port + 2}"],
        "worker": [f"{seat.address}:{seat.port}" for seat in seats],
        "ps": [f"{seat.address}:{seat.port + 1}" for seat in places],
    }


def servers(seats: Sequence[Seat]) -> list[int]:
    """The ranks whose processes hold a parameter server too: the first one of each host."""
    first: dict[str, int] = {}
    for rank, seat in enumerate(seats):
        first.setdefault(seat.address, rank)
    return list(first.values())


def placement(seats: Sequence[Seat]) -> list[str]:
    """For the log: which host has which workers and servers."""
    lines = []
    for index, first in enumerate(servers(seats)):
        here = [str(rank) for rank, seat in enumerate(seats) if seat.address == seats[first].address]
        lines.append(f"host        {seats[first].host}: workers {', '.join(here)}; parameter server {index}")
    return lines
