"""One rank of several fails or is lost: all ranks end, and the cause is printed once."""

import os
import re
import signal
import socket
import subprocess

import pytest

from running import INTERPRETER_BIN, REPOSITORY, TOY, reserved_port, run
from system.forks import fit_on_ranks, outputs, summary
from system.learned import TORCHRUN
from system.test_exactly_once import CLASSES

WITH_ERROR = "failed with the error above"


@pytest.mark.parametrize(
    ("fault", "rank", "message"),
    [
        *(("validation", 0, WITH_ERROR), ("epoch", 2, WITH_ERROR), ("batch exit", 1, WITH_ERROR)),
        *(("batch SIGKILL", 1, "was lost"), ("batch SIGKILL", 0, "was lost")),
    ],
)
def test_a_failure_of_one_rank_ends_all_ranks_and_is_reported_once(user_folder, fault, rank, message):
    """The cause is printed once, with rank and host; every rank that still can writes its traceback to its log."""
    arguments, world = ("recording.Fault", "--trainer.callbacks.where", fault), max(2, rank + 1)
    arguments = (*CLASSES, "--trainer.callbacks", *arguments, "--trainer.callbacks.rank", f"{rank}")
    name = fault.partition(" ")[2]
    workers = str(int(name == "SIGKILL"))  # loader processes survive their rank
    arguments += ("--epochs", "9", "--run", "x", "--data.workers", workers)
    codes = fit_on_ranks(*arguments, folder=user_folder, world=world, code=None)
    ended = -getattr(signal, name) if name.startswith("SIG") else 1
    assert codes == [ended if index == rank else 1 for index in range(world)]
    printed = "\n".join(outputs(user_folder, world))
    printed = re.sub(r", last seen in [a-z ]+ at step \d+", "", printed)  # only if the rank has reported its status
    assert printed.count(f"rank {rank} on {socket.gethostname()} {message}") == 1
    assert printed.count(" failed with the error above") + printed.count("; stopping all ranks") == 1
    assert printed.count("Traceback") <= 2
    for index in set(range(world)) - ({rank} if name == "SIGKILL" else set()):
        log = (user_folder / f"runs/x/logs/rank-{index:03d}.log").read_text()
        assert 'File "' in log and (index != rank or "deliberate" in log or name)
    if codes[0] == 1:
        assert summary(user_folder, "x")["status"] == "failed"
        assert printed.count("run x: failed") == printed.count("│ to ") == 1


SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from rankzero import Trainer

class Raising(BoringModel):
    def training_step(self, batch, index):
        assert self.global_step < 5 or self.global_rank != int(sys.argv[1]), "deliberate"
        return super().training_step(batch, index)

try:
    Trainer(max_epochs=1, accelerator="cpu").fit(Raising())
finally:
    time.sleep(3 * ("deliberate" in repr(sys.exc_info())))  # ranks would end sooner after the loss of a rank
    Path("cleaned-" + os.environ["RANK"]).touch()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_in_a_script_is_torchruns_root_cause_and_all_ranks_clean_up(tmp_path, rank):
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run(TORCHRUN, "--standalone", "--nproc-per-node=2", "train.py", str(rank), folder=tmp_path, code=1)
    assert result.err.count("AssertionError: deliberate") == 1
    assert f"rank {rank} on {socket.gethostname()} {WITH_ERROR}" in result.err
    assert re.search(r"Root Cause[^=]+rank +: (\d)", result.err)[1] == str(rank)
    assert len(list(tmp_path.glob("cleaned-*"))) == 2


def test_a_failing_rank_does_not_wait_in_on_exception_checkpoint(user_folder):
    """Lightning's OnExceptionCheckpoint saves with a barrier, which the other ranks never reach."""
    (user_folder / "config.yaml").write_text(
        "trainer:\n  callbacks:\n"
        "  - class_path: lightning.pytorch.callbacks.OnExceptionCheckpoint\n    init_args: {dirpath: here}\n"
        "  - class_path: recording.Fault\n    init_args: {where: batch}\n"
    )
    fit_on_ranks(*CLASSES, "--config", "config.yaml", "--epochs", "9", folder=user_folder, world=2, code=1)
    printed = "\n".join(outputs(user_folder, 2))
    assert printed.count("KeyError: 'deliberate'") == 1 and printed.count(" failed with the error above") == 1


def test_a_rank_that_is_killed_while_it_imports_torch_ends_the_run_at_once(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with reserved_port() as port:
        address = ("--nodes", "2", "--devices", "1", "--master_addr", "127.0.0.1", "--master_port", f"{port}")
        command = [f"{INTERPRETER_BIN}/python", f"{REPOSITORY}/launch/fit.py", *TOY, *address, "--node_rank"]
        with subprocess.Popen([*command, "1"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{tmp_path}"}):
            result = run(*command, "0", folder=tmp_path, code=1)
    assert f"rank 1 on {socket.gethostname()} was lost (killed? out of memory?); stopping all ranks" in result.err
    assert "has ended its program" not in result.err


TRIALS = """
import sys
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from rankzero import Trainer

PLACES = "setup", "configure_optimizers", "training_step", "validation_step", "on_train_epoch_end", "test_step"

class Pruned(Exception):
    pass

class Trial(BoringModel):
    def __init__(self, place, ranks):
        torch.manual_seed(1)
        super().__init__()
        if ranks:
            setattr(self, place, self.raising(place, getattr(self, place), ranks))

    def raising(self, name, hook, ranks):
        def call(*arguments, **named):
            if self.global_rank in ranks and (self.global_step > 3 or name in ("setup", "configure_optimizers")):
                raise Pruned(f"in {name} on rank {self.global_rank}")
            return hook(*arguments, **named)
        return call

def trial(place, ranks):
    trainer = Trainer(name=place, devices=2, accelerator="cpu", max_epochs=1, limit_train_batches=8, quiet=True)
    model = Trial(place, ranks)
    trainer.fit(model)
    trainer.test(model, verbose=False)
    return trainer, model

for place in PLACES:
    try:
        trial(place, (0, 1))
    except Pruned as error:
        print(f"{error}\\n", end="", flush=True)  # one write, as both ranks print at once
trainer, model = trial("none", ())
print(f"trained {trainer.world_size} {model.layer.weight.sum().item()}\\n", end="", flush=True)
try:
    trial(sys.argv[1], range(int(sys.argv[2])))
except Pruned:
    if sys.argv[2] == "2":
        raise
trial("none", ())
"""


@pytest.mark.parametrize("failing", [1, 2])
def test_a_script_continues_after_an_error_that_it_catches_on_all_ranks(tmp_path, failing):
    """It ends if the last error is raised on one rank and caught there, or if no rank catches it."""
    (tmp_path / "trials.py").write_text(TRIALS)
    command = f"{INTERPRETER_BIN}/python", "trials.py", "training_step", f"{failing}"
    result = run(*command, folder=tmp_path, code=1)
    for place in re.findall("[a-z_]+", TRIALS.partition("PLACES = ")[2].partition("\n")[0]):
        assert all(f"in {place} on rank {rank}" in result.out for rank in (0, 1)), place
    trained = [line for line in result.out.splitlines() if line.startswith("trained 2")]
    assert len(trained) == 2 and len(set(trained)) == 1
    if failing == 1:
        message = "Pruned('in training_step on rank 0'): a script can catch an error only if all ranks raise it"
        assert result.err.count(message) == 1 and "Traceback" not in result.err
    else:
        assert result.err.count("Pruned: in training_step on rank") == 1
        assert result.err.count("failed with the error above") == 1
