"""Energy counters, in trees and libraries like those of real nodes: each counts once, and no guess is made."""

import sys

import pytest

from hvdtrain.launch import devices
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import energy, messages
from hvdtrain.ranks.energy import Book, EnergyWatch, gpu_counters, node_counters
from hvdtrain.ranks.liveness import Listener, Liveness
from hvdtrain.ranks.peers import Peers

KWH = 3.6e6
NVML = """
used = {"GPU-a": 1000.0, "GPU-b": 2000.0, "GPU-c": 3000.0}  # millijoules
def nvmlInit(): pass
def nvmlDeviceGetCount(): return len(used)
def nvmlDeviceGetHandleByIndex(index): return list(used)[index]
def nvmlDeviceGetUUID(handle): return handle
def nvmlDeviceGetTotalEnergyConsumption(handle): return used[handle]
"""
AMDSMI = """
used = {"0a-b": 10, "0c-d": 20}
def amdsmi_init(): pass
def amdsmi_get_processor_handles(): return list(used)
def amdsmi_get_gpu_device_uuid(handle): return handle
def amdsmi_get_energy_count(handle):
    return {"energy_accumulator": used[handle], "counter_resolution": 15.3, "timestamp": 0}
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """`library(name, text)`: a module of that name can be imported; gives it."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return __import__(name)

    return make


@pytest.fixture(autouse=True)
def no_library(monkeypatch):
    """This machine's own libraries are not asked."""
    for name in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, name, None)


def pm_counters(sys_folder, joules):
    folder = sys_folder / "cray/pm_counters"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "energy").write_text(f"{joules} J 1700000000000000 us\n")


def rapl(sys_folder, zone, name, microjoules, most=262_143_328_850):
    folder = sys_folder / "class/powercap" / zone
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")


def used(counters):
    return {counter.key: counter.joules() for counter in counters}


def test_a_crays_node(tmp_path):
    pm_counters(tmp_path, 1_000_000)
    counters = node_counters(tmp_path)
    pm_counters(tmp_path, 1_000_000 + 2 * KWH)
    assert used(counters) == {"pm_counters:node": pytest.approx(2 * KWH, rel=1e-6)}


def test_processors_and_their_memory(tmp_path):
    """Not a part of a processor, nor the whole board, which would count them twice."""
    zones = {"intel-rapl:0": "package-0", "intel-rapl:1": "package-1", "intel-rapl:0:0": "core",
             "intel-rapl:0:1": "dram", "intel-rapl:2": "psys"}  # fmt: skip
    for zone, name in zones.items():
        rapl(tmp_path, zone, name, 5)
    counters = node_counters(tmp_path)
    for zone, name in zones.items():
        rapl(tmp_path, zone, name, 5 + 7_000_000)
    assert used(counters) == {"rapl:intel-rapl-0": 7.0, "rapl:intel-rapl-1": 7.0, "rapl:intel-rapl-0-1": 7.0}


def test_a_counter_that_begins_anew(tmp_path):
    rapl(tmp_path, "intel-rapl:0", "package-0", 900, most=1000)
    (counter,) = node_counters(tmp_path)
    for now in (950, 50, 40):  # 50, then 100, then 990 microjoules
        rapl(tmp_path, "intel-rapl:0", "package-0", now, most=1000)
        counter.joules()
    assert counter.joules() == pytest.approx(1140e-6)


@pytest.mark.parametrize("text", ["", "zero J", "\0\0"])
def test_a_counter_that_cannot_be_read_is_left_out(tmp_path, text):
    pm_counters(tmp_path, 5)
    (tmp_path / "cray/pm_counters/energy").write_text(text)
    rapl(tmp_path, "intel-rapl:0", "package-0", "denied")
    assert node_counters(tmp_path) == node_counters(tmp_path / "none") == []


def test_a_gpu_whose_driver_is_reset_counts_from_zero(library):
    nvml = library("pynvml", NVML)
    (counter,) = gpu_counters({"CUDA_VISIBLE_DEVICES": "2"})
    for now in (4000.0, 500.0, 700.0):  # 1000, then 500 and 200 millijoules
        nvml.used["GPU-c"] = now
        counter.joules()
    assert counter.joules() == pytest.approx(1.7)


