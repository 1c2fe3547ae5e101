"""Where the ranks of a run connect before any collective library has started: host, ports and token; and TF_CONFIG,
which is made from their endpoints."""

import contextlib
import fcntl
import json
import os
import random
import secrets
import socket
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from hvdtrain.errors import EngineUnavailable, WorldError
from hvdtrain.launch import keys
from hvdtrain.launch.topology import Topology
from hvdtrain.untrusted import printable, quoted, whole_number

# Below Linux's ephemeral ports (32768 to 60999), which any outgoing connection may use.
FIRST_PORT, PORTS = 10_000, 20_000
BLOCK = 8
SERVED = 3
TRIES = 100
SIOCGIFADDR = 0x8915


Port = Annotated[int, Field(ge=1, lt=2**16)]


@dataclass(frozen=True)
class Rendezvous:
    """Rank 0's host, a block of ports for this step alone, and the step's name as the token.

    Rank 0 listens on the first free port but the last one, which is MASTER_PORT for libraries of ranks that are not
    connected. `key` was sent to all ranks by MPI; empty where they get it in another way (see keys.py).
    """

    host: str
    ports: range
    token: str
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Endpoint:
    """Where a rank is: its host's name and index, and its local rank.

    `address` is the one at which other ranks reach its host, and `port` the first of three on which it may listen for
    them. Both are known once all ranks are connected.
    """

    host: Annotated[str, Field(max_length=255), AfterValidator(printable)]
    node: Annotated[int, Field(ge=0, lt=2**31)]
    local_rank: Annotated[int, Field(ge=0, lt=2**31)]
    address: Annotated[str, Field(pattern=r"^[0-9.]{0,15}$")] = ""
    port: Annotated[int, Field(ge=0, lt=2**16)] = 0

    @property
    def label(self) -> str:
        """A name that no other host of the run has: containers may all have the same."""
        return f"{self.host}-{self.node}"


def from_launcher(topology: Topology, environ: Mapping[str, str]) -> Rendezvous | None:
    """The rendezvous of ranks whose launcher names rank 0's host; None of others, or for one rank.

    The ports follow from the launcher's variables, so that the job script need not export any.
    """
    found = topology.row.rendezvous(environ) if topology.size > 1 else None
    return Rendezvous(found[0], _block(found[1]), found[1]) if found else None


def from_host_or_mpi(topology: Topology, environ: Mapping[str, str]) -> Rendezvous:
    """The rendezvous of ranks whose launcher names no host: the host that all share, or rank 0's, which they learn by
    MPI. Raises EngineUnavailable or WorldError where that is not possible."""
    if topology.local_size == topology.size:
        token = next((environ[name] for name in topology.row.launch if name in environ), str(os.getppid()))
        return Rendezvous("127.0.0.1", _block(token), token)
    if not topology.row.mpi:
        raise WorldError(
            f"{topology.launcher} gives its ranks no host for a rendezvous, and they are on several; start them with "
            "srun, torchrun or horovodrun --mpi."
        )
    try:
        # What Horovod's core sets where MPI has not been started; why: the builder's patch 0071.
        os.environ.setdefault("OMPI_MCA_coll_libnbc_iallreduce_algorithm", "3")
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EngineUnavailable(
            f"ranks of {topology.launcher} on several hosts find one another by mpi4py, which cannot be imported "
            f"({error}); install it: pip install --no-binary mpi4py mpi4py"
        ) from None
    ranks = MPI.COMM_WORLD
    if ranks.size != topology.size:
        raise WorldError(
            f"{topology.launcher} started {topology.size} ranks, but mpi4py reports {ranks.size}: it was built for "
            "another MPI; build it for this one: pip install --force-reinstall --no-binary mpi4py mpi4py"
        )
    token = f"{topology.host} {os.getpid()}"
    own = Rendezvous(addresses()[0], _block(token), token, secrets.token_bytes(keys.BYTES))
    of_rank_0: Rendezvous = ranks.bcast(own)
    return of_rank_0


def check_host(host: str) -> None:
    """Raises WorldError where ranks on this host can never connect to rank 0 on that one."""
    ipv6, text = Path("/proc/net/if_inet6"), ""
    is_global = [line.split()[3] == "00" for line in ipv6.read_text().splitlines()] if ipv6.exists() else []
    lacks = "this host" if any(is_global) and all(address.startswith("127.") for address in addresses()) else ""
    try:
        (host or ".").encode("idna")
        socket.getaddrinfo(host, None, socket.AF_INET)
    except UnicodeError:
        text = f"MASTER_ADDR must have 1 to 63 characters between its dots, got {quoted(host)}; set rank 0's host."
    except OSError:  # the name may be known later
        with contextlib.suppress(OSError):
            socket.getaddrinfo(host, None, socket.AF_INET6)
            lacks = quoted(host)
    if lacks:
        text = (
            f"ranks on several hosts find one another over IPv4, and {lacks} has IPv6 addresses alone; give every host "
            "an IPv4 address, or start all ranks on one."
        )
    if text:
        raise keys.of_this_host(text)


