"""What a person wants to see of a cluster."""

from mini import cluster
from mini.processes import inside
from mini.state import HEAD, Cluster


def table(found: Cluster) -> str:
    """The hosts, their links, their states in SLURM, and the jobs."""
    states = cluster.states(found) if found.processes[HEAD].alive else {}
    rows = [("node", "address", "link", "SLURM")]
    for host in found.hosts:
        slurm = ("slurmctld" if states else "no response") if host == HEAD else states.get(host, "?")
        rows.append((host, " ".join(found.address(host, name) for name in found.networks), _link(found, host), slurm))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{len(found.nodes)} nodes, {found.description}; {found.folder}", ""]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(
        [*lines, "", _jobs(found) if states else f"slurmctld does not respond: slurm/minicluster heal {HEAD}"]
    )


def _link(found: Cluster, host: str) -> str:
    if not found.processes[host].alive:
        return "power is off"
    if host in found.cut:
        return "cut"
    return " ".join(filter(None, found.links.get(host, ()))) or "unlimited"


def _jobs(found: Cluster) -> str:
    form = "--format=%.7i %.9P %.20j %.8u %.10T %.10M %R"
    listed = inside(found.process(HEAD), "squeue", form).rstrip()
    return listed if "\n" in listed else "no job is running or waiting"