VISIBLE = {
    None: ["GPU-a", "GPU-b", "GPU-c"], "1": ["GPU-b"], "2,0": ["GPU-c", "GPU-a"], "GPU-b": ["GPU-b"], "": [],
    "NoDevFiles": [], "GPU-": [], "MIG-GPU-a/3/0": [], "0,0": [], "1,9,0": ["GPU-b"], "0x0": ["GPU-a"],
}  # fmt: skip


@pytest.mark.parametrize("visible", VISIBLE, ids=str)
def test_the_gpus_that_the_process_may_use(library, visible):
    nvml = library("pynvml", NVML)
    counters = gpu_counters({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    nvml.used.update({name: value + 5000 for name, value in nvml.used.items()})
    assert used(counters) == {f"nvml:{name}": 5.0 for name in VISIBLE[visible]}


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, ["0a-b", "0c-d"]),
        ({"ROCR_VISIBLE_DEVICES": "1"}, ["0c-d"]),
        ({"HIP_VISIBLE_DEVICES": "1"}, ["0c-d"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-ff"}, ["0a-b"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, []),
    ],
    ids=str,
)
def test_gpus_of_amd(library, monkeypatch, environ, names):
    smi = library("amdsmi", AMDSMI)
    monkeypatch.setattr(devices, "amd_gpus", lambda: ("GPU-ff", "GPU-fe"))
    counters = gpu_counters(environ)
    smi.used.update({name: count + 1_000_000 for name, count in smi.used.items()})
    assert used(counters) == {f"amdsmi:{name}": pytest.approx(15.3) for name in names}


def test_a_driver_that_fails_leaves_its_gpus_out(library):
    library("pynvml", "def nvmlInit(): raise RuntimeError('driver/library version mismatch')")
    assert gpu_counters({}) == []


def test_what_several_ranks_see_counts_once_a_node():
    """Two nodes of two ranks; both ranks of a node see both of its GPUs, whose names are the same on each node."""
    book = Book()
    for host in ("node1-0", "node2-1"):
        for late in (0.0, 1.0):
            book.enter(host, {"nvml:GPU-a": 100.0 + late, "nvml:GPU-b": 50.0 + late})
        book.enter(host, {"pm_counters:node": 1000.0})
    assert book.totals() == {
        "joules": {"nvml": 304.0, "pm_counters": 2000.0}, "nodes": {"nvml": 2, "pm_counters": 2}
    }  # fmt: skip
    book.begin()  # another run of the process begins at nothing
    book.enter("node1-0", {"pm_counters:node": 1050.0})
    assert book.totals()["joules"] == {"nvml": 0.0, "pm_counters": 50.0}


def watch(tmp_path, rank=0, local_rank=0, listener=None):
    topology = Topology(rank, 4, local_rank, 2, rank // 2, "node1", "srun", None)
    return EnergyWatch(Liveness(Peers(topology), listener or Listener()), "node1-0", {}, tmp_path)


def test_the_last_reading_is_made_at_the_end(tmp_path, monkeypatch):
    pm_counters(tmp_path, 0)
    totals, listener = [], Listener()
    listener.energy = lambda found, is_last: totals.append(found())
    own = watch(tmp_path, listener=listener)
    made = energy.node_counters
    ready = []
    monkeypatch.setattr(energy, "node_counters", lambda *given: ready.append(made(*given)) or ready[0])
    own.start()
    while not ready:
        pass
    pm_counters(tmp_path, 360)
    own.close()
    assert totals == [{"joules": {"pm_counters": 360.0}, "nodes": {"pm_counters": 1}}]


def test_one_rank_of_a_node_reads_the_nodes_counters(tmp_path):
    pm_counters(tmp_path, 0)
    second = watch(tmp_path, rank=1, local_rank=1)
    second.start()
    second.close()
    assert not second.book.totals()["joules"]


@pytest.mark.parametrize("joules", [{"x": 1.0}, {"nvml:a b": 1.0}, {"nvml:a": -1.0}, {"nvml:a": float("inf")}])
def test_readings_of_no_counter_are_refused(joules):
    with pytest.raises(ValueError):
        messages.Energy(joules=joules)