def addresses() -> list[str]:
    """This host's IPv4 addresses, loopback last."""
    found = [address for _, name in socket.if_nameindex() if (address := address_of(name))]
    return sorted(found, key=lambda address: address.startswith("127."))


def interface_of(address: str) -> str | None:
    """The network interface that has this address."""
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """An interface's IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(any_socket, SIOCGIFADDR, request)[20:24])
        except OSError:  # an interface without an IPv4 address
            return None


def own_endpoint(topology: Topology) -> Endpoint:
    """This rank's endpoint, before its address is known. Raises WorldError."""
    return Endpoint(topology.host, topology.node or 0, topology.local_rank, port=free_ports(topology))


def free_ports(topology: Topology) -> int:
    """The first of `SERVED` neighbouring free ports that no other rank of this host takes. Raises WorldError."""
    begin, step = FIRST_PORT + SERVED * topology.local_rank, SERVED * topology.local_size
    possible = range(begin, FIRST_PORT + PORTS - SERVED, step)
    for first in random.sample(possible, min(len(possible), TRIES)):
        if all(map(_is_free, range(first, first + SERVED))):
            return first
    raise WorldError(f"ports {possible.start} to {possible.stop} of {topology.host} are all taken; start again.")


def _is_free(port: int) -> bool:
    # It does not listen: a rank that searches for rank 0 must find nobody here.
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        return True
    return False


def _block(token: str) -> range:
    """The ports that follow from a token. Neighbouring steps of SLURM's, 4711-0 and 4711-1, have different ones."""
    numbers = [whole_number(part) for part in token.split("-")]
    number = zlib.crc32(os.fsencode(token)) if None in numbers else sum(filter(None, numbers))
    start = FIRST_PORT + number * BLOCK % PORTS
    return range(start, start + BLOCK)


Cluster = dict[str, list[str]]
"""By job, the host:port of its tasks in the order of their indices."""


def tf_config(cluster: Cluster, job: str, index: int) -> str:
    """The text of TF_CONFIG for one task of the cluster."""
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def workers(endpoints: Sequence[Endpoint]) -> Cluster:
    """A cluster in which every rank is a worker; empty for one rank alone."""
    return {"worker": [f"{endpoint.address}:{endpoint.port}" for endpoint in endpoints]} if len(endpoints) > 1 else {}


def with_servers(endpoints: Sequence[Endpoint]) -> Cluster:
    """A cluster in which every rank is a worker, the first rank of each host a parameter server too, and rank 0 the
    chief."""
    holders = [endpoints[rank] for rank in servers(endpoints)]
    return {
        "chief": [f"{endpoints[0].address}:{endpoints[0].port + 2}"],
        "worker": [f"{endpoint.address}:{endpoint.port}" for endpoint in endpoints],
        "ps": [f"{endpoint.address}:{endpoint.port + 1}" for endpoint in holders],
    }


def no_proxy(endpoints: Sequence[Endpoint], environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that makes gRPC connect to the ranks directly, added to its present value. Where only http_proxy is
    set, gRPC asks the proxy for them, again and again."""
    given = environ.get("no_grpc_proxy", environ.get("no_proxy"))
    hosts = dict.fromkeys(name for endpoint in endpoints for name in (endpoint.address, endpoint.host))
    return {"no_grpc_proxy": ",".join(filter(None, (given, *hosts)))}


def servers(endpoints: Sequence[Endpoint]) -> list[int]:
    """The ranks whose processes are parameter servers too: the first one of each host."""
    first: dict[str, int] = {}
    for rank, endpoint in enumerate(endpoints):
        first.setdefault(endpoint.address, rank)
    return list(first.values())


def placement(endpoints: Sequence[Endpoint]) -> list[str]:
    """Lines for the log that say which host has which workers and servers."""
    lines = []
    for index, first in enumerate(servers(endpoints)):
        here = [str(rank) for rank, endpoint in enumerate(endpoints) if endpoint.address == endpoints[first].address]
        lines.append(f"host        {endpoints[first].host}: workers {', '.join(here)}; parameter server {index}")
    return lines
