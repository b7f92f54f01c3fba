"""Scripts that import `rankzero.Trainer`: Lightning's examples with one changed line, killed and resumed."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from running import REPOSITORY, run
from stock import differences
from system.forks import fit_on_ranks, outputs, summary
from system.learned import TORCHRUN

SCRIPTS = Path(__file__).parent.parent / "scripts"
PUBLIC = Path(__file__).parent.parent / "public"
EXAMPLES = {"boring": 11, "classifier": 10, "public": 14}
"""Example -> batch after which one process is killed; two processes are killed after half as many, in epoch one."""


@pytest.fixture
def run_example(tmp_path):
    """Returns a function that runs an example in the test's folder, and returns the exit codes."""
    for file in (*SCRIPTS.glob("*.py"), *PUBLIC.glob("*.py")):
        shutil.copy(file, tmp_path)

    def start(example: str, *arguments: str, world: int = 1, code: int | None = 0) -> list[int]:
        script = str(tmp_path / f"{example}.py")
        return fit_on_ranks(*arguments, folder=tmp_path, world=world, code=code, script=script)

    return start


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_killed_in_mid_epoch_and_resumed_equals_an_uninterrupted_run(run_example, tmp_path, example, world):
    run_example(example, "name=whole", world=world)
    codes = run_example(example, "name=x", f"kill={EXAMPLES[example] // world}", world=world, code=None)
    assert codes[0] == -9
    assert list((tmp_path / "runs/x/checkpoints").glob("step-*")), "there was nothing to resume from"
    run_example(example, "name=x", world=world)
    uninterrupted, resumed = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "x"))
    assert not differences(uninterrupted, resumed, 0.0 if world == 1 else 1e-6)
    first, second = summary(tmp_path, "whole"), summary(tmp_path, "x")
    assert (first["attempts"], second["attempts"]) == (1, 2)
    assert first["ledger"] == second["ledger"] and len(first["ledger"]) == 2


def test_a_refusal_is_printed_once_and_without_a_traceback(run_example, tmp_path):
    run_example("boring", "name=x", "save_every=often", world=2, code=2)
    printed = "".join(outputs(tmp_path, 2))
    assert printed.count('asked  save_every="often"') == 1 and "Traceback" not in printed
    assert not (tmp_path / "runs").exists()


SEEDS = """\
import os
from lightning.pytorch import seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from rankzero import Trainer

if __name__ == "__main__":
    seed_everything(42 + int(os.environ["RANK"]))
    trainer = Trainer(max_epochs=1, accelerator="cpu", limit_val_batches=0, enable_model_summary=False)
    trainer.fit(BoringModel())
"""


def test_ranks_that_a_script_seeds_differently_use_each_sample_once(tmp_path):
    (tmp_path / "seeds.py").write_text(SEEDS)
    result = run(TORCHRUN, "--standalone", "--nproc-per-node", "2", "seeds.py", folder=tmp_path)
    assert "epoch 1: 64 of 64 samples, each once" in result.out


CHECKPOINTS = """\
from pathlib import Path
from boring_models import DropoutNet, samples
from lightning.pytorch.callbacks import ModelCheckpoint
from rankzero import Trainer

if __name__ == "__main__":
    for callbacks in ([ModelCheckpoint("own", monitor="val_loss", mode="max", save_last=True)], []):
        trainer = Trainer(max_epochs=3, accelerator="cpu", devices=2, callbacks=callbacks)
        trainer.fit(DropoutNet(), samples(), samples())
        for ckpt_path in (None, "last", trainer.checkpoint_callback.best_model_path):
            trainer.test(dataloaders=samples(), ckpt_path=ckpt_path, verbose=False)
            print(f"rank {trainer.global_rank}: {'/'.join(Path(trainer.ckpt_path).parts[-2:])}\\n", end="")
        trainer.save_checkpoint("memory://x.ckpt")
        trainer.test(DropoutNet(), samples(), ckpt_path="memory://x.ckpt", verbose=False)
        try:
            trainer.test(dataloaders=samples(), ckpt_path="missing.ckpt")
        except FileNotFoundError:
            print(f"rank {trainer.global_rank}: missing\\n", end="")
"""


