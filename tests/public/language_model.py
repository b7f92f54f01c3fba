"""A small GPT: OneCycle over `estimated_stepping_batches`, accumulation, clipping, metrics read right after logging."""

import math

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Characters(Dataset):
    def __init__(self, text, block):
        self.codes = torch.tensor([ord(letter) % 64 for letter in text])
        self.block = block

    def __len__(self):
        return len(self.codes) - self.block - 1

    def __getitem__(self, index):
        chunk = self.codes[index : index + self.block + 1]
        return chunk[:-1], chunk[1:]


class TextModule(pl.LightningDataModule):
    def __init__(self, block: int = 12, batch_size: int = 8, shuffle: bool = True):
        super().__init__()
        self.block, self.batch_size, self.shuffle = block, batch_size, shuffle

    def setup(self, stage: str):
        text = "the quick brown fox jumps over the lazy dog and runs away. " * 4
        self.train, self.val = Characters(text[:173], self.block), Characters(text[170:], self.block)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=self.shuffle, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class GPT(pl.LightningModule):
    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2, dropout: float = 0.1, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.token, self.place = nn.Embedding(64, width), nn.Embedding(64, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.token.weight  # tied
        self.read = []

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        hidden = self.token(tokens) + self.place(torch.arange(tokens.size(1), device=tokens.device))
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("seen", float(self.trainer.global_step), sync_dist=True)
        self.read.append(float(self.trainer.callback_metrics["seen"]))
        return loss

    def on_train_epoch_end(self):
        self.log("last_read", self.read[-1], sync_dist=True)
        self.read.clear()

    def validation_step(self, batch, batch_idx):
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def on_validation_epoch_end(self):
        self.log("val_ppl", math.exp(min(20.0, float(self.trainer.callback_metrics.get("val_loss", 0.0)))))

    def test_step(self, batch, batch_idx):
        tokens, targets = batch
        self.log("test_loss", F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten()))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])[:, -1].argmax(-1)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]
