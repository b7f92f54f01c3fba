"""Layers that a callback unfreezes during training, on two ranks."""

import torch

from system.forks import fit_on_ranks

UNFREEZES = """
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch.utils.data import DataLoader, TensorDataset


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.backbone)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer)

    def on_train_end(self, trainer, module):
        torch.save(module.state_dict(), f"weights-{trainer.global_rank}.pt")


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.head(self.backbone(batch[0]).tanh()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.rand(32, 4, generator=generator)), batch_size=4)
"""


def test_unfrozen_layers_are_equal_on_all_ranks_and_to_those_of_one_process(user_folder):
    (user_folder / "unfreezes.py").write_text(UNFREEZES)
    arguments = ("--model", "unfreezes.Net", "--trainer.callbacks", "unfreezes.Unfreeze", "--epochs", "3")
    results = {}
    for world in (1, 2):
        fit_on_ranks(*arguments, "--global_batch_size", "8", "--name", f"on-{world}", folder=user_folder, world=world)
        results[world] = [torch.load(user_folder / f"weights-{rank}.pt") for rank in range(world)]
    for name, value in results[1][0].items():
        assert torch.equal(results[2][0][name], results[2][1][name]), name
        assert torch.allclose(value, results[2][0][name], rtol=0, atol=1e-6), name
