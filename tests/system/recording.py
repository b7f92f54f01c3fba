"""User classes without code for Rankzero that record the samples they receive; copied into the folder of a test."""

import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC


class Rows(Dataset):
    def __init__(self, count: int, noise: float = 0.0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.rand(count, 4, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        inputs = self.inputs[index]
        if self.noise:  # from each generator that users draw from
            inputs = inputs + self.noise * (torch.rand(4) + random.random() + np.random.rand())
        return index, inputs, inputs.sum(0, keepdim=True)


class Data(LightningDataModule):
    def __init__(
        self, count: int = 640, held_out: int = 33, size: int = 16, noise: float = 0.0, workers: int = 0, seed: int = 0
    ):
        super().__init__()
        self.count, self.held_out, self.size, self.noise, self.workers = count, held_out, size, noise, workers
        self.seed = seed

    def train_dataloader(self):
        data = Rows(self.count, self.noise, self.seed)
        workers = {"num_workers": self.workers, "persistent_workers": self.workers > 0}
        return DataLoader(data, batch_size=self.size, shuffle=True, **workers)

    def val_dataloader(self):
        return DataLoader(Rows(self.held_out), batch_size=self.size)


class Shuffled(IterableDataset):
    """Stream that divides its rows among the processes, and reads them in a random order; the last rank has fewer."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self):
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        worker = get_worker_info()
        part, parts = (rank * worker.num_workers + worker.id, world * worker.num_workers) if worker else (rank, world)
        own = list(range(part, len(self.rows), parts))
        own = own[: len(own) // 2] if rank == world - 1 else own
        random.shuffle(own)
        return map(self.rows.__getitem__, own)


class Stateful(Shuffled):
    """Stream in a fixed order that can continue after any row."""

    next_row = 0

    def __iter__(self):
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        own = list(range(rank, len(self.rows), world))
        for number in range(self.next_row, len(own) // (1 + rank)):
            self.next_row = number + 1
            yield self.rows[own[number]]
        self.next_row = 0

    def state_dict(self):
        return {"next": self.next_row}

    def load_state_dict(self, state):
        self.next_row = state["next"]


class StreamData(Data):
    def train_dataloader(self):
        loader = super().train_dataloader()
        return DataLoader(Shuffled(loader.dataset), batch_size=self.size, num_workers=self.workers)


class StatefulData(Data):
    def train_dataloader(self):
        return DataLoader(Stateful(super().train_dataloader().dataset), batch_size=self.size)


class Net(LightningModule):
    def __init__(self, dropout: float = 0.0, rate: float = 0.05, pause: float = 0.0) -> None:
        super().__init__()
        self.pause = pause
        layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)
        self.layers, self.rate = torch.nn.Sequential(*layers), rate
        self.train_error, self.val_error = MeanAbsoluteError(), MeanAbsoluteError()

    def record_samples(self, stage: str, indices) -> None:
        line = json.dumps([stage, self.trainer.current_epoch, self.trainer.global_step, indices.tolist()])
        with Path(f"noted-{self.global_rank}.jsonl").open("a") as file:
            file.write(line + "\n")

    def training_step(self, batch, batch_idx):
        indices, inputs, targets = batch
        time.sleep(self.pause)
        self.record_samples("train", indices)
        outputs = self.layers(inputs)
        loss = torch.nn.functional.mse_loss(outputs, targets)
        self.train_error(outputs, targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train_error", self.train_error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        indices, inputs, targets = batch
        if not self.trainer.sanity_checking:
            self.record_samples("val", indices)
        outputs = self.layers(inputs)
        self.val_error(outputs, targets)
        self.log("val_loss", torch.nn.functional.mse_loss(outputs, targets))
        self.log("val_error", self.val_error)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss", "strict": False}}


class Weighted(Net):
    """Weights each batch by some of its targets."""

    def training_step(self, batch, batch_idx):
        loss, weights = super().training_step(batch, batch_idx), batch[1][:, 0].mul(20).floor()
        losses = (self.layers(batch[1]) - batch[2]).square().squeeze(1)
        return {"loss": (losses * weights).sum() / weights.sum() + 0 * loss, "weight": weights.sum()}


class Scored(Net):
    """Logs in all ways that Lightning offers."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__(rate=rate)
        self.area, self.batch_means = BinaryAUROC(), []
        self.many = MetricCollection({"error": MeanAbsoluteError(), "square": MeanSquaredError()})

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        _, inputs, _ = batch
        outputs, targets = self.layers(inputs).sigmoid()[:, 0], (inputs[:, 0] > 0.5).long()
        self.area.update(outputs, targets)
        self.many.update(outputs, targets.float())
        self.log("area", self.area)
        self.log_dict(self.many)
        self.log("samples", float(len(inputs)), reduce_fx="sum")
        self.log("largest", outputs.max(), reduce_fx="max")
        self.log("stepped", outputs.mean(), on_step=True, on_epoch=True, sync_dist=True)
        if batch_idx == 0:
            self.log("early", outputs.mean(), batch_size=len(inputs))
        self.batch_means.append(outputs.mean())

    def on_validation_epoch_end(self):
        mean = torch.stack(self.batch_means).mean() if self.batch_means else torch.tensor(0.0)
        self.log("late", mean, sync_dist=True)
        self.batch_means.clear()


class Brief(Scored):
    """Has a `validation_step` without `batch_idx`."""

    def validation_step(self, batch):
        super().validation_step(batch, 0)


class Alone(LightningModule):
    """Uses manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = (self.layer(batch[1]) - 1).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Pair(LightningDataModule):
    """Data module with two loaders; the shorter one restarts until the longer one ends."""

    def train_dataloader(self):
        return {
            name: DataLoader(Rows(count), batch_size=size, shuffle=True)
            for name, count, size in (("long", 65, 4), ("short", 10, 3))
        }


class Flowing(IterableDataset):
    """Stream with different samples on each rank."""

    def __iter__(self):
        rank = int(os.environ["RANK"])
        return iter([(i, torch.full((4,), i / 10), torch.tensor([1.0])) for i in range(10 * rank, 10 * rank + 10)])


class Stream(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Flowing(), batch_size=2)

    def val_dataloader(self):
        return [DataLoader(Rows(1), batch_size=2), DataLoader(Flowing(), batch_size=2)]


class OfStreams(Net):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if not self.trainer.sanity_checking:
            self.record_samples(f"val {dataloader_idx}", batch[0])


class OfPairs(Alone):
    def training_step(self, batch, batch_idx):
        line = json.dumps(["train", 0, self.trainer.global_step, [batch[name][0].tolist() for name in batch]])
        with Path(f"noted-{self.global_rank}.jsonl").open("a") as file:
            file.write(line + "\n")
        super().training_step(batch["long"], batch_idx)


class Fault(Callback):
    """Ends one rank in a hook, or raises an error there.

    Args:
        where: Hook (`batch`, `validation` or `epoch`), and what ends the rank: a signal, `segfault`, `exit`, `_exitN`
            of Python or `C_exitN` of the C library; without it, an error is raised.
        step: The number of steps after which it happens.
    """

    def __init__(self, where: str, rank: int = 1, step: int = 6) -> None:
        self.hook, _, self.end = where.partition(" ")
        self.rank, self.step = rank, step

    def strike(self, hook: str, trainer) -> None:
        if hook != self.hook or trainer.global_rank != self.rank or trainer.global_step < self.step:
            return
        library, _, code = self.end.partition("_exit")
        if code:
            (ctypes.CDLL(None) if library else os)._exit(int(code))
        if self.end == "segfault":
            ctypes.string_at(0)
        if self.end == "exit":
            sys.exit(3)
        if self.end:
            os.kill(os.getpid(), getattr(signal, self.end))
        raise KeyError("deliberate")

    def on_train_batch_end(self, trainer, *arguments) -> None:
        self.strike("batch", trainer)

    def on_validation_batch_end(self, trainer, *arguments) -> None:
        self.strike("validation", trainer)

    def on_train_epoch_end(self, trainer, *arguments) -> None:
        self.strike("epoch", trainer)


class KillInStep(Callback):
    """Requests a stop of a run at the start of the step after `step` steps, and kills all its ranks `seconds` later."""

    def __init__(self, step: int, seconds: float) -> None:
        from rankzero.training.callbacks import safe_point

        self.step, self.seconds = step, seconds
        safe_point.COPY_SHARE = 1.0  # a copy before each slow step, although copies take long on a busy machine

    def on_train_batch_start(self, trainer, *arguments) -> None:
        if trainer.global_step == self.step:
            if trainer.global_rank == trainer.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
