"""GPUs that are not there: a stand-in for torch.cuda's streams, memory and graphs, for tests on the CPU.

Within `Recorder()` torch takes the devices cuda:0, cuda:1, …: their tensors are the CPU's, with a note of the device. A
copy with non_blocking=True, between pinned memory and a device, is made when the host or another stream waits for its
stream, as late as a GPU may make it. Until then its destination cannot be read; the source of a copy to a device is
read at that time, and the source of a copy to the host when the copy was issued.
"""

import contextlib
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

CPU = torch.device("cpu")
READS_NOTHING = {
    "__len__", "dim", "element_size", "is_complex", "is_contiguous", "is_conj", "is_floating_point", "is_neg", "numel",
    "size", "stride", "_has_compatible_shallow_copy_type",
}  # fmt: skip
WAITS = {"item", "tolist", "__bool__", "__float__", "__int__"}


class Stream:
    """A CUDA stream, and the copies that were issued on it and may still be under way."""

    def __init__(self, recorder, device=None, name="another"):
        self.recorder, self.device, self.name = recorder, torch.device(device or "cuda:0"), name
        self.under_way = []

    def wait_stream(self, other):
        self.recorder.log.append(f"{self.name} waits for {other.name}")
        other.finish(to_host=False)

    def record_event(self):
        """An event is the stream and the copies that it stands behind."""
        return self, list(self.under_way)

    def wait_event(self, event):
        stream, before = event
        self.recorder.log.append(f"{self.name} waits for an event of {stream.name}")
        later = [copy for copy in stream.under_way if not any(copy is each for each in before)]
        stream.under_way = before
        stream.finish(to_host=False)
        stream.under_way += later

    def synchronize(self):
        self.recorder.log.append(f"the host waits for {self.name}")
        self.finish()

    def finish(self, to_host=True):
        """Makes the copies that are under way; without `to_host` only those to a device."""
        rest = []
        for destination, source, values in self.under_way:
            if self.recorder.device_of(destination) == CPU and not to_host:
                rest.append((destination, source, values))
            else:
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    destination.detach().copy_(source if values is None else values)
        self.under_way = rest


