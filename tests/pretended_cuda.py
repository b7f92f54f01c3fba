"""A pretended CUDA device on a machine without one, which counts where the main thread would wait for a real one."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda", 0)

READS = {
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
    *(Tensor.__repr__, Tensor.__contains__, Tensor.equal, Tensor.allclose, Tensor.nonzero, Tensor.unique),
    *(Tensor.bincount, Tensor.masked_select, torch.equal, torch.allclose, torch.is_nonzero, torch.nonzero),
    *(torch.unique, torch.bincount, torch.masked_select),
}
"""Functions whose result, or the shape of whose result, the host cannot know before the device has computed it."""

ATTRIBUTES: dict[str, Any] = {"device": GPU, "is_cuda": True, "is_cpu": False}


class PretendedCuda(TorchFunctionMode):
    """Tensors "on the GPU" are CPU tensors whose storage is marked.

    Attributes:
        is_counting: Whether waits are counted.
        waits: Number of waits by kind.
        places: Number of waits by kind and innermost calls, for the message of a failed test.
        launches: Number of operations that were given to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}  # holds each marked storage, so that its address is not used again
        self.is_counting, self.launches = False, 0
        self.waits, self.places = Counter[str](), Counter[str]()

    def count_from_here(self) -> None:
        """Begins to count, from zero."""
        self.is_counting = True
        self.waits.clear()
        self.places.clear()

    def wait(self, kind: str) -> None:
        """Counts a wait."""
        if not self.is_counting:
            return
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename][:-2]
        calls = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames[-4:]]
        self.waits[kind] += 1
        self.places[f"{kind}: {' > '.join(calls)}"] += 1

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is on the pretended device."""
        with torch._C.DisableTorchFunction():
            return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._storages

    def _mark(self, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            return
        with torch._C.DisableTorchFunction():
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", str(func))
        if func is torch.device or name == "_parse_to":
            return func(*args, **kwargs)
        flat, _ = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        on_gpu = [tensor for tensor in tensors if self.holds(tensor)]
        if name == "__get__":
            return self._attribute(func, args, kwargs, is_on_gpu=bool(on_gpu))
        if func is Tensor.pin_memory:
            return args[0].clone()
        to_gpu = func is Tensor.cuda or any(map(_is_cuda, flat))
        to_cpu = func is Tensor.cpu or (func is Tensor.to and any(map(_is_cpu, flat)))
        waits_for_copy = not kwargs.get("non_blocking") and not (func is Tensor.copy_ and len(args) > 2 and args[2])
        if func in READS and on_gpu:
            self.wait(name)
        elif name in ("__getitem__", "__setitem__", "index_put_") and on_gpu:
            if any(tensor.dtype == torch.bool for tensor in tensors[1:]):
                self.wait("boolean index")
        elif to_cpu and on_gpu and waits_for_copy:
            self.wait("copy to the host")
        elif to_gpu and waits_for_copy and (func in (torch.tensor, torch.as_tensor) or (tensors and not on_gpu)):
            self.wait("copy from pageable memory")
        elif func is Tensor.copy_ and len(tensors) == 2 and len(on_gpu) == 1 and waits_for_copy:
            self.wait("copy between host and device")
        args, kwargs = tree_map(_on_cpu, args), tree_map(_on_cpu, kwargs)
        kwargs.pop("pin_memory", None)
        self.launches += bool(on_gpu or to_gpu)
        result = func(*args, **kwargs)
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu) and result is args[0] and bool(on_gpu) == to_cpu:
            with torch._C.DisableTorchFunction():  # a copy on the other device
                result = result if isinstance(result, torch.nn.Parameter) else result.clone()
        is_copy_to_host = func is Tensor.copy_ and not self.holds(args[0])
        if (on_gpu or to_gpu) and not to_cpu and not is_copy_to_host:
            tree_map(self._mark, result)
        return result

    def _attribute(self, func: Any, args: Any, kwargs: Any, is_on_gpu: bool) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if is_on_gpu and attribute in ATTRIBUTES:
            return ATTRIBUTES[attribute]
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        if is_on_gpu:
            self._mark(result)  # `.grad`, `.data`
        return result


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return bool(value.type == "cuda")
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def _is_cpu(value: Any) -> bool:
    return value == "cpu" or (isinstance(value, torch.device) and value.type == "cpu")


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if _is_cuda(value) else value


def _event_of(device: PretendedCuda) -> type:
    class Event:
        """An event that has occurred once the device has been given further work."""

        def __init__(self, **_: Any) -> None:
            self._launches = 0

        def record(self, *_: Any) -> None:
            self._launches = device.launches

        def query(self) -> bool:
            return device.launches > self._launches

        def synchronize(self) -> None:
            if not self.query():
                device.wait("event")

        def wait(self, *_: Any) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return 1.0

    return Event


def _grouped_on(device: PretendedCuda, group: Callable[..., Any]) -> Callable[..., Any]:
    def grouped(tensors: Any, *arguments: Any) -> Any:  # in C++, which returns the real device
        place = GPU if device.holds(tensors[0][0]) else torch.device("cpu")
        return {(place, dtype): rest for (_, dtype), rest in group(tensors, *arguments).items()}

    return grouped


@contextmanager
def pretended_cuda() -> Iterator[PretendedCuda]:
    """Makes torch see one GPU, whose tensors remain in the memory of the host."""
    device = PretendedCuda()
    properties = SimpleNamespace(
        uuid="GPU-0", name="Pretended", total_memory=2**36, major=9, minor=0, multi_processor_count=1,
        pci_domain_id=0, pci_bus_id=1, pci_device_id=0,
    )  # fmt: skip
    stream = SimpleNamespace(
        is_capturing=lambda: False, wait_stream=lambda *_: None, wait_event=lambda *_: None,
        synchronize=lambda: device.wait("stream"), record_event=lambda *_: None,
    )  # fmt: skip
    functions: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("set_device", "set_rng_state", "manual_seed", "manual_seed_all"), lambda _: None),
        **dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), lambda *_: None),
        **dict.fromkeys(("current_device", "max_memory_allocated"), lambda *_: 0),
        **dict.fromkeys(("Stream", "current_stream"), lambda *_, **__: stream),
        "device_count": lambda: 1,
        "mem_get_info": lambda _: (2**35, 2**36),
        "is_available": lambda: True,
        "synchronize": lambda *_: device.wait("torch.cuda.synchronize"),
        "Event": _event_of(device),
        "stream": lambda _: ExitStack(),
        "is_current_stream_capturing": lambda: False,
        "get_device_name": lambda *_: "Pretended",
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    }
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda *_: None))  # takes a real stream only
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", lambda *_: stream))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, create=True))
        group = _grouped_on(device, clip_grad._group_tensors_by_device_and_dtype)
        stack.enter_context(mock.patch.object(clip_grad, "_group_tensors_by_device_and_dtype", group))
        stack.enter_context(device)
        yield device
