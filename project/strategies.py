"""Lightning's strategies with what the run owns put in: the order of samples, and evaluation without DDP."""

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import RunningStage
from torch.nn.parallel import DistributedDataParallel

from project.sampling.sharding import Sharding
from project.team import Team


class _RunOwnsOrder(Strategy):
    """Mixin: the run's order of samples takes the place of the loaders' own.

    Args:
        sharding: The order of samples.
        arguments: The strategy's.
    """

    def __init__(self, sharding: Sharding, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.sharding = sharding

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        stage = self.lightning_module.trainer.state.stage
        return self.sharding.apply(dataloader, training=stage is RunningStage.TRAINING)

    def on_train_start(self) -> None:
        """Turns the training samples to where the checkpoint left off.

        Lightning may have made the loader's iterator before it restored the loops (`estimated_stepping_batches` does),
        and loader processes draw from the sampler at once; so the iterator is made anew (lightning 2.6).
        """
        super().on_train_start()
        assert self.lightning_module is not None
        loop, order = self.lightning_module.trainer.fit_loop, self.sharding.training
        if not (loop.is_resuming and order):
            return
        batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress.current
        unfinished = loop.restarting and not batches.is_last_batch
        if unfinished and epochs.processed == epochs.ready:  # type: ignore[attr-defined]
            # A run that max_steps ended within an epoch has counted that epoch as processed.
            epochs.processed -= 1  # type: ignore[attr-defined]
            epochs.completed = epochs.processed  # type: ignore[attr-defined]
        order.set_epoch(epochs.processed)  # type: ignore[attr-defined]
        order.start = batches.current.ready if unfinished else 0
        assert loop._data_fetcher is not None
        iter(loop._data_fetcher)


class OneProcess(_RunOwnsOrder, SingleDeviceStrategy):
    """One process on one device."""


class DataParallel(_RunOwnsOrder, DDPStrategy):
    """One process a device, gradients averaged by DistributedDataParallel.

    Args:
        sharding: The order of samples.
        team: All processes.
        arguments: The strategy's.
    """

    def __init__(self, sharding: Sharding, team: Team, **arguments: Any) -> None:
        super().__init__(sharding=sharding, **arguments)
        self.team = team

    @property
    def root_device(self) -> torch.device:
        """This process's device; Lightning would look it up by local rank, but here each process lists its own."""
        assert self.parallel_devices is not None
        return self.parallel_devices[0]

    def setup_distributed(self) -> None:
        """Makes the process group where the team has met; Lightning then finds it there. All ranks must call."""
        self.team.join(self._get_process_group_backend(), self.root_device, self._timeout)
        super().setup_distributed()

    def on_validation_start(self) -> None:
        """Takes rank zero's buffers (running means of batch norm) on every rank. All ranks must call."""
        super().on_validation_start()
        if isinstance(self.model, DistributedDataParallel) and self.model.will_sync_module_buffers():
            self.model._sync_buffers()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module itself, not DDP around it.

        DDP's forward broadcasts buffers in evaluation too; ranks with different numbers of batches would wait for one
        another for ever.
        """
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)
