"""Lightning's strategies with what the run owns put in: the order of samples, and evaluation without DDP."""

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import RunningStage

from project.sampling.sharding import Sharding


def _process(strategy: Strategy, sharding: Sharding, loader: object) -> object:
    assert strategy.lightning_module is not None
    trainer = strategy.lightning_module.trainer
    if trainer.state.stage is not RunningStage.TRAINING:
        return sharding.apply(loader, training=False)
    # A resumed epoch goes on behind the last batch that was trained on. Lightning turns the sampler to the epoch only
    # after loader workers have begun to draw from it, so that it has to be told here already.
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    unfinished = trainer.fit_loop.restarting and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    epoch = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    return sharding.apply(loader, training=True, epoch=epoch, start=progress.ready if unfinished else 0)


class OneProcess(SingleDeviceStrategy):
    """One process on one device.

    Args:
        sharding: The order of samples.
        arguments: See `SingleDeviceStrategy`.
    """

    def __init__(self, sharding: Sharding, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.sharding = sharding

    def process_dataloader(self, dataloader: object) -> object:
        return _process(self, self.sharding, dataloader)


class DataParallel(DDPStrategy):
    """One process a device, gradients averaged by DistributedDataParallel.

    Args:
        sharding: The order of samples.
        arguments: See `DDPStrategy`.
    """

    strategy_name = "ddp"

    def __init__(self, sharding: Sharding, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.sharding = sharding

    def process_dataloader(self, dataloader: object) -> object:
        return _process(self, self.sharding, dataloader)

    def on_validation_start(self) -> None:
        """Takes rank zero's buffers (running means of batch norm) on every rank. All ranks must call."""
        super().on_validation_start()
        assert self.lightning_module is not None
        for buffer in self.lightning_module.buffers():
            torch.distributed.broadcast(buffer, src=0)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module itself, not DDP around it.

        DDP's forward broadcasts buffers in evaluation too; ranks with different numbers of batches would wait for one
        another for ever.
        """
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)
