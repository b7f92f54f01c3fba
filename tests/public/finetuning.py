"""Transfer learning with torchvision's resnet18, whose layers are unfrozen after one epoch."""

import lightning as L
import torch
import torch.nn.functional as F
import torchvision
from lightning.pytorch.callbacks import BackboneFinetuning, LearningRateMonitor
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Accuracy
from torchvision import transforms
from torchvision.datasets import FakeData


class FakeImages(L.LightningDataModule):
    def __init__(self, batch_size: int = 4, shuffle: bool = True):
        super().__init__()
        self.batch_size, self.shuffle = batch_size, shuffle
        normalize = transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        self.eval_transform = transforms.Compose([transforms.ToTensor(), normalize])
        self.train_transform = transforms.Compose(
            [transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]
            if shuffle
            else [transforms.ToTensor()]
        )

    def setup(self, stage):
        self.train = FakeData(24, (3, 16, 16), 3, self.train_transform)
        self.val = FakeData(8, (3, 16, 16), 3, self.eval_transform, random_offset=99)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=self.shuffle)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class TransferLearning(L.LightningModule):
    def __init__(self, num_target_classes: int = 3, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        network = torchvision.models.resnet18(weights=None)
        features = network.fc.in_features
        self.backbone = nn.Sequential(*list(network.children())[:-1])
        self.classifier = nn.Linear(features, num_target_classes)
        self.train_acc, self.val_acc = (Accuracy("multiclass", num_classes=num_target_classes) for _ in range(2))

    def forward(self, x):
        return self.classifier(self.backbone(x).flatten(1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_acc", self.train_acc, prog_bar=True)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc.update(logits, y)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_acc": self.val_acc}, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(-1)

    def configure_callbacks(self):
        return [
            BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3, lambda_func=lambda epoch: 1.5),
            LearningRateMonitor("step"),
        ]

    def configure_optimizers(self):
        trainable = filter(lambda p: p.requires_grad, self.parameters())
        optimizer = torch.optim.SGD(trainable, lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]
