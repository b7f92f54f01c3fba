from rich.table import Table

from rankzero.distributed.devices import WorldInfo
from rankzero.runs.directory import RunDirectory
from rankzero.runs.reports.terminal import _print, print_table
from running import fit_in_process


def test_a_long_path_is_not_wrapped_in_a_pipe(capsys):
    path = "/a/path" * 30
    table = Table(show_header=False)
    table.add_row("checkpoint", path)
    _print(table)
    assert path in capsys.readouterr().out


TOY = ("--model", "MLP", "--data", "Toy", "--epochs", "1", "--run", "x")


def test_the_table_offers_tensorboard_only_for_event_files(cwd, capsys):
    fit_in_process(*TOY)
    assert "tensorboard --logdir runs --host localhost" in capsys.readouterr().out
    logger = ("--trainer.logger", "lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir", "csv")
    fit_in_process(*TOY[:-1], "y", *logger)
    out = capsys.readouterr().out
    assert "tensorboard" not in out.lower() and "csv/lightning_logs/version_0/metrics.csv" in out
    fit_in_process(*TOY[:-1], "z", "--trainer.logger", "false")
    out = capsys.readouterr().out
    assert "tensorboard" not in out.lower() and "metrics.csv" not in out


def test_the_table_shows_a_metric_once(capsys, tmp_path):
    metrics = {"loss": 2.0, "loss_step": 2.0, "loss_epoch": 1.0, "bad": None}
    summary = {
        "status": "finished",
        "launcher": "local",
        "epochs": 1,
        "steps": 2,
        "samples": 3,
        "ledger": [],
        "slow_ranks": [],
        "samples_per_second": 1.0,
        "seconds": 1.0,
        "metrics": metrics,
        "checkpoint": None,
        "max_epochs": 1,
    }
    print_table(summary, RunDirectory(tmp_path), WorldInfo("cpu"))
    out = capsys.readouterr().out
    assert out.count("loss") == 1 and "1.0000" in out and "not a finite number" in out
