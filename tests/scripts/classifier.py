"""Lightning's image classifier example: a module, a data module and torchmetrics; the Trainer is created first."""

import lightning as L
import torch
import torch.nn.functional as F
from options import finish, options
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from rankzero import Trainer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(72, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.log_softmax(self.fc(torch.flatten(self.dropout(x), 1)), dim=1)


class ImageClassifier(L.LightningModule):
    def __init__(self, lr=0.1, gamma=0.7):
        super().__init__()
        self.save_hyperparameters()
        self.model = Net()
        self.test_acc = Accuracy(task="multiclass", num_classes=10)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.nll_loss(self(x), y.long())

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.test_acc(logits, y)
        self.log("test_acc", self.test_acc)
        self.log("test_loss", F.nll_loss(logits, y.long()))

    def configure_optimizers(self):
        optimizer = torch.optim.Adadelta(self.model.parameters(), lr=self.hparams.lr)
        return [optimizer], [StepLR(optimizer, step_size=1, gamma=self.hparams.gamma)]


class DigitsDataModule(L.LightningDataModule):
    def setup(self, stage=None):
        digits = load_digits()
        images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
        labels = torch.tensor(digits.target)
        self.train, self.test = (
            TensorDataset(images[:240], labels[:240]),
            TensorDataset(images[240:301], labels[240:301]),
        )

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True, num_workers=1)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=32)


if __name__ == "__main__":
    trainer = Trainer(max_epochs=2, seed=11, **options())
    data, model = DigitsDataModule(), ImageClassifier()
    trainer.fit(model, datamodule=data)
    trainer.test(datamodule=data, verbose=False)
    finish(trainer, model, data.test_dataloader())
