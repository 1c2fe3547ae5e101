"""The network of a cluster: links from every host to one switch, with a rate and a delay, and a way to cut them.

The switch is a bridge in a network namespace of its own, so that the machine's network shows nothing of it. Where
the kernel cannot delay (no netem), our own program replaces the bridge.
"""

import errno
import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from mini import ClusterError
from mini.processes import ENVIRON, PATH, Process, in_network, run, wait
from mini.state import HEAD, SWITCH, Cluster

RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DELAYS = {"us": 1e3, "ms": 1e6, "s": 1e9}
UNLIMITED = ("", "")


def quantity(flag: str, text: str, units: dict[str, float]) -> float:
    """1gbit in bits a second, 50us in nanoseconds; none is 0. Raises ClusterError for what is neither."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if text in {"", "none"}:
        return 0
    if not found or found[2] not in units or not float(found[1]):
        raise ClusterError(f"{flag} must be a number above 0 with one of {', '.join(units)}, or none; got {text!r}.")
    return float(found[1]) * units[found[2]]


def needs_program(rate: str, delay: str) -> bool:
    """Whether this machine's kernel cannot give the links that rate and delay."""
    wanted = [["tbf", "rate", "1gbit", "burst", "256k", "latency", "50ms"]] if rate else []
    wanted += [["netem", "delay", "1ms"]] if delay else []
    trial = ("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root")
    return any(not shutil.which("tc", path=PATH) or run(*trial, *qdisc, check=False).returncode for qdisc in wanted)


def start_switch(cluster: Cluster) -> None:
    """The switch, in a network namespace of its own, without a link as yet."""
    command = ["sleep", "infinity"]
    if cluster.program:
        command = [str(cluster.folder / "switch"), str(cluster.folder / "switch.ctl")]
        run("cc", "-O2", "-o", command[0], str(Path(__file__).with_name("switch.c")))
        os.mkfifo(command[1])
    machine_network = Path("/proc/self/ns/net").readlink()
    with (cluster.folder / "log" / "switch.log").open("w") as log:
        child = subprocess.Popen(
            ["unshare", "--net", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=ENVIRON,
            cwd="/",
            start_new_session=True,
        )
    cluster.processes[SWITCH] = switch = Process.of(child.pid)
    cluster.save()
    wait(lambda: Path(f"/proc/{child.pid}/ns/net").readlink() != machine_network, 10, "the switch's network")
    if cluster.program:
        wait(lambda: _taken(cluster, ""), 10, "the switch to listen")
        return
    for interface in cluster.networks:
        bridge = f"br-{interface}"
        in_network(switch, "ip", "link", "add", bridge, "type", "bridge", "stp_state", "0", "forward_delay", "0")
        in_network(switch, "ip", "link", "set", bridge, "up")


def connect(cluster: Cluster, host: str) -> None:
    """A host's links, up and with their rate and delay."""
    switch, node = cluster.process(SWITCH), cluster.process(host)
    for number, interface in enumerate(cluster.networks):
        address = cluster.address(host, interface)
        port = _port(cluster, host, interface)
        # A node that comes back keeps its hardware address: the others have it in their tables.
        hardware = "02:00:" + ":".join(f"{int(byte):02x}" for byte in address.split("."))
        if cluster.program:
            _send(cluster, f"add {port} {number}")
            take = ("ip", "link", "set", port, "netns", str(node.pid), "name", interface)
            wait(functools.partial(_succeeds, switch, *take), 10, f"the port {port}")
        else:
            # A dead host's network lives on, port and all, while its connections wait for packets.
            in_network(switch, "ip", "link", "del", port, check=False)
            peer = ("peer", "name", interface, "netns", str(node.pid))
            in_network(switch, "ip", "link", "add", port, "type", "veth", *peer)
            in_network(switch, "ip", "link", "set", port, "master", f"br-{interface}", "up")
        in_network(node, "ip", "link", "set", interface, "address", hardware)
        in_network(node, "ip", "address", "add", f"{address}/16", "dev", interface)
        in_network(node, "ip", "link", "set", interface, "up")
    in_network(node, "ip", "link", "set", "lo", "up")
    if host != HEAD and cluster.links[host] != UNLIMITED:
        shape(cluster, host)


def _succeeds(process: Process, *command: str) -> bool:
    return in_network(process, *command, check=False).returncode == 0


def shape(cluster: Cluster, host: str) -> None:
    """Gives a node's link its rate, both ways, and its delay, one way; with a fabric, the fabric's link."""
    rate, delay = cluster.links[host]
    interface = list(cluster.networks)[-1]
    port = _port(cluster, host, interface)
    if cluster.program:
        _send(cluster, f"shape {port} {quantity('rate', rate, RATES):.0f} {quantity('delay', delay, DELAYS):.0f}")
        return
    for process, device in ((cluster.process(host), interface), (cluster.process(SWITCH), port)):
        change = ("tc", "qdisc")
        in_network(process, *change, "del", "dev", device, "root", check=False)
        parent = ["root"]
        if rate:
            limit = ("tbf", "rate", rate, "burst", "256k", "latency", "50ms")
            in_network(process, *change, "add", "dev", device, "root", "handle", "1:", *limit)
            parent = ["parent", "1:1"]
        if delay and device == port:  # every packet passes one port on its way out of the switch
            later = ("netem", "delay", delay, "limit", "100000")
            in_network(process, *change, "add", "dev", device, *parent, "handle", "10:", *later)


def block(cluster: Cluster, host: str, blocked: bool) -> None:
    """Has the switch drop what a host sends and what is sent to it; the host sees its carrier all the time."""
    for interface in cluster.networks:
        port = _port(cluster, host, interface)
        if cluster.program:
            _send(cluster, f"block {port} {blocked:d}")
        else:
            master = ["nomaster"] if blocked else ["master", f"br-{interface}"]
            in_network(cluster.process(SWITCH), "ip", "link", "set", port, *master)


def _port(cluster: Cluster, host: str, interface: str) -> str:
    """A link's end at the switch; short, as an interface's name has 15 characters."""
    return f"port{cluster.hosts.index(host)}.{list(cluster.networks).index(interface)}"


def _send(cluster: Cluster, order: str) -> None:
    if not _taken(cluster, order):
        raise ClusterError("the switch is dead: slurm/minicluster down, then up.")


def _taken(cluster: Cluster, order: str) -> bool:
    """Whether the switch took this order: opened like this, a pipe without a reader is an error and no wait."""
    try:
        pipe = os.open(cluster.folder / "switch.ctl", os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        raise
    os.write(pipe, f"{order}\n".encode())
    os.close(pipe)
    return True
