"""Plugins of Lightning that users pass to the Trainer."""

from collections.abc import Sequence
from typing import Any

from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.plugins import AsyncCheckpointIO

from rankzero.messages import RequestError

ENVIRONMENTS = (LightningEnvironment, MPIEnvironment, SLURMEnvironment, TorchElasticEnvironment)
"""Cluster environments whose launcher Rankzero detects."""


def without_replaced(plugins: Sequence[Any], arguments: dict[str, Any]) -> list[Any]:
    """Returns the plugins without those whose work Rankzero does, and sets the arguments that they stand for.

    `LightningEnvironment` stands for `launcher="local"`, and `SLURMEnvironment(auto_requeue=False)` for
    `requeue="never"`.

    Args:
        plugins: The user's plugins.
        arguments: Rankzero's arguments of the Trainer by name, which are changed.

    Raises:
        RequestError: A plugin would replace Rankzero's checkpoints or launchers by code of the user's.
    """
    kept = []
    for plugin in plugins:
        if type(plugin) is LightningEnvironment and arguments["launcher"] == "auto":
            arguments["launcher"] = "local"
        if type(plugin) is SLURMEnvironment and not plugin.auto_requeue:
            arguments["requeue"] = "never"
        if type(plugin) in (*ENVIRONMENTS, TorchCheckpointIO):
            continue
        if type(plugin) is AsyncCheckpointIO and type(plugin.checkpoint_io or TorchCheckpointIO()) is TorchCheckpointIO:
            continue
        if isinstance(plugin, CheckpointIO | ClusterEnvironment):
            work = "writes checkpoints" if isinstance(plugin, CheckpointIO) else "detects the launcher"
            raise RequestError(f"plugins=[{type(plugin).__name__}(...)]", f"Rankzero {work} itself", "no such plugin")
        kept.append(plugin)
    return kept