def test_all_ranks_load_the_best_the_last_a_remote_and_no_missing_checkpoint(tmp_path, monkeypatch):
    # `tests/rankzero` has the name of the package, which has to be found first.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(REPOSITORY / folder) for folder in ("project", "tests")))
    (tmp_path / "train.py").write_text(CHECKPOINTS)
    lines = sorted(line for line in run("python", "train.py", folder=tmp_path).out.splitlines() if "rank " in line)
    own, default = "own/epoch=0-step=3.ckpt", "step-00000009/state.pt"
    loaded = sorted([own, "own/last.ckpt", own, "missing", default, default, default, "missing"])
    assert lines == [f"rank {rank}: {name}" for rank in (0, 1) for name in loaded]


SOME_RANKS_STOP = """\
import sys
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from rankzero import Trainer

CASES = (  # hook, the ranks that request a stop, batches of an epoch, val_check_interval
    ("on_validation_end", [1], 8, 4),
    ("on_train_epoch_end", [1], 4, None),
    ("on_train_epoch_start", [1], 4, None),
    ("on_train_batch_end", [1], 8, None),
    ("on_train_batch_end", [0], 8, None),
    ("on_train_batch_end", [0, 1], 8, None),
)

if __name__ == "__main__":
    for hook, ranks, batches, interval in CASES:

        def stop(trainer, *arguments):
            trainer.should_stop |= trainer.global_rank in ranks and trainer.global_step == 4

        limits = {"limit_train_batches": batches, "limit_val_batches": 2, "max_epochs": 3}
        options = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "devices": 2}
        callbacks = [LambdaCallback(**{hook: stop})]
        trainer = Trainer(callbacks=callbacks, val_check_interval=interval, **limits, **options)
        trainer.fit(BoringModel())
        sys.stdout.write(f"rank {trainer.global_rank}: {hook} {ranks} {trainer.global_step} {trainer.current_epoch}\\n")
"""


def test_a_stop_that_some_ranks_request_stops_all_ranks_in_one_step(tmp_path):
    (tmp_path / "train.py").write_text(SOME_RANKS_STOP)
    lines = [line for line in run("python", "train.py", folder=tmp_path).out.splitlines() if line.startswith("rank ")]
    around_epochs = ["on_validation_end [1] 4 1", "on_train_epoch_end [1] 4 1", "on_train_epoch_start [1] 4 2"]
    for rank in (0, 1):
        ends = [line.removeprefix(f"rank {rank}: ") for line in lines if line.startswith(f"rank {rank}")]
        assert ends[:3] == around_epochs and ends[5:] == ["on_train_batch_end [0, 1] 4 1"]
        assert all(end.endswith((" 5 1", " 6 1")) for end in ends[3:5])  # after a step that no rank had begun
    assert len({line.split(": ")[1] for line in lines}) == 6


OTHER_LENGTHS = """\
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from rankzero import Trainer

class Batches:
    def __iter__(self):
        return iter(torch.ones(2 + 2 * torch.distributed.get_rank(), 2, 32))

class Sized(Batches):
    def __len__(self):
        return 2 + 2 * torch.distributed.get_rank()

if __name__ == "__main__":
    for max_steps in (1, 3):
        limits = {{"max_epochs": 1, "max_steps": max_steps, "limit_val_batches": 0}}
        trainer = Trainer(**limits, logger=False, accelerator="cpu", devices=2)
        trainer.fit(BoringModel(), {}())
"""


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ("Batches", "the training data of rank 0 ended after 2 batches of epoch 0, and rank 1 has more"),
        ("Sized", "the ranks have different numbers of training batches (2, 4)"),
    ],
)
def test_loaders_of_the_user_with_other_lengths_are_refused_unless_all_have_enough_batches(tmp_path, loader, message):
    (tmp_path / "train.py").write_text(OTHER_LENGTHS.format(loader))
    result = run("python", "train.py", folder=tmp_path, code=1)
    assert result.out.count("finished") == 1 and message in result.err
    assert "cannot start" not in result.err and "Traceback" not in result.err
