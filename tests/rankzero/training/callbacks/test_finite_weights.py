import math
import re

import pytest
import torch
from boring_models import DropoutNet, summary_in, train

from rankzero.checkpoints.manifest import checkpoints_in, step_of
from rankzero.messages import RunError


class BrokenNet(DropoutNet):
    """Returns `value` times the loss in one step; has a frozen parameter that is never finite."""

    def __init__(self, step, value=math.nan):
        super().__init__()
        self.step, self.value = step, value
        self.mask = torch.nn.Parameter(torch.tensor(-math.inf), requires_grad=False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.value if self.global_step == self.step else loss


NoLoss = type("NoLoss", (DropoutNet,), {"training_step": lambda self, batch, batch_idx: None})


def saved(folder):
    return [step_of(path) for path in checkpoints_in(folder / "runs" / "x" / "checkpoints")]


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        (r"since steps 7 to 9 \(the loss first in step 8\)", {}),
        (r"(at step 8|since steps 7 to 9 .*)", {"save_every": "2steps", "keep": 1, "keep_best": "min:val_loss"}),
    ],
)
def test_a_script_trains_on_with_weights_that_are_not_finite_and_keeps_the_last_finite_checkpoint(
    script_folder, capfd, where, settings
):
    trainer, _ = train(BrokenNet(7), max_epochs=3, log_every_n_steps=3, **settings)
    assert trainer.global_step == 18 and saved(script_folder)[-1] == 6
    error, output = capfd.readouterr()[::-1]
    text = f"the weights are not finite {where}: NaN or infinity in layer.weight, layer.bias"
    assert len(re.findall(f"rankzero: warning: {text}", error)) == 1 and 'on_nan="stop"' in error
    assert "problem" in output
    summary = summary_in(script_folder)
    assert summary["status"] == "finished" and summary["checkpoint"].endswith("step-00000006")
    assert re.fullmatch(text, summary["problem"])
    assert summary["problem"] in (script_folder / "runs" / "x" / "report.html").read_text()


@pytest.mark.parametrize(("step", "log_every", "last"), [(7, 3, 9), (7, 50, 12), (16, 50, 18)])
def test_stop_ends_the_run_without_a_checkpoint_of_these_weights(script_folder, step, log_every, last):
    with pytest.raises(RunError, match="the weights are not finite .*--on_nan warn trains on"):
        train(BrokenNet(step), max_epochs=3, log_every_n_steps=log_every, on_nan="stop")
    summary = summary_in(script_folder)
    assert (summary["status"], saved(script_folder)) == ("failed", [6, 12][: step // 6])
    assert last <= summary["steps"] <= last + 3  # the thread that writes a checkpoint requests the stop
    train(BrokenNet(99), max_epochs=3)  # resumes from the last finite checkpoint
    assert summary_in(script_folder)["steps"] == 18


def test_a_loss_that_is_not_finite_while_the_weights_are_is_a_warning(script_folder, capfd):
    class SkipsBrokenGradients(BrokenNet):
        def on_after_backward(self):
            if not all(bool(p.grad.isfinite().all()) for p in self.parameters() if p.grad is not None):
                self.zero_grad()

    train(SkipsBrokenGradients(1), log_every_n_steps=3, on_nan="stop")
    text = "the loss of steps 1 to 3 is NaN or infinite (first in step 2); the weights are still finite"
    assert text in capfd.readouterr().err
    summary = summary_in(script_folder)
    assert (summary["status"], summary["problem"]) == ("finished", None)
    assert summary["checkpoint"].endswith("step-00000012")


@pytest.mark.parametrize("settings", [{}, {"log_every_n_steps": 2}, {"enable_checkpointing": False}], ids=str)
def test_a_training_step_that_never_returns_a_loss_is_reported(script_folder, capfd, settings):
    train(NoLoss(), max_epochs=3, **settings)
    assert "training_step has returned None in every step" in capfd.readouterr().err
    assert "so nothing is trained" in summary_in(script_folder)["problem"]
    with pytest.raises(RunError, match="returned None"):
        train(NoLoss(), max_epochs=4, on_nan="stop", **settings)


def test_a_stopped_run_that_has_trained_nothing_begins_again(script_folder):
    for _ in range(2):
        with pytest.raises(RunError, match="returned None in every step up to step 6"):
            train(NoLoss(), max_epochs=1, on_nan="stop")
        assert saved(script_folder) == [] and summary_in(script_folder)["checkpoint"] is None
    train(DropoutNet(), max_epochs=1)
    assert summary_in(script_folder)["steps"] == 6


def test_running_statistics_that_are_not_finite_are_reported(script_folder):
    class BrokenNorm(DropoutNet):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(1)

        def on_train_epoch_end(self):
            self.norm.running_var.fill_(math.inf)

    with pytest.raises(RunError, match="NaN or infinity in norm.running_var"):
        train(BrokenNorm(), max_epochs=2, on_nan="stop")
