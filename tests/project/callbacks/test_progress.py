from lightning.pytorch.demos.boring_classes import BoringModel

from project.callbacks.progress import BarProgress, PlainProgress
from running import train_here


class Logging(BoringModel):
    def training_step(self, batch, batch_idx):
        step = super().training_step(batch, batch_idx)
        self.log("train/loss", 0.25)
        return step


def output(callback, capsys, **options):
    train_here(callback, model=Logging(), enable_progress_bar=True, limit_train_batches=3, loops=True, **options)
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]


def test_first_and_last_epoch_have_a_line_and_no_other_sooner_than_asked(capsys):
    lines = output(PlainProgress(every_seconds=3600), capsys, max_epochs=5)
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/5 done", "epoch 5/5 done"]
    assert "step 15" in lines[-1] and "train/loss 0.25" in lines[-1]


def test_a_long_epoch_has_lines_within(capsys):
    lines = output(PlainProgress(every_seconds=0), capsys, max_epochs=1)
    assert [line.split("  ")[0] for line in lines][:3] == [f"epoch 1/1 batch {n}/3" for n in (1, 2, 3)]


def test_other_ranks_print_nothing(capsys):
    callback = PlainProgress(every_seconds=0)
    callback.disable()
    assert output(callback, capsys, max_epochs=1) == []


def test_the_bar_counts_epochs_from_one(capsys):
    assert any("epoch 2/2" in line for line in output(BarProgress(), capsys, max_epochs=2))
