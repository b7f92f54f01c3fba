"""A sequence tagger: padding in a collate function, packed LSTM, one metric collection per split, two workers."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

PAD = -100


class Sentences(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 9, (count,), generator=generator)
        self.words = [torch.randint(1, 30, (int(length),), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        return {"words": words, "tags": (words + words.roll(1)) % 4}


def collate(samples):
    lengths = torch.tensor([len(sample["words"]) for sample in samples])
    words = pad_sequence([sample["words"] for sample in samples], batch_first=True)
    tags = pad_sequence([sample["tags"] for sample in samples], batch_first=True, padding_value=PAD)
    return {"words": words, "tags": tags, "lengths": lengths}


class SentenceData(pl.LightningDataModule):
    def __init__(
        self, batch_size: int = 10, num_workers: int = 2, persistent_workers: bool = False, shuffle: bool = True
    ):
        super().__init__()
        self.save_hyperparameters()

    def loader(self, data, shuffle=False):
        keep, workers = self.hparams.persistent_workers, self.hparams.num_workers
        return DataLoader(
            data,
            batch_size=self.hparams.batch_size,
            shuffle=shuffle,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=keep and workers > 0,
        )

    def setup(self, stage=None):
        if stage in (None, "fit"):
            self.train = Sentences(125, 0)
        self.held_out = Sentences(37, 1)

    def train_dataloader(self):
        return self.loader(self.train, self.hparams.shuffle)

    def val_dataloader(self):
        return self.loader(self.held_out)

    def test_dataloader(self):
        return self.loader(self.held_out)

    def predict_dataloader(self):
        return self.loader(self.held_out)


class Tagger(pl.LightningModule):
    def __init__(self, hidden: int = 12, learning_rate: float = 0.02):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(30, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, hidden, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * hidden, 4)
        self.loss = nn.CrossEntropyLoss(ignore_index=PAD)
        metrics = MetricCollection(
            {
                "acc": MulticlassAccuracy(4, ignore_index=PAD, average="micro"),
                "f1": MulticlassF1Score(4, ignore_index=PAD),
            }
        )
        self.train_metrics, self.val_metrics = metrics.clone(prefix="train/"), metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.embedding(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.size(1))
        return self.classifier(output)

    def shared_step(self, batch, metrics):
        logits, tags = self(batch["words"], batch["lengths"]).flatten(0, 1), batch["tags"].flatten()
        metrics.update(logits, tags)
        return self.loss(logits, tags)

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch, self.train_metrics)
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["lengths"]))
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.shared_step(batch, self.val_metrics), batch_size=len(batch["lengths"]))

    def on_validation_epoch_end(self):
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.shared_step(batch, self.test_metrics), batch_size=len(batch["lengths"]))
        self.log_dict(self.test_metrics)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        tags = self(batch["words"], batch["lengths"]).argmax(-1)
        return [row[:length].tolist() for row, length in zip(tags, batch["lengths"])]

    def configure_optimizers(self):
        optimizer = torch.optim.RMSprop(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val/f1", "interval": "epoch", "strict": True},
        }
