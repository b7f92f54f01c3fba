"""The private names of torch (2.10 to 2.15) that Rankzero uses.

`Tensor.backward`, `Optimizer.step` and `Optimizer.zero_grad` check for tensor subclasses, profilers and hooks at every
call. If none is in use, the functions here call the function that torch would call in the end. A step of a small model
(MLP, 32 samples) takes 0.84 times as long with `stepper` (0.55 to 0.91; `benchmarks/tricks.py --which optimizer-step`).
"""

import json
import logging
import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module
from torch.storage import TypedStorage

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore"]

missing: dict[str, str] = {}
"""Feature -> why it is off: a private name of torch or Lightning is missing, or the release is not tested."""


@contextmanager
def names_for(feature: str) -> Iterator[None]:
    """Turns a feature off if a private name that the block imports or reads is missing."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        missing[feature] = str(error).partition(" (/")[0]  # without the path of the module


FAST_CALLS = "fast calls of torch's backward pass and optimizers"

run_backward: Any = None
is_profiled: Any = None
step_wrapper: CodeType | None = None
"""Code object of the wrapper that torch puts around the `step` of every optimizer class."""
if (2, 10) <= tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 15):
    with names_for(FAST_CALLS):
        run_backward = torch.autograd.Variable._execution_engine.run_backward
        is_profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
        step_wrapper = Optimizer.profile_hook_step(Optimizer.step).__code__
else:
    missing[FAST_CALLS] = f"not tested with torch {torch.__version__}"


def backward(loss: Tensor) -> None:
    """Does what `loss.backward()` does, but saves 50,000 of a small step's 690,000 instructions (4 microseconds).

    Raises:
        RuntimeError: The same errors as from `loss.backward()`.
    """
    is_plain = type(loss) is Tensor and loss.is_cpu and loss.is_floating_point() and loss.requires_grad
    if run_backward is None or not is_plain or loss.numel() != 1:
        loss.backward()
        return
    # Each pass needs a new seed: autograd may store it as the gradient of a parameter, which is modified later.
    seed = torch.ones_like(loss, memory_format=torch.preserve_format)
    run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def stepper(optimizer: Optimizer) -> Callable[[Callable[[], Any]], Any]:
    """Returns a function that does what `optimizer.step(closure=closure)` does."""
    kind = type(optimizer)
    wrapped, set_step = kind.step, vars(optimizer).get("step")
    is_of_schedule = getattr(set_step, "_wrapped_by_lr_sched", False) and set_step.__wrapped__ is wrapped  # type: ignore[union-attr]
    is_plain = set_step is None or is_of_schedule
    if step_wrapper is None or getattr(wrapped, "__code__", None) is not step_wrapper or not is_plain:
        return lambda closure: optimizer.step(closure=closure)
    unwrapped = wrapped.__wrapped__  # type: ignore[attr-defined]
    hooks = step_hooks(optimizer)

    def step(closure: Callable[[], Any]) -> Any:
        if any(hooks) or is_profiled() or vars(optimizer).get("step") is not set_step or kind.step is not wrapped:
            return optimizer.step(closure=closure)
        set_step_called(optimizer)
        return unwrapped(optimizer, closure=closure)

    return step


def zero_gradients(optimizer: Optimizer) -> None:
    """Does what `optimizer.zero_grad()` does."""
    is_plain = type(optimizer).zero_grad is _zero_grad and "zero_grad" not in vars(optimizer)
    if not is_plain or is_profiled is None or is_profiled():
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad = None


_zero_grad = Optimizer.zero_grad


def set_last_rates(schedule: Any) -> None:
    """Sets the learning rates that a schedule returns as its last ones to those of its optimizer."""
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]


def is_profiling() -> bool:
    """Returns whether a profiler of torch is running."""
    return bool(is_profiled and is_profiled())


def active_collectives(backend: str) -> list[dict[str, Any]]:
    """Returns torch's records of the collectives that are not complete, the oldest first.

    Raises:
        NotImplementedError: This release records none for the backend.
    """
    module: Any = torch._C._distributed_c10d
    try:
        if backend == "gloo":
            dumps = [module._dump_fr_trace_json(onlyActive=True, backend="gloo")]  # since torch 2.15
        else:
            dumps = [module._dump_nccl_trace_json(onlyActive=True)]
            if hasattr(module, "ProcessGroupNCCL2"):  # the default of torch 2.15
                dumps.append(module._dump_fr_trace_json(onlyActive=True, backend="nccl2"))
    except (AttributeError, RuntimeError, TypeError) as error:
        raise NotImplementedError(f"torch {torch.__version__} does not record the collectives of {backend}") from error
    return [entry for dump in dumps for entry in json.loads(dump).get("entries", [])]


def synchronize_buffers(model: DistributedDataParallel) -> None:
    """Copies rank zero's buffers to every rank. All ranks must call."""
    model._sync_buffers()


