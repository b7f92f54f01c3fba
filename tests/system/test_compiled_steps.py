"""Runs with `--compile step` and Inductor: compared with runs without graph, killed and resumed."""

from dataclasses import replace

import pytest

from stock import differences
from system.forks import outputs, summary
from system.public import MODULES, Module, copy_files, result, train

TOY = Module("MLP", "Toy", 32, 40, arguments=("--data.count", "1500"))
DIGITS = Module(
    *("ResNet", "Digits", 32, 30),
    # A higher learning rate amplifies differences in rounding: weights differ by 5 % after 200 steps, as they do if the
    # first weights of a run without graph differ by 1e-7.
    arguments=("--model.width", "8", "--model.optimizer.lr", "0.001", "--trainer.limit_train_batches", "40"),
)


def comparable(module, files, run):
    """Returns the end of a run, without the momentum of DIGITS: in one of eight runs, rounding changes it by 0.04."""
    end = result(files, run)
    return end | {"optimizer_states": None} if module is DIGITS else end  # rounding changes the weights by up to 3e-5


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(TOY, id="MLP"),
        pytest.param(MODULES["text classifier"], id="public"),
        pytest.param(DIGITS, id="ResNet", marks=pytest.mark.soak),  # compiles for a minute
    ],
)
def test_a_compiled_run_killed_in_mid_epoch_and_resumed_equals_one_without_graph(tmp_path, module, world):
    files = copy_files(tmp_path)
    compiled = replace(module, arguments=(*module.arguments, "--compile", "step"))
    train(module, "eager", files, world)
    train(compiled, "whole", files, world)
    assert "compiled the training step in" in outputs(files, world)[0]
    codes = train(compiled, "killed", files, world, kill=module.kill_at)
    assert codes[0] == -9, outputs(files, world)
    train(compiled, "killed", files, world)
    assert summary(files, "killed")["attempts"] == 2 and list((files / "runs/.compile").iterdir())
    expected, tolerance = comparable(module, files, "eager"), 1e-4 if module is DIGITS else 1e-5
    for run in ("whole", "killed"):
        assert not differences(expected, comparable(module, files, run), tolerance)
        assert summary(files, "eager")["ledger"] == summary(files, run)["ledger"]


OWN_STEPS_ON_RANK_ONE = """
from lightning_modules import MLP

class Counting(MLP):
    count = 0

    def training_step(self, batch, batch_idx):
        self.count += self.global_rank  # another constant of the graph in every step of rank 1
        return super().training_step(batch, batch_idx) * (1 + 0 * self.count)
"""


def test_a_rank_that_compiles_no_further_steps_says_so_and_trains_on(tmp_path):
    (tmp_path / "counting.py").write_text(OWN_STEPS_ON_RANK_ONE)
    train(TOY, "eager", tmp_path, 2)
    counting = replace(TOY, model="counting.Counting", arguments=(*TOY.arguments, "--compile", "step"))
    train(counting, "compiled", tmp_path, 2)
    zero, one = outputs(tmp_path, 2)
    assert "compiled the training step in" in zero and "not compiling further" not in zero
    (line,) = [line for line in one.splitlines() if "not compiling further training steps" in line]
    assert "counting.py:" in line and line.endswith("(rank 1)")
    assert not differences(result(tmp_path, "eager"), result(tmp_path, "compiled"), 1e-5)
