import logging
import os
import re
import warnings

import pytest

from rankzero.distributed.process import quiet
from rankzero.distributed.process.quiet import silence_warnings, silenced_kineto
from running import REPOSITORY, fit, run

STOCK = """
from lightning.pytorch.cli import LightningCLI
from nets import Net
LightningCLI(Net, save_config_callback=None, trainer_defaults={"logger": False, "accelerator": "cpu", "max_epochs": 2})
"""
REQUESTED = (
    *("--trainer.profiler=simple", "--trainer.enable_model_summary=true", "--trainer.enable_progress_bar=false"),
    *("--trainer.callbacks+=BatchSizeFinder", "--trainer.callbacks.max_trials=3"),
    *("--trainer.callbacks+=LearningRateFinder", "--trainer.callbacks.num_training_steps=30"),
    "--trainer.callbacks.early_stop_threshold=null",
    *("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val", "--trainer.callbacks.verbose=true"),
    *("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=own"),
    *("--trainer.callbacks.monitor=val", "--trainer.callbacks.verbose=true"),
    *("--trainer.callbacks+=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=0.01", "--model.schedule=true"),
)
REMARKS = "GPU available|TPU available|.*Tip|`Trainer.fit` stopped|`weights_only`|Restor|Seed set|LOCAL_RANK|.*distrib"


def write_module(folder):
    """Writes the tests' model into a folder as `nets.py`, without imports from the tests."""
    head, body = (REPOSITORY / "tests" / "resuming.py").read_text().split("class Net", 1)
    body = body.split("class Record", 1)[0]
    imports = [line for line in head.splitlines() if line.startswith(("import torch", "from lightning", "from torch"))]
    constants = re.findall(r"^SAMPLES.*$", head, re.MULTILINE)
    (folder / "nets.py").write_text("\n".join([*imports, *constants, "class Net" + body]))


def lines(result):
    """Returns the printed lines, with `#` for each number and without warnings and table rows."""
    text = re.sub(r"Finding best initial lr:[^\]]*\]", "\n", result.out + result.err)  # a bar without a newline
    texts = text.replace(str(result.folder), "").splitlines()
    printed = [re.sub(r"[\d.,]+(e-?\d+)?", "#", line).strip() for line in texts if "site-packages" not in line]
    skipped = ("Unable to serialize instance", *"|-\u2502\u2500\u250f\u2503\u2521\u2514\u250c")
    return {line for line in printed if line and not line.startswith(skipped)} - {"warning(val)"}


@pytest.mark.system
def test_all_output_that_the_user_requested_is_printed(tmp_path):
    rankzero_folder, stock_folder = tmp_path / "ours", tmp_path / "stock"
    for folder in (rankzero_folder, stock_folder):
        folder.mkdir()
        write_module(folder)
    (stock_folder / "stock.py").write_text(STOCK)
    expected = lines(run("python", "stock.py", "fit", *REQUESTED, folder=stock_folder))
    expected = {line for line in expected if not re.match(REMARKS, line)}
    printed = lines(fit("--model", "nets.Net", "--epochs", "2", *REQUESTED, folder=rankzero_folder))
    assert {"FIT Profiler Report", "Learning rate set to #"} <= expected
    assert any("improved" in line for line in expected) and any("saving model to" in line for line in expected)
    assert any("Batch size # succeeded" in line for line in expected) and any("params" in line for line in expected)
    assert expected - printed == set()
    assert not [line for line in printed if re.match(REMARKS, line)]


@pytest.mark.system
def test_a_run_of_one_epoch_prints_four_lines_and_a_table(tmp_path):
    write_module(tmp_path)
    result = fit("--model", "nets.Net", "--epochs", "1", folder=tmp_path)
    loaded, first, second, third, *table = result.out.splitlines()
    assert loaded.startswith("rankzero: loading torch, Lightning, Net")
    assert first.startswith("rankzero: local") and second.startswith("epoch 1/1") and third.startswith("run Net-own-1")
    assert result.err == "" and all(line[0] in "\u2502\u250c\u2514" for line in table)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_other_than_zero_print_only_warnings(rank):
    loggers = [logging.getLogger("lightning.pytorch"), logging.getLogger("lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        silence_warnings(rank)
        assert logging.getLogger("lightning.pytorch.callbacks").isEnabledFor(logging.INFO) == (rank == 0)
        assert logging.getLogger("lightning.pytorch.callbacks").isEnabledFor(logging.WARNING)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def test_warnings_of_rankzero_have_no_line_of_source(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", lambda message, *details: f"formatted before: {message} {details}")
    monkeypatch.setattr(quiet, "_replaced_formatters", [])
    silence_warnings()
    silence_warnings()
    assert warnings.formatwarning("rankzero: full", UserWarning, "module.py", 3) == "rankzero: full\n"
    assert warnings.formatwarning("full", 1, "module.py", 3) == "formatted before: full (1, 'module.py', 3)"


@pytest.mark.parametrize(("silences", "level", "within"), [(True, None, "99"), (False, None, None), (True, "1", "1")])
def test_kineto_is_silenced_unless_the_user_has_set_its_level(silences, level, within, monkeypatch):
    if level is None:
        monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("KINETO_LOG_LEVEL", level)
    with silenced_kineto(silences):
        assert os.environ.get("KINETO_LOG_LEVEL") == within
    assert os.environ.get("KINETO_LOG_LEVEL") == level