def communication_times(model: DistributedDataParallel) -> dict[str, Any]:
    """Returns the times that DistributedDataParallel has measured, in nanoseconds."""
    times: dict[str, Any] = model._get_ddp_logging_data()
    return times


def onednn_supports_bf16() -> bool:
    """Returns whether oneDNN, which runs torch's convolutions and matrix products, may use bfloat16 instructions.

    `ONEDNN_MAX_CPU_ISA` and builds for older processors disable them.
    """
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_compiled(module: nn.Module) -> bool:
    """Returns whether `torch.compile` has compiled a module or a function that is one of its attributes."""
    return (
        module._compiled_call_impl is not None
        or isinstance(module, torch._dynamo.OptimizedModule)
        or any(
            isinstance(value, FunctionType) and hasattr(value, "_torchdynamo_orig_callable")
            for value in vars(module).values()
        )
    )


def prepared_batches(reader: Any) -> int:
    """Returns the number of batches that the worker processes of a DataLoader's iterator hold ready."""
    out_of_order = sum(len(task) == 2 for task in reader._task_info.values())
    return out_of_order + int(reader._data_queue.qsize())


def untyped(storage: TypedStorage) -> UntypedStorage:
    """Returns the storage without its dtype; the public method warns."""
    return storage._untyped_storage


def step_hooks(optimizer: Optimizer) -> list[Any]:
    """Returns the collections of hooks that `optimizer.step` calls; they stay the same objects."""
    hooks: list[Any] = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return [*hooks, optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks]


def set_step_called(optimizer: Optimizer) -> None:
    """Notes that the optimizer has taken a step; otherwise its learning rate scheduler warns."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def has_gradient_hook(parameter: Tensor) -> bool:
    """Returns whether a hook, other than Rankzero's, runs when a parameter's gradient is computed or accumulated."""
    if not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        return False
    hooks = [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]
    return any(not str(hook.__module__).startswith("rankzero.") for hook in hooks)


def tracing_problem() -> str | None:
    """Returns why this version of torch cannot compile a backward pass in a graph, or None."""
    import torch._dynamo.config  # takes a second

    can_trace = hasattr(torch._dynamo.config, "trace_autograd_ops")
    return None if can_trace else f"torch {torch.__version__} cannot trace a backward pass; torch 2.15 can"


def set_compile_cache(folder: Path) -> None:
    """Lets torch keep compiled code in a folder, unless the user has chosen one."""
    default = str(Path(tempfile.gettempdir()) / "torchinductor_")  # torch sets the variable to its default
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default).startswith(default):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute())


def compiler_problem(device: torch.device) -> str | None:
    """Returns why nothing can be compiled for a device, or None."""
    if device.type == "cuda":
        return None if find_spec("triton") else "Triton is not installed"
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    found = any(map(shutil.which, compilers))
    return None if found else f"no C++ compiler found ({' or '.join(compilers)}); install one, or set CXX to its path"


BACKEND = "inductor"
MAX_COMPILATIONS = 2
"""How often a graph is compiled: for the sizes of its first call, and once for sizes that vary."""


class GraphFunction:
    """A function that runs as one compiled graph, in which `torch.autograd.grad` may be called.

    Args:
        function: Method; sizes of its argument `step_batch` may vary, and the integer `step_index` varies.
        device: The device on which it runs. On a GPU, CUDA graphs replay it.
        checked: Attributes of the method's object, or arguments, that the caller checks itself.

    Attributes:
        compilations: How often the function was compiled.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device, checked: Sequence[str]) -> None:
        torch._dynamo.config.trace_autograd_ops = True
        torch._dynamo.config.skip_nnmodule_hook_guards = False  # hooks of layers may change in mid-run
        options: dict[str, Any] = {
            "fallback_random": True,  # the same random numbers as without a graph
            "layout_optimization": False,  # in channels_last, oneDNN computes some gradients wrong (see layout.py)
            "triton.cudagraphs": device.type == "cuda",
            "guard_filter_fn": lambda guards: [
                not (
                    guard.name.startswith(tuple(checked))
                    or OWN_GLOBALS.match(guard.name)
                    or guard.guard_type == "AUTOGRAD_SAVED_TENSORS_HOOKS"  # the graph saves no tensors for autograd
                )
                for guard in guards
            ],
        }
        settings: dict[str, Any] = {"recompile_limit": MAX_COMPILATIONS, "isolate_recompiles": True}
        if BACKEND == "inductor":
            settings["options"] = options
        self._function = torch.compile(function, fullgraph=True, backend=BACKEND, **settings)
        self.compilations = 0
        self._vary(r"L\['step_index'\]")

    def __call__(self, *arguments: Any) -> Any:
        """Runs the function.

        Raises:
            CannotCompileError: The function cannot be compiled, or no more often, or it raises an error.
        """
        counts = torch._dynamo.utils.counters["stats"]
        before = counts["unique_graphs"]
        try:
            result = self._function(*arguments)
        except Exception as error:  # an error of the function itself occurs again without graph
            raise CannotCompileError(_reason(error)) from error
        if counts["unique_graphs"] > before:
            self.compilations += 1
            self._vary(r"L\['step_(index|batch)'\]")
        return result

    def _vary(self, sources: str) -> None:
        """Lets the next compilation leave sizes and integers of arguments, and the Trainer's counters, open."""
        user_sources = torch.compiler.config.dynamic_sources.partition("L\\['step_")[0].rstrip(",")
        torch.compiler.config.dynamic_sources = ",".join(filter(None, (user_sources, sources, COUNTERS)))


