import pytest
import torch
from lightning.pytorch import Trainer as StockTrainer

from rankzero import Trainer
from rankzero.training.metrics.epoch_averages import Results, gathered_values, merge
from stock import QUIET, Curves, Loaders, Net, differences


def log(results, value, name="loss", size=1, **settings):
    results.log("training_step", name, torch.tensor(value), batch_size=size, on_step=False, on_epoch=True, **settings)


def results_of(*values, **settings):
    results = Results(None)
    for number, value in enumerate(values):
        log(results, value, size=number + 1, **settings)
    return results


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("mean", (1 * 1 + 4 * 2 + 2 * 1 + 7 * 2 + 1 * 3) / 9), ("sum", 15.0), ("max", 7.0), ("min", 1.0)],
)
def test_merged_values_of_several_ranks_equal_those_of_one_process(reduction, expected):
    values = [gathered_values(results_of(*logged, reduce_fx=reduction)) for logged in ((1.0, 4.0), (2.0, 7.0, 1.0), ())]
    entry = merge(values)["training_step.loss"]
    value = entry["value"] / entry["weight"] if reduction == "mean" else entry["value"]
    assert float(value) == pytest.approx(expected)
    assert set(merge([{}, values[0]])) == {"training_step.loss"}


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
def test_resumed_epoch_values_equal_uninterrupted_values(reduction):
    values = [0.1, 0.7, 0.2, 0.3]
    uninterrupted = results_of(*values, reduce_fx=reduction)
    resumed = Results(None)
    resumed.resumed_values = gathered_values(results_of(*values[:2], reduce_fx=reduction))
    assert gathered_values(resumed).keys() == gathered_values(uninterrupted).keys()
    for number in (2, 3):
        log(resumed, values[number], size=number + 1, reduce_fx=reduction)
    assert not resumed.resumed_values
    assert differences(gathered_values(resumed), gathered_values(uninterrupted)) == []


def test_rank_zero_only_metric_is_not_gathered():
    assert not gathered_values(results_of(1.0, rank_zero_only=True))


class Calls(Curves):
    """Records all calls of a logger."""

    def __getattribute__(self, name):
        if name in ("log_hyperparams", "log_graph", "save", "finalize"):
            self.lines.append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"profiler": "simple"},  # Lightning's own loop
        {"accumulate_grad_batches": 2, "val_check_interval": 4},
        {"fast_dev_run": 2},
        {"logger": [Calls(), Calls()]},
    ],
)
def test_a_users_logger_receives_the_calls_of_stock_lightning(script_folder, settings):
    class LogsStep(Net):
        test_step = Net.validation_step

        def on_train_epoch_end(self):
            self.log_dict({"own": 1.0, "step": self.current_epoch + 0.0})

    seen = []
    for kind in (StockTrainer, Trainer):
        loggers = settings.get("logger") or [Calls()]
        trainer = kind(**{**QUIET, "max_epochs": 2, "log_every_n_steps": 3, "logger": loggers[0], **settings})
        trainer.fit(LogsStep(), Loaders()(), Loaders()())
        trainer.test(LogsStep(), Loaders()(), verbose=False)
        seen += [list(logger.lines) for logger in loggers]
        for logger in loggers:
            logger.lines.clear()
    assert differences(seen[0], seen[len(seen) // 2]) == [] and seen[0] == seen[-1]
    assert bool(seen[0]) != bool(settings.get("fast_dev_run"))