class Recorder(TorchFunctionMode):
    """Use as a context manager around the code under test. `log`: what waited, and for what. `streams`: those that the
    code has made. `copies`: (from, to, bytes, pinned) of each copy between devices. `largest`: the bytes of the largest
    tensor that an operation has made on a device."""

    def __init__(self):
        super().__init__()
        self.log, self.streams, self.copies, self.largest = [], [], [], 0
        self.default = Stream(self, name="the default")
        self.current = self.default
        self._special = {"to": self._to, "copy_": self._filled, "pin_memory": self._pin_memory, "numpy": self._numpy}
        self._device, self._pinned = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self._made_on, self._may_use = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()

    def __enter__(self):
        self._patches = contextlib.ExitStack()
        stand_ins = {
            "Stream": self._new_stream,
            "stream": self._on,
            "current_stream": lambda device=None: self.current,
            "synchronize": self._synchronize,
            "CUDAGraph": lambda: Graph(self.log),
            "graph": self._capture,
        }
        self._patches.enter_context(mock.patch.multiple(torch.cuda, **stand_ins))
        self._patches.enter_context(mock.patch.object(torch.Tensor, "record_stream", self._record_stream))
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error)

    @property
    def _record_stream(self):
        return lambda tensor, stream: self._may_use.__setitem__(tensor, [*self._may_use.get(tensor, ()), stream])

    def device_of(self, tensor):
        return self._device.get(tensor, CPU)

    def _new_stream(self, device=None):
        self.streams.append(Stream(self, device))
        return self.streams[-1]

    def _synchronize(self, device=None):
        self.log.append(f"the host waits for {torch.device(device or 'cuda:0')}")
        for stream in (self.default, *self.streams):
            stream.finish()

    @contextlib.contextmanager
    def _on(self, stream):
        before, self.current = self.current, stream
        self.log.append(f"on {stream.name}")
        yield
        self.log.append("end")
        self.current = before

    @contextlib.contextmanager
    def _capture(self, graph, **given):
        self.log.append(f"into a graph, {given}")
        yield
        self.log.append("end")

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name in {"__get__", "__set__"}:
            return self._attribute(function.__self__.__name__, name, function, *args)
        if name in self._special:
            return self._special[name](*args, **kwargs)
        if name in READS_NOTHING:
            return function(*args, **kwargs)
        return self._computed(name, function, args, kwargs)

    def _attribute(self, name, kind, function, tensor, *value):
        found = function(tensor, *value)
        if kind == "__set__":
            if name == "data":
                self._note(tensor, self.device_of(value[0]))
            return found
        if name in {"device", "is_cuda", "is_cpu"}:
            device = self.device_of(tensor)
            return device if name == "device" else name.endswith(device.type)
        return self._note(found, self.device_of(tensor)) if isinstance(found, torch.Tensor) else found

    def _computed(self, name, function, args, kwargs):
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        # The lists of these functions lie element by element on one device.
        lists = [
            each for each in args if isinstance(each, list | tuple) and each and name.startswith(("_foreach", "_fused"))
        ]
        groups = [[e for e in each if isinstance(e, torch.Tensor)] for each in zip(*lists, strict=True)] or [given]
        for group in groups:
            devices = {self.device_of(each) for each in group if each.dim() or each in self._device}
            assert len(devices) <= 1, f"{name} of tensors on {' and '.join(sorted(map(str, devices)))}"
        for each in given:
            self._check_readable(name, each)
        device = kwargs.pop("device", None)
        if device is None:
            device = next((d for each in given if (d := self.device_of(each)) != CPU), CPU)
        pinned = kwargs.pop("pin_memory", False)
        if name in WAITS and device != CPU:
            self.current.synchronize()
        found = function(*args, **kwargs)
        if lists:
            for made, group in zip(found or (), groups, strict=False):
                self._note(made, self.device_of(group[0]))
            return found
        tree_map_only(torch.Tensor, lambda each: self._note(each, torch.device(device), pinned), found)
        return found

    def _note(self, tensor, device, pinned=False):
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            self._device[tensor] = device
            self._made_on.setdefault(tensor, self.current)
            self.largest = max(self.largest, tensor.nbytes)
        elif tensor in self._device:
            del self._device[tensor]
        if pinned:
            self._pinned[tensor] = True
        return tensor

    def _check_readable(self, name, tensor):
        on_device = self.device_of(tensor) != CPU
        if on_device:
            self.current.finish(to_host=False)  # a stream does one after the other
        for stream in (self.default, *self.streams):
            for destination, *_ in stream.under_way:
                same = destination.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                assert not (same and tensor.nbytes), f"{name} reads a copy that is under way"
        made_on = self._made_on.get(tensor, self.current)
        if on_device and made_on is not self.current:
            assert self.current in self._may_use.get(tensor, ()), f"{name} of memory that {made_on.name} may reuse"

    def _pin_memory(self, tensor):
        assert self.device_of(tensor) == CPU, "only memory of the host can be pinned"
        return self._note(tensor.clone(), CPU, pinned=True)

    def _numpy(self, tensor):
        self._check_readable("numpy", tensor)
        assert self.device_of(tensor) == CPU, "numpy of a tensor on a GPU"
        return tensor.numpy()

    def _to(self, tensor, *args, copy=False, **kwargs):
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        before = self.device_of(tensor)
        after = torch.device("cuda", device.index or 0) if device and device.type == "cuda" else device or before
        self._check_readable("to", tensor)
        pinned = tensor in self._pinned and dtype in {None, tensor.dtype}
        if dtype or layout:
            tensor = tensor.to(dtype=dtype or tensor.dtype, memory_format=layout or torch.preserve_format)
        if after == before:
            return self._note(tensor, after)
        moved = tensor.clone()
        self._note(moved, after)
        self._copy(moved, tensor, before, after, non_blocking, pinned or before != CPU)
        return moved

    def _filled(self, held, tensor, non_blocking=False):
        self._check_readable("copy_", tensor)
        before, after = self.device_of(tensor), self.device_of(held)
        held.copy_(tensor)
        if before != after:
            self._copy(held, tensor, before, after, non_blocking, held in self._pinned or tensor in self._pinned)
        return held

    def _copy(self, held, tensor, before, after, non_blocking, pinned):
        self.copies.append((str(before), str(after), tensor.nbytes, pinned))
        if CPU not in (before, after):
            return
        if not (non_blocking and pinned):
            self.current.synchronize()
            return
        values = tensor.detach().clone() if after == CPU else None
        with torch.no_grad():
            held.detach().fill_(85)
        self.current.under_way.append((held, tensor.detach(), values))


class Graph:
    def __init__(self, log):
        self.log = log

    def replay(self):
        self.log.append("replay")