OWN_GLOBALS = re.compile(r"G\['([^_]|__builtins|__import_(torch|rankzero)(_dot_|'))|G\['__import_\w+'\]\.torch\.")
"""Names of guards on what no user replaces: the globals of the traced function's file, of torch and of Rankzero."""


COUNTERS = r".*\._trainer\..*\.(ready|processed|completed)"
"""Names of the numbers of which Lightning computes `current_epoch` and `global_step`."""


class CannotCompileError(Exception):
    """A function cannot be compiled; the message names the user's line if one is to blame."""


class _Recompilations(logging.Filter):
    """Keeps the reason of the last recompilation, which torch only logs, and hides the log's lines."""

    reason = ""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "recompile_limit" not in message:
            return True
        match = re.search(r"last reason: \S+ (.*)", message)
        self.reason = match[1] if match else ""
        return False


def _reason(error: Exception) -> str:
    """Returns why torch could not compile a function: the user's line, and torch's own reason."""
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        guard, _, source = _recompilations.reason.partition("#")
        place = re.search(r"#\s*(\S+:\d+) in ", source)
        changed = f"{guard.strip()} does not hold in every step"
        return f"{Path(place[1]).name}: {source.partition('  #')[0].strip()} ({changed})" if place else changed
    frames = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*LIBRARIES, "<"))]  # "<": generated code
    reason = str(error).partition("\n")[0]
    if not own:
        return f"torch {torch.__version__} fails ({reason})"
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: {own[-1].line} ({reason})"


LIBRARIES = tuple(map(str, (Path(torch.__file__).parents[1], Path(os.__file__).parent, Path(__file__).parents[1])))
"""Folders of files that are not the user's: installed packages, Python's library and Rankzero."""

_recompilations = _Recompilations()
logging.getLogger("torch._dynamo.convert_frame").addFilter(_recompilations)
HIDDEN = {
    "torch._subclasses.fake_tensor": "failed while attempting to run meta",
    "torch.utils.cpp_extension": "No CUDA run",
}
"""Logger -> beginning of a message that repeats the error, or reports no problem."""
for logger, beginning in HIDDEN.items():
    logging.getLogger(logger).addFilter(lambda record, text=beginning: not str(record.msg).startswith(text))  # type: ignore[misc]
