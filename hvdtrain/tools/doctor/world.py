"""The step, judged: whether its ranks are one world, and how fast they add."""

from hvdtrain.launch import keys
from hvdtrain.tools.doctor import launch
from hvdtrain.tools.doctor.findings import Check, Findings, Verdict, count

OURS = "+hvdtrain."
NO_LAUNCHER = "no launcher: start the doctor as you start the training to check the step"


def checks(findings: Findings) -> list[Check]:
    """The lines about the ranks together."""
    judged = {"world": _world(findings), "ports": _ports(findings), "allreduce": _allreduce(findings)}
    return [verdict.named(name, "step") for name, verdict in judged.items()]


def _ports(findings: Findings) -> Verdict:
    """Whether other users of the nodes are kept out of the ranks' own ports."""
    step = findings.step
    if step.topology.launcher == "alone":
        return Verdict("skip", NO_LAUNCHER)
    if step.topology.size == 1:
        return Verdict("ok", "one rank opens none")
    if not step.key:
        return Verdict("fail", step.bad_key or "no key: no home to keep one in, and no munge", fix=keys.MAKE)
    if findings.software.has_horovod and OURS not in findings.software.horovod:
        found = f"Horovod {findings.software.horovod} lets anybody into its rendezvous"
        return Verdict("warn", found, fix="python -m hvdtrain build")
    return Verdict("ok", f"closed to other users by a key ({step.key}); ddp's and TensorFlow's own engines' stay open")


def _world(findings: Findings) -> Verdict:
    step, live = findings.step, findings.step.live
    promised = f"{step.topology.launcher} started {count(step.topology.size, 'rank')}"
    if step.topology.launcher == "alone":
        return Verdict("skip", NO_LAUNCHER)
    if not findings.software.has_horovod:
        return Verdict("fail", f"{promised}; no Horovod to join them", "Horovod", "python -m hvdtrain build")
    if wrong := launch.mismatch(step, findings.software.mpi):
        return Verdict("fail", wrong, f"one world of {step.topology.size} ranks", launch.fix(findings))
    if live is None or live.size is None:
        error = live.error if live else "nothing"
        return Verdict("fail", f"{promised}; Horovod reported: {error}", "rank and size", launch.fix(findings))
    if (live.rank, live.size) != (step.topology.rank, step.topology.size):
        found = f"{promised}; Horovod reports rank {live.rank} of {live.size}"
        return Verdict("fail", found, f"rank {step.topology.rank} of {step.topology.size}", launch.fix(findings))
    return Verdict("ok", f"{promised}, and Horovod reports {live.size} on {count(findings.hosts, 'host')}")


def _allreduce(findings: Findings) -> Verdict:
    live, topology = findings.step.live, findings.step.topology
    if topology.launcher == "alone":
        return Verdict("skip", NO_LAUNCHER)
    if live is None or live.size != topology.size:
        return Verdict("skip", "no world to add over")
    if not live.seconds:
        error = live.error or "no end"
        return Verdict("fail", f"the ranks joined, then: {error}", "an allreduce", launch.fix(findings))
    rates = ", ".join(
        f"{size // 10**6} MB: {_rate(size, live.size, seconds)}" for size, seconds in live.seconds.items()
    )
    return Verdict("ok", f"over {live.over}; {rates}")


def _rate(size: int, ranks: int, seconds: float) -> str:
    """Bus bandwidth, as NCCL's tests define it; a single rank sends nothing, so its time is given."""
    if ranks == 1:
        return f"{seconds * 1e3:.2g} ms"
    return f"{size * 2 * (ranks - 1) / ranks / seconds / 1e9:.2g} GB/s"
