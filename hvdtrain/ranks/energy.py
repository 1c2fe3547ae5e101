"""Energy counters of nodes and GPUs: each is read by the ranks that see it, and counted once.

Sources: Cray's pm_counters, of a whole node; RAPL, of processors and their memory, for whoever may read it; NVML and
amdsmi, of GPUs. All count joules since some time before; what a run used is a difference.
"""

import contextlib
import importlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.ranks import messages, timeouts
from hvdtrain.ranks.liveness import Liveness

CLOSE_SECONDS = 0.5


class Counter:
    """One counter of energy. `read` gives joules since some time before."""

    def __init__(self, key: str, read: Callable[[], float], wraps: float = 0.0) -> None:
        """`key`: SOURCE:DEVICE, the same for every process of the host. `wraps`: the joules at which it begins anew."""
        self.key, self._read, self._wraps = re.sub(r"[^\w:-]", "-", key), read, wraps
        self._last, self._sum = read(), 0.0

    def joules(self) -> float:
        """Since the counter was made. Raises OSError and what its library raises."""
        now = self._read()
        # A driver that was reset counts from 0.
        self._sum += now - self._last if now >= self._last else now + max(self._wraps - self._last, 0.0)
        self._last = now
        return self._sum


def node_counters(sys: Path = Path("/sys")) -> list[Counter]:
    """What counts a host's energy, for one process of the host."""
    zones = [zone for zone in sorted((sys / "class/powercap").glob("intel-rapl:*")) if _is_counted(zone)]
    return _made([partial(_of_cray, sys / "cray/pm_counters/energy"), *(partial(_of_zone, zone) for zone in zones)])


def _of_cray(file: Path) -> Counter:
    """Of a node, whose file holds `12345 J 1700000000000000 us`."""
    return Counter("pm_counters:node", lambda: float(file.read_text().split()[0]))


def _of_zone(zone: Path) -> Counter:
    """Of a RAPL zone, in microjoules."""
    wraps = int((zone / "max_energy_range_uj").read_text()) / 1e6
    return Counter(f"rapl:{zone.name.replace(':', '-')}", lambda: int((zone / "energy_uj").read_text()) / 1e6, wraps)


def _is_counted(zone: Path) -> bool:
    """Whether it is a processor, or memory beside one; not a part of a processor, nor the whole board."""
    with contextlib.suppress(OSError):
        name = (zone / "name").read_text().strip()
        return name.startswith("package") or name == "dram"
    return False


def gpu_counters(environ: Mapping[str, str]) -> list[Counter]:
    """Of the GPUs that this process may use; none where their library is not installed, or cannot count."""
    return [*_nvidia(environ.get("CUDA_VISIBLE_DEVICES")), *_amd(environ.get("ROCR_VISIBLE_DEVICES"))]


def _nvidia(visible: str | None) -> list[Counter]:
    with contextlib.suppress(Exception):  # of a driver
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        found = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        uuids = [uuid.decode() if isinstance(uuid, bytes) else uuid for uuid in found]
        names = None if visible is None else [name.strip() for name in visible.split(",")]
        return _made(
            partial(_of_nvidia, nvml, handle, uuid)
            for index, (handle, uuid) in enumerate(zip(handles, uuids, strict=True))
            # What else may be visible is a MIG device, whose energy is not known.
            if names is None
            or any(name == str(index) or (name.startswith("GPU-") and uuid.startswith(name)) for name in names)
        )
    return []


def _of_nvidia(nvml: Any, handle: Any, uuid: str) -> Counter:
    return Counter(f"nvml:{uuid}", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)


def _amd(visible: str | None) -> list[Counter]:
    with contextlib.suppress(Exception):  # of a driver
        smi = importlib.import_module("amdsmi")
        smi.amdsmi_init()
        handles = list(smi.amdsmi_get_processor_handles())
        wanted = range(len(handles)) if visible is None else [int(one) for one in visible.split(",") if one.isdigit()]
        return _made(partial(_of_amd, smi, handles[index]) for index in wanted if index < len(handles))
    return []


def _of_amd(smi: Any, handle: Any) -> Counter:
    def joules() -> float:
        count = smi.amdsmi_get_energy_count(handle)
        return float(count["energy_accumulator"] * count["counter_resolution"] / 1e6)

    return Counter(f"amdsmi:{smi.amdsmi_get_gpu_device_uuid(handle)}", joules)


def _made(makers: Iterable[Callable[[], Counter]]) -> list[Counter]:
    """Those counters that can be read: RAPL's only by root on most hosts."""
    made = []
    for make in makers:
        with contextlib.suppress(Exception):
            made.append(make())
    return made


class Book:
    """Rank 0's: what each counter of each host has last shown."""

    def __init__(self) -> None:
        self._joules: dict[tuple[str, str], float] = {}
        self._before: dict[tuple[str, str], float] = {}
        """As they were when this process's run began, where it has trained another one before."""

    def enter(self, host: str, joules: Mapping[str, float]) -> None:
        """What a process of that host has read: a counter that several see is one."""
        for key, value in joules.items():
            self._joules[host, key] = max(value, self._joules.get((host, key), 0.0))

    def begin(self) -> None:
        """Another run begins."""
        self._before = dict(self._joules)

    def totals(self) -> dict[str, dict[str, float]]:
        """By source: the joules of all hosts, and how many hosts those are."""
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
    """Reads this process's counters now and then, in a thread, and hands them to rank 0; on rank 0, keeps all."""

    def __init__(self, liveness: Liveness, host: str, environ: Mapping[str, str], sys: Path = Path("/sys")) -> None:
        """`host`: what rank 0 knows this rank's host by."""
        self.liveness, self.topology, self.host = liveness, liveness.topology, host
        self.book = Book()
        self.on_reading: Callable[[], None] = lambda: None
        """On rank 0, called when the book has new readings."""
        self._environ, self._sys = environ, sys
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="energy", daemon=True)

    def start(self) -> None:
        """Begins to read, where there is a counter."""
        self._thread.start()

    def close(self) -> None:
        """Reads once more, and ends."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def reported(self, host: str, joules: Mapping[str, float]) -> None:
        """On rank 0: a process of that host has read its counters."""
        self.book.enter(host, joules)
        self.on_reading()

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
