"""TensorFlow's TF_CONFIG, made from the ranks' endpoints: nobody writes it by hand."""

import json
from collections.abc import Mapping, Sequence

from hvdtrain.launch.rendezvous import Endpoint

Cluster = dict[str, list[str]]
"""Every task's host:port by job, in the order of the tasks' indices."""


def of(cluster: Cluster, job: str, index: int) -> str:
    """TF_CONFIG of one task of the cluster."""
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def workers(endpoints: Sequence[Endpoint]) -> Cluster:
    """A cluster in which every rank is a worker; of one rank alone there is none."""
    return {"worker": [f"{endpoint.address}:{endpoint.port}" for endpoint in endpoints]} if len(endpoints) > 1 else {}


def with_servers(endpoints: Sequence[Endpoint]) -> Cluster:
    """Every rank is a worker, the first of each host a parameter server too, and rank 0 the chief."""
    holders = [endpoints[rank] for rank in servers(endpoints)]
    return {
        "chief": [f"{endpoints[0].address}:{endpoints[0].port + 2}"],
        "worker": [f"{endpoint.address}:{endpoint.port}" for endpoint in endpoints],
        "ps": [f"{endpoint.address}:{endpoint.port + 1}" for endpoint in holders],
    }


def no_proxy(endpoints: Sequence[Endpoint], environ: Mapping[str, str]) -> dict[str, str]:
    """The variable with which gRPC reaches the ranks themselves, beside what no proxy serves already: with http_proxy
    alone it asks the proxy for them, again and again."""
    given = environ.get("no_grpc_proxy", environ.get("no_proxy"))
    hosts = dict.fromkeys(name for endpoint in endpoints for name in (endpoint.address, endpoint.host))
    return {"no_grpc_proxy": ",".join(filter(None, (given, *hosts)))}


def servers(endpoints: Sequence[Endpoint]) -> list[int]:
    """The ranks whose processes hold a parameter server too: the first one of each host."""
    first: dict[str, int] = {}
    for rank, endpoint in enumerate(endpoints):
        first.setdefault(endpoint.address, rank)
    return list(first.values())


def placement(endpoints: Sequence[Endpoint]) -> list[str]:
    """For the log: which host has which workers and servers."""
    lines = []
    for index, first in enumerate(servers(endpoints)):
        here = [str(rank) for rank, endpoint in enumerate(endpoints) if endpoint.address == endpoints[first].address]
        lines.append(f"host        {endpoints[first].host}: workers {', '.join(here)}; parameter server {index}")
    return lines
