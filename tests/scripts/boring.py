"""Lightning's BoringModel and its example script; the only changed line imports the Trainer."""

from lightning.pytorch.demos.boring_classes import BoringModel
from options import finish, options

from rankzero import Trainer

if __name__ == "__main__":
    model = BoringModel()
    trainer = Trainer(max_epochs=2, limit_train_batches=8, limit_val_batches=2, limit_test_batches=2, **options())
    trainer.fit(model)
    finish(trainer, model)
