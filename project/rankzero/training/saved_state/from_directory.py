"""Makes `MyModule.load_from_checkpoint` read checkpoint directories too. Imports neither torch nor Lightning.

`load_from_checkpoint` opens its argument as a file, and Lightning has no hook to change this. Therefore two functions
of `lightning.pytorch.core.saving` (2.6.6; the same in 2.0 to 2.6) are replaced. `pl_load`, replaced as soon as the
module is imported, passes a path that is not a directory to Lightning's function. The first load makes
`load_from_checkpoint` accept the keys of compiled submodules too.
Without the replacement, stock Lightning can read the `state.pt` in a checkpoint directory.
"""

import sys
import warnings
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

SAVING_MODULE = "lightning.pytorch.core.saving"

_COMPILED = "_orig_mod."
"""Part of each key of a submodule that `torch.compile` returned."""


def install() -> None:
    """Replaces `pl_load` now, or as soon as Lightning imports its module."""
    loaded = [sys.modules[name] for name in (SAVING_MODULE, "pytorch_lightning.core.saving") if name in sys.modules]
    for module in loaded:
        _replace(module)
    if not loaded and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Import finder that replaces `pl_load` once `SAVING_MODULE` is imported; the other finders locate the module."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != SAVING_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_replace(module: ModuleType) -> None:
                exec_module(module)
                _replace(module)

            spec.loader.exec_module = exec_and_replace  # type: ignore[method-assign]
        return spec


def _replace(saving_module: Any) -> None:
    stock = getattr(saving_module, "pl_load", None)
    if stock is None or getattr(stock, "reads_directories", False):
        return

    def pl_load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None, **options: Any) -> Any:
        from rankzero.checkpoints.hyper_parameters import omitted_hyper_parameters
        from rankzero.checkpoints.manifest import directory_of
        from rankzero.checkpoints.safe_load import load
        from rankzero.training.lightning_inside import replace_load_state

        replace_load_state(saving_module, with_keys_of)

        if isinstance(path_or_url, str | Path) and (folder := directory_of(Path(path_or_url))).is_dir():
            checkpoint = load(folder, map_location, weights_only is False, trust_setting="weights_only=False")
        else:
            checkpoint = stock(path_or_url, map_location=map_location, weights_only=weights_only, **options)
        if omitted := omitted_hyper_parameters(checkpoint):
            entries = ", ".join(f"{name}={text}" for name, text in omitted.items())
            warnings.warn(
                f"the checkpoint {path_or_url} was saved without the hyperparameters that are objects ({entries}): "
                f"load_from_checkpoint uses its arguments ({', '.join(f'{name}=...' for name in omitted)}), "
                "or their defaults",
                stacklevel=4,
            )
        return checkpoint

    pl_load.reads_directories = True  # type: ignore[attr-defined]
    saving_module.pl_load = pl_load


def with_keys_of(module: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a state dict with the keys of a module, if one was saved with submodules compiled and one was not."""
    names = [f"{name}." for name, _ in module.named_modules()]
    if not any(_COMPILED in name for name in (*names, *state)):
        return state
    keys = {key.replace(_COMPILED, ""): key for key in module.state_dict()}
    return {keys.get(key.replace(_COMPILED, ""), key): value for key, value in state.items()}
