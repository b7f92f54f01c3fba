import ast
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher

from rankzero.training import lightning_inside
from rankzero.training.lightning_inside import fallback_reason, has_stock_optimizer_step, needs_transfer
from stock import Net, train

PRIVATE_IMPORTS = [
    (node.module, alias.name)
    for node in ast.walk(ast.parse(Path(lightning_inside.__file__).read_text()))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
    if alias.name.startswith("_")
]

PRIVATE_ATTRIBUTES = [("torch.autograd.Variable", "_execution_engine"), ("torch.autograd", "_profiler_enabled")]

TRAIN_WITHOUT = """
import os
import sys
from pkgutil import resolve_name

import rankzero.trainer  # with all that it imports; the forks import again what depends on private names

ABOVE = ("trainer", "cli.trainer_arguments", "preflight", "tracking", "training", "distributed.torch_inside")
for module in [name for name in sys.modules if name.startswith(tuple(f"rankzero.{part}" for part in ABOVE))]:
    del sys.modules[module]
for number, path in enumerate(sys.argv[1:]):
    print("----", path, flush=True)
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    owner, _, name = path.rpartition(".")
    delattr(resolve_name(owner), name)
    try:
        from rankzero import Trainer
        print("imported")
        trainer = Trainer(name=f"run{number}", accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=1)
        print("constructed")
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        os._exit(0)
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Private name -> the output of a process in which its module lacks it."""
    paths = [".".join(names) for names in PRIVATE_IMPORTS + PRIVATE_ATTRIBUTES]
    command = [sys.executable, "-c", TRAIN_WITHOUT, *paths]
    folder = tmp_path_factory.mktemp("missing")
    out = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    parts = [part.partition("\n") for part in out.split("---- ")[1:]]
    return {path.rpartition(".")[2]: text for path, _, text in parts}


@pytest.mark.parametrize("name", [name for _, name in PRIVATE_IMPORTS + PRIVATE_ATTRIBUTES])
def test_without_a_private_name_the_trainer_is_imported_and_a_line_states_what_is_off(outputs, name):
    output = outputs[name]
    assert output.startswith("imported\n")
    reason = next(line for line in output.splitlines() if f"'{name}'" in line)
    if name == "_defaults_from_env_vars":
        assert f"without the variables PL_TRAINER_*: cannot import name '{name}'" in reason
        assert "\nconstructed\n" in output
    elif name in ("_execution_engine", "_profiler_enabled"):
        assert "without fast calls of torch's backward pass and optimizers: " in reason
        assert "\nconstructed\n" in output
    else:
        assert "RequestError: " in output and "Rankzero is tested with lightning 2.6.6" in output
        assert 'pip install "lightning>=2.6.6,<2.7"' in output and "constructed" not in output


@pytest.mark.parametrize(("precision", "is_fast"), [("32-true", True), ("bf16-mixed", True), ("64-true", False)])
def test_only_steps_of_known_precision_are_fast_and_only_others_require_the_transfer(precision, is_fast):
    trainer = train(True, Net(), max_epochs=1, limit_train_batches=1, limit_val_batches=0, precision=precision)[1]
    assert fallback_reason(trainer, _PrefetchDataFetcher()) is None
    assert has_stock_optimizer_step(trainer) == is_fast
    assert needs_transfer(trainer) != is_fast


def test_weight_averaging_without_backward_passes_is_left_to_lightning():
    trainer = train(True, Net(), max_epochs=1, limit_train_batches=1, limit_val_batches=0)[1]
    averaging = StochasticWeightAveraging(swa_lrs=0.1)
    averaging.on_fit_start(trainer, trainer.lightning_module)
    trainer.callbacks.append(averaging)  # of one epoch, after which it adds another one
    assert fallback_reason(trainer, _PrefetchDataFetcher()).endswith("updates batch norm without backward passes")
