"""Finds hosts whose network link is slow, by Linux's counters of each TCP connection.

Where one link is slow all ranks of a ring wait alike, so that their times name no rank. But the kernel knows how much
of each connection's data the other end has acknowledged, and how long data was under way. The connections to other
ranks' hosts are those of Open MPI, MPICH, Gloo and NCCL over TCP. InfiniBand's verbs have no such counters.
"""

import ctypes
import math
import os
import socket
import statistics
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hvdtrain.ranks.messages import MOST_ADDRESSES, Traffic

# struct tcp_info of Linux's include/uapi/linux/tcp.h, since 4.10: bytes_acked, then busy_time and rwnd_limited.
ACKED, LIMITS = struct.Struct("=120xQ"), struct.Struct("=168xQQ")
TCP_INFO_BYTES = 192
LEAST = 2**16
"""Where a step sends fewer bytes, its time is that of the messages and not of their data."""
DELAYED_ACK = 0.04
"""Seconds for which the other end may delay the acknowledgement of a step's last data (Linux's TCP_DELACK_MIN). They
are subtracted, but at most three quarters of the time: in short steps new data comes before they are over."""
FACTOR = 2.0
"""A slow link takes at least FACTOR times as long for the same data as links between other hosts."""

Connection = tuple[bytes, bytes]
"""The socket addresses of this end and of the other, in the kernel's format."""


@dataclass(frozen=True)
class Counters:
    """The kernel's counters of a connection: the bytes that were acknowledged, and for how many seconds some
    were not."""

    acked: int
    busy: float


@dataclass(frozen=True)
class Edge:
    """What each step sends from one host to another: the bytes, and for how many seconds they are under way."""

    source: int
    target: int
    size: float
    busy: float


@dataclass(frozen=True)
class SlowLink:
    """A host whose link takes `seconds` of each step for `size` bytes to or from another host, which take `others`
    seconds between other hosts."""

    host: int
    seconds: float
    others: float
    size: float


def parsed(info: bytes) -> Counters | None:
    """The counters in a TCP_INFO; None where the kernel has none. The time for which the other end had no room is left
    out, as then its process does not read, and no network is slow."""
    if len(info) < TCP_INFO_BYTES:
        return None
    (acked,), (busy, without_room) = ACKED.unpack_from(info), LIMITS.unpack_from(info)
    return Counters(acked, max(busy - without_room, 0) / 1e6)


def connections() -> dict[Connection, Counters]:
    """This process's TCP connections; none where the system is not Linux.

    They are read by libc: a socket.socket made of another owner's descriptor could change and close it, and is slower.
    """
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - a Path a name takes longer
    except OSError:
        return {}
    libc, found = ctypes.CDLL(None), {}
    buffer, length = ctypes.create_string_buffer(TCP_INFO_BYTES), ctypes.c_uint32()

    def answer(call: Callable[..., int], *arguments: int) -> bytes:
        """The bytes that the call writes; none where it fails."""
        length.value = TCP_INFO_BYTES
        return b"" if call(*arguments, buffer, ctypes.byref(length)) else buffer.raw[: length.value]

    for number in numbers:
        if counters := parsed(answer(libc.getsockopt, number, socket.IPPROTO_TCP, socket.TCP_INFO)):
            own, other = answer(libc.getsockname, number), answer(libc.getpeername, number)
            if own and other:  # else it listens
                found[own, other] = counters
    return found


def address(sockaddr: bytes) -> str:
    """The IP address in a socket address, an IPv4 one as IPv4; "" for another family."""
    family = int.from_bytes(sockaddr[:2], sys.byteorder)
    if family not in {socket.AF_INET, socket.AF_INET6}:
        return ""
    text = socket.inet_ntop(family, sockaddr[4:8] if family == socket.AF_INET else sockaddr[8:24])
    return text.removeprefix("::ffff:")


def traffic(
    before: Mapping[Connection, Counters], now: Mapping[Connection, Counters], steps: int
) -> tuple[Traffic, ...]:
    """What was sent in each of so many steps, by the addresses of both ends, most bytes first.

    Parallel connections are busy at the same time, so that their seconds are those of one of them.
    """
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for connection, counters in now.items():
        began = before.get(connection, Counters(0, 0.0))
        if began.acked > counters.acked or began.busy > counters.busy:
            began = Counters(0, 0.0)  # another connection with the same ends
        sent = (counters.acked - began.acked) / steps
        if sent < LEAST:
            continue
        own, other = map(address, connection)
        if own != other and not own.startswith("127."):
            busy = (counters.busy - began.busy) / steps
            size, seconds = sums.get((own, other), (0.0, 0.0))
            sums[own, other] = size + sent, max(seconds, busy - DELAYED_ACK, busy / 4)
    found = [Traffic(own=own, other=other, size=size, busy=busy) for (own, other), (size, busy) in sums.items()]
    return tuple(sorted(found, key=lambda each: -each.size)[:MOST_ADDRESSES])


def edges(reports: Mapping[int, Iterable[Traffic]], hosts: Mapping[int, int]) -> list[Edge]:
    """The traffic between hosts. `reports` and `hosts` are by rank.

    An address belongs to a host if one of its ranks sends from it, so that downloads and trackers are left out.
    """
    by_address = {each.own: hosts[rank] for rank, report in reports.items() for each in report}
    sums: dict[tuple[int, int], tuple[float, float]] = {}
    for rank, report in reports.items():
        for each in report:
            ends = hosts[rank], by_address.get(each.other, hosts[rank])
            size, busy = sums.get(ends, (0.0, 0.0))
            sums[ends] = size + each.size, max(busy, each.busy)
    return [Edge(*ends, *sums[ends]) for ends in sums if ends[0] != ends[1]]


def slow_links(found: Iterable[Edge], least: float) -> list[SlowLink]:
    """The hosts to and from which data takes FACTOR times as long as between others, and `least` seconds more of each
    step. Of two hosts neither is named, as there are no others."""
    left, slow = list(found), []
    while worst := _slowest(left, least):
        slow.append(worst)
        left = [each for each in left if worst.host not in (each.source, each.target)]
    return slow


def _slowest(found: list[Edge], least: float) -> SlowLink | None:
    """The host with the slowest link, where that link is slow."""
    fastest: dict[int, float] = {}
    for each in found:
        for end in (each.source, each.target):
            fastest[end] = min(fastest.get(end, math.inf), _pace([each]))
    hosts = {each.source for each in found} & {each.target for each in found}
    if not hosts:
        return None
    # Of a slow link every edge is slow; a host at the other end of one has fast ones too.
    host = max(sorted(hosts), key=fastest.__getitem__)
    out, into = [each for each in found if each.source == host], [each for each in found if each.target == host]
    others = [_pace([each]) for each in found if host not in (each.source, each.target)]
    if not others:
        return None
    usual, longest = statistics.median(others), max(out + into, key=lambda each: each.busy)
    expected = usual * longest.size
    if min(_pace(out), _pace(into)) < FACTOR * usual or longest.busy - expected < least:
        return None
    return SlowLink(host, longest.busy, expected, longest.size)


def _pace(found: list[Edge]) -> float:
    """The seconds that a byte takes on this link."""
    return sum(each.busy for each in found) / sum(each.size for each in found)
