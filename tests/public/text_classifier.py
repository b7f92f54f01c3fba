"""A text classifier with an EmbeddingBag and offsets; texts are drawn by weight, or in batches of similar length."""

import random

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler
from torchmetrics.functional import accuracy


class Reviews(Dataset):
    def __init__(self, count, seed):
        draw = random.Random(seed)
        self.texts = [[draw.randrange(40) for _ in range(draw.randrange(1, 12))] for _ in range(count)]
        self.labels = [int(sum(text) / len(text) > 22) for text in self.texts]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.labels[index], self.texts[index]


class SimilarLengths(Sampler):
    def __init__(self, texts, batch_size):
        self.order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        self.batch_size, self.epoch = batch_size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return -(-len(self.order) // self.batch_size)

    def __iter__(self):
        batches = [self.order[at : at + self.batch_size] for at in range(0, len(self.order), self.batch_size)]
        random.Random(self.epoch).shuffle(batches)
        return iter(batches)


def collate_batch(samples):
    labels, texts, offsets = [], [], [0]
    for label, text in samples:
        labels.append(label)
        texts.append(torch.tensor(text))
        offsets.append(len(text))
    return torch.tensor(labels), torch.cat(texts), torch.tensor(offsets[:-1]).cumsum(0)


class ReviewData(L.LightningDataModule):
    def __init__(self, sampling: str = "weighted", batch_size: int = 12, shuffle: bool = True):
        super().__init__()
        self.sampling, self.batch_size, self.shuffle = sampling, batch_size, shuffle

    def setup(self, stage):
        self.train, self.val = Reviews(150, 0), Reviews(41, 1)

    def train_dataloader(self):
        if self.sampling == "buckets":
            batches = SimilarLengths(self.train.texts, self.batch_size)
            return DataLoader(self.train, batch_sampler=batches, collate_fn=collate_batch)
        sampler = None
        if self.sampling == "weighted":
            counts = torch.bincount(torch.tensor(self.train.labels))
            generator = torch.Generator().manual_seed(11)
            weights = [1.0 / counts[label] for label in self.train.labels]
            sampler = WeightedRandomSampler(weights, len(weights), replacement=True, generator=generator)
        shuffle = self.shuffle if sampler is None else None
        return DataLoader(
            self.train, batch_size=self.batch_size, sampler=sampler, shuffle=shuffle, collate_fn=collate_batch
        )

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size, collate_fn=collate_batch)

    test_dataloader = predict_dataloader = val_dataloader


class TextClassifier(L.LightningModule):
    def __init__(self, vocab_size: int = 40, embed_dim: int = 8, lr: float = 0.5):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim, sparse=False)
        self.fc = nn.Linear(embed_dim, 2)

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))

    def training_step(self, batch, batch_idx):
        labels, text, offsets = batch
        loss = F.cross_entropy(self(text, offsets), labels)
        self.log("train_loss", loss, batch_size=len(labels), prog_bar=True, sync_dist=True)
        return loss

    def evaluate(self, batch, stage):
        labels, text, offsets = batch
        logits = self(text, offsets)
        acc = accuracy(logits.argmax(1), labels, task="multiclass", num_classes=2)
        values = {f"{stage}_loss": F.cross_entropy(logits, labels), f"{stage}_acc": acc}
        self.log_dict(values, batch_size=len(labels), sync_dist=True)

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def predict_step(self, batch, batch_idx):
        _, text, offsets = batch
        return self(text, offsets).softmax(-1)

    def factor(self, step):
        """Returns a factor of the learning rate, which is smaller for a smaller logged loss."""
        return min(1.0, 0.2 + float(self.trainer.callback_metrics.get("train_loss", 1.0)))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
