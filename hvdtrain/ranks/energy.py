"""Energy counters of nodes and GPUs. Several ranks may read the same counter, which is counted once.

The sources are Cray's pm_counters of a whole node; RAPL of processors and their memory, which on most hosts only root
may read; NVML and amdsmi of GPUs. All count joules from an unknown time on: what a run used is a difference.
"""

import contextlib
import importlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.launch import devices
from hvdtrain.ranks import messages, timeouts
from hvdtrain.ranks.liveness import Liveness

CLOSE_SECONDS = 0.5


class Counter:
    """One counter of energy. `read` returns joules since an unknown time."""

    def __init__(self, key: str, read: Callable[[], float], wraps: float = 0.0) -> None:
        """`key`: SOURCE:DEVICE, equal for all processes of the host. `wraps`: the joules at which it restarts
        from 0."""
        self.key, self._read, self._wraps = re.sub(r"[^\w:-]", "-", key), read, wraps
        self._last, self._sum = read(), 0.0

    def joules(self) -> float:
        """The joules used since this object was made. Raises OSError and what the counter's library raises."""
        now = self._read()
        # A driver that was reset counts from 0.
        self._sum += now - self._last if now >= self._last else now + max(self._wraps - self._last, 0.0)
        self._last = now
        return self._sum


def node_counters(sys: Path = Path("/sys")) -> list[Counter]:
    """The counters of a whole host, which one of its processes reads."""
    zones = [zone for zone in sorted((sys / "class/powercap").glob("intel-rapl:*")) if _is_counted(zone)]
    return _made([partial(_of_cray, sys / "cray/pm_counters/energy"), *(partial(_of_zone, zone) for zone in zones)])


def _of_cray(file: Path) -> Counter:
    """The counter of a Cray node, whose file reads like `12345 J 1700000000000000 us`."""
    return Counter("pm_counters:node", lambda: float(file.read_text().split()[0]))


def _of_zone(zone: Path) -> Counter:
    """The counter of a RAPL zone, whose file is in microjoules."""
    wraps = int((zone / "max_energy_range_uj").read_text()) / 1e6
    return Counter(f"rapl:{zone.name.replace(':', '-')}", lambda: int((zone / "energy_uj").read_text()) / 1e6, wraps)


def _is_counted(zone: Path) -> bool:
    """Whether a RAPL zone is a processor or its memory, rather than a part of a processor or the whole board."""
    with contextlib.suppress(OSError):
        name = (zone / "name").read_text().strip()
        return name.startswith("package") or name == "dram"
    return False


def gpu_counters(environ: Mapping[str, str]) -> list[Counter]:
    """The counters of the GPUs that this process may use; none where their library is missing or has no counter."""
    return [*_nvidia(environ.get("CUDA_VISIBLE_DEVICES")), *_amd(environ)]


def _nvidia(visible: str | None) -> list[Counter]:
    with contextlib.suppress(Exception):  # of a driver
        nvml, gpus = devices.nvml_gpus()
        found = [list(gpus.items())[index] for index in devices.visible_indices(visible, list(gpus))]
        # What else may be visible is a MIG device, whose energy is not known.
        return _made(partial(_of_nvidia, nvml, handle, uuid) for uuid, handle in found)
    return []


def _of_nvidia(nvml: Any, handle: Any, uuid: str) -> Counter:
    return Counter(f"nvml:{uuid}", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)


def _amd(environ: Mapping[str, str]) -> list[Counter]:
    with contextlib.suppress(Exception):  # of a driver
        smi = importlib.import_module("amdsmi")
        smi.amdsmi_init()
        handles = list(smi.amdsmi_get_processor_handles())
        found = devices.visible_amd(environ, devices.amd_gpus() or [""] * len(handles))
        return _made(partial(_of_amd, smi, handles[index]) for index in found if index < len(handles))
    return []


def _of_amd(smi: Any, handle: Any) -> Counter:
    def joules() -> float:
        count = smi.amdsmi_get_energy_count(handle)
        return float(count["energy_accumulator"] * count["counter_resolution"] / 1e6)

    return Counter(f"amdsmi:{smi.amdsmi_get_gpu_device_uuid(handle)}", joules)


def _made(makers: Iterable[Callable[[], Counter]]) -> list[Counter]:
    """The counters that can be read."""
    made = []
    for make in makers:
        with contextlib.suppress(Exception):
            made.append(make())
    return made


class Book:
    """On rank 0, the last reading of each counter of each host."""

    def __init__(self) -> None:
        self._joules: dict[tuple[str, str], float] = {}
        self._before: dict[tuple[str, str], float] = {}
        """The readings at the beginning of this run, in a process that has trained another run before."""

    def enter(self, host: str, joules: Mapping[str, float]) -> None:
        """Takes what a process of that host has read. A counter that several processes read is counted once."""
        for key, value in joules.items():
            self._joules[host, key] = max(value, self._joules.get((host, key), 0.0))

    def begin(self) -> None:
        """Begins to count for another run of this process."""
        self._before = dict(self._joules)

    def totals(self) -> dict[str, dict[str, float]]:
        """By source, the joules of all hosts, and how many hosts have that source."""
        hosts: dict[str, set[str]] = {}
        joules: dict[str, float] = {}
        for (host, key), value in self._joules.items():
            source = key.partition(":")[0]
            hosts.setdefault(source, set()).add(host)
            joules[source] = joules.get(source, 0.0) + value - self._before.get((host, key), 0.0)
        return {
            "joules": {name: round(value, 3) for name, value in joules.items()},
            "nodes": {name: len(of) for name, of in hosts.items()},
        }


class EnergyWatch:
    """Reads this process's counters now and then, in a thread, and sends them to rank 0, which keeps those of all."""

    def __init__(self, liveness: Liveness, host: str, environ: Mapping[str, str], sys: Path = Path("/sys")) -> None:
        """`host`: the label by which rank 0 knows this rank's host."""
        self.liveness, self.topology, self.host = liveness, liveness.topology, host
        self.book = Book()
        self._environ, self._sys = environ, sys
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="energy", daemon=True)

    def start(self) -> None:
        """Begins to read in a thread, if there is a counter."""
        self._thread.start()

    def close(self) -> None:
        """Reads a last time, and ends the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def reported(self, host: str, joules: Mapping[str, float]) -> None:
        """On rank 0: a process of that host has read its counters."""
        self.book.enter(host, joules)
        self.liveness.listener.energy(self.book.totals, is_last=False)

    def _work(self) -> None:
        with self.liveness.diagnosing("energy"):
            of_node = node_counters(self._sys) if self.topology.local_rank == 0 else []
            counters = [*of_node, *gpu_counters(self._environ)]
            while counters:
                is_last = self._closing.wait(timeouts.of_each(timeouts.ENERGY, self.topology.size))
                self._read(counters)
                if is_last:
                    break

    def _read(self, counters: list[Counter]) -> None:
        joules = {}
        for counter in counters[: messages.MOST_COUNTERS]:
            with contextlib.suppress(Exception):  # of a driver: the last value stays
                joules[counter.key] = counter.joules()
        with self.liveness.changed:
            if self.topology.is_rank_0:
                self.reported(self.host, joules)
                return
            with contextlib.suppress(ValueError):  # what no counter shows is not sent
                self.liveness.peers.send(messages.Energy(joules=joules))
