"""Lightning's language model example: the Transformer of its demos, trained with SGD."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import Transformer
from options import finish, options
from torch.utils.data import DataLoader, Dataset, random_split

from rankzero import Trainer

WORDS, LENGTH = 50, 12


class Text(Dataset):
    """Random words in place of WikiText-2, which needs a download."""

    def __init__(self):
        self.words = torch.randint(WORDS, (160 * LENGTH + 1,), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 160

    def __getitem__(self, index):
        start = index * LENGTH
        return self.words[start : start + LENGTH], self.words[start + 1 : start + LENGTH + 1]


class LanguageModel(L.LightningModule):
    def __init__(self, vocab_size=WORDS):
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size, ninp=16, nhead=2, nhid=16, nlayers=1)

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self._loss(batch))

    def _loss(self, batch):
        input, target = batch
        return F.nll_loss(self.model(input, target), target.reshape(-1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    L.seed_everything(42)
    train, val, test = random_split(Text(), [120, 20, 20])
    model = LanguageModel()
    trainer = Trainer(gradient_clip_val=0.25, max_epochs=2, **options())
    trainer.fit(model, DataLoader(train, batch_size=10, shuffle=True), DataLoader(val, batch_size=10))
    finish(trainer, model, DataLoader(test, batch_size=10))


if __name__ == "__main__":
    main()
