"""Measurements of two ranks, compared with what the ranks have computed."""

import json

import pytest
from reported import scalars_of

from system.forks import fit_on_ranks

MODULE = """
import json, torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "broadcast_object_list", "barrier",
    "all_gather_object", "gather", "reduce", "all_gather_single")

class Net(LightningModule):
    # Writes the loss of each sample and the number of collectives that Python calls in each step.

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.records, self.calls = torch.nn.Linear(3, 1), [], 0

    def on_train_start(self):
        for name in COLLECTIVES:
            if hasattr(torch.distributed, name):
                setattr(torch.distributed, name, self.counted(getattr(torch.distributed, name)))

    def counted(self, function):
        def call(*arguments, **settings):
            self.calls += 1
            return function(*arguments, **settings)
        return call

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        losses = (self.layer(inputs) - targets).square().squeeze(1)
        self.records.append((self.trainer.fit_loop.epoch_loop._batches_that_stepped, losses.tolist(), self.calls))
        return losses.mean()

    def on_train_end(self):
        with open(f"records-{self.global_rank}.json", "w") as file:
            json.dump(self.records, file)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        inputs = torch.randn(45, 3, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
"""

INTERVAL, STEPS_PER_EPOCH = 4, 6


@pytest.mark.parametrize("settings", [(), ("--trainer.profiler", "simple")])
def test_two_ranks_log_the_mean_over_all_samples_in_one_collective_per_interval(settings, tmp_path):
    (tmp_path / "module.py").write_text(MODULE)
    arguments = ("--model", "module.Net", "--epochs", "4", "--name", "x", "--save_every", "1000", *settings)
    fit_on_ranks(*arguments, "--trainer.log_every_n_steps", str(INTERVAL), folder=tmp_path, world=2)
    ranks = [json.loads((tmp_path / f"records-{rank}.json").read_text()) for rank in (0, 1)]
    losses = {}
    for step, values, _ in ranks[0] + ranks[1]:
        losses.setdefault(step, []).extend(values)
    ends = range(INTERVAL - 1, max(losses) + 1, INTERVAL)
    samples = {end: [loss for step in range(end - INTERVAL + 1, end + 1) for loss in losses[step]] for end in ends}
    expected = {end: sum(values) / len(values) for end, values in samples.items()}
    curves = scalars_of(tmp_path / "runs/x")
    logged = curves["train/loss"]
    assert logged == pytest.approx(expected, rel=1e-6) and len(logged) == 6
    calls = {step: calls for step, _, calls in ranks[0]}
    for step in range(STEPS_PER_EPOCH, max(calls)):  # DistributedDataParallel has calls of its own in its first steps
        if step % STEPS_PER_EPOCH != STEPS_PER_EPOCH - 1:  # the end of an epoch has its own too
            assert calls[step + 1] - calls[step] == (step in ends), step
    for rank in (0, 1):
        assert INTERVAL - 1 in curves[f"world/data_wait_ms/rank_{rank:03d}"]
