"""Checkpoints from which a run resumes, and the results of the resumed run."""

import json
import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from rankzero.distributed.environments.launch import Launch
from rankzero.messages import CannotStart, RequestError
from rankzero.runs.directory import RunDirectory
from rankzero.runs.resume import requested_checkpoint
from rankzero.runs.summary import already_finished_note
from running import fit_in_process, weights

TOY = ("--model", "MLP", "--data", "Toy", "--save_every", "10steps")


class CrashError(RuntimeError):
    pass


class CrashAt(Callback):
    """Callback that raises an error after a step, to simulate a crash."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *arguments):
        if trainer.global_step == self.step:
            raise CrashError


def crash_at(step, *arguments, monkeypatch, **options):
    from rankzero.commands.implementations import training as cli

    build = cli.build_trainer

    def with_crash(*build_arguments):
        trainer = build(*build_arguments)
        trainer.callbacks.append(CrashAt(step))
        return trainer

    with monkeypatch.context() as patch, pytest.raises(CrashError):
        patch.setattr(cli, "build_trainer", with_crash)
        fit_in_process(*arguments, **options)


def are_equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a function that trains a run, once for the same flags, and returns its weights."""

    @cache
    def train(*arguments):
        root = tmp_path_factory.mktemp("whole")
        fit_in_process(*arguments, "--root", str(root), "--run", "whole")
        return weights(root / "whole")

    return train


@pytest.mark.parametrize(("step", "workers"), [(25, "0"), (64, "0"), (100, "0"), (128, "0"), (25, "1"), (150, "1")])
def test_a_crash_at_any_step_does_not_change_the_final_weights(cwd, monkeypatch, trained, step, workers):
    arguments = (*TOY, "--epochs", "3", "--data.num_workers", workers)
    crash_at(step, *arguments, "--run", "broken", monkeypatch=monkeypatch)
    fit_in_process(*arguments, "--run", "broken")
    assert are_equal(trained(*TOY, "--epochs", "3"), weights(cwd / "runs/broken"))
    summary = json.loads((cwd / "runs/broken/summary.json").read_text())
    assert (summary["samples"], summary["steps"], summary["attempts"]) == (3 * 2048, 192, 2)


def test_a_finished_run_is_reported_and_not_trained_again(cwd, capsys):
    fit_in_process(*TOY, "--epochs", "2", "--run", "x")
    before = (cwd / "runs/x/run.json").read_text()
    capsys.readouterr()
    assert fit_in_process(*TOY, "--epochs", "2", "--run", "x") == 0
    out = capsys.readouterr().out
    assert "already finished (2 epochs" in out and "--epochs 4" in out and "--resume never" in out
    assert (cwd / "runs/x/run.json").read_text() == before


def test_a_run_ended_early_by_a_callback_is_reported_and_resumes_with_more_epochs(cwd, capsys):
    callback = ("--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "val/loss")
    early = (*TOY, "--run", "x", *callback, "--trainer.callbacks.patience", "0", "--trainer.callbacks.mode", "max")
    fit_in_process(*early, "--epochs", "5")
    assert "2 of 5 (128 steps" in capsys.readouterr().out
    fit_in_process(*early, "--epochs", "5")
    out = capsys.readouterr().out
    assert "(2 epochs, 128 steps; stopped early by a callback" in out and "--epochs 10" in out
    fit_in_process(*early, "--epochs", "10")
    assert json.loads((cwd / "runs/x/summary.json").read_text())["epochs"] == 3


def test_a_run_ended_by_max_time_resumes_with_a_longer_max_time(cwd, capsys):
    arguments = (*TOY, "--model.schedule", "Constant", "--run", "x", "--trainer.max_time")
    steps = []
    for seconds in (1, 1, 2):
        fit_in_process(*arguments, f"00:00:00:0{seconds}")
        steps.append(json.loads((cwd / "runs/x/summary.json").read_text())["steps"])
    assert 0 < steps[0] == steps[1] < steps[2] and "already finished" not in capsys.readouterr().out
    fit_in_process(*arguments, "00:00:00:02", "--trainer.max_steps", "1")
    assert f"--trainer.max_steps {2 * steps[2]}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stored_limits", "requested_limits", "epochs", "steps", "expected"),
    [
        ((5, -1), (5, -1), 5, 50, "--epochs 10"),
        ((5, -1), (5, -1), 2, 20, "--epochs 10"),
        ((5, -1), (3, -1), 5, 50, "--epochs 10"),
        ((-1, 50), (-1, 50), 5, 50, "--trainer.max_steps 100"),
        ((-1, 50), (-1, 50), 2, 20, "--trainer.max_steps 100"),
        ((-1, 50), (3, 50), 5, 50, "--epochs 10 --trainer.max_steps 100"),
        ((-1, -1), (3, -1), 5, 50, "--epochs 10"),
        ((5, 50), (5, 50), 4, 50, "--trainer.max_steps 100"),
        ((5, 60), (5, 60), 5, 50, "--epochs 10"),
        ((5, 50), (5, 50), 5, 50, "--epochs 10 --trainer.max_steps 100"),
        ((5, 60), (5, 60), 2, 20, "--epochs 10"),
    ],
)
def test_the_note_about_a_finished_run_states_which_limits_to_raise(
    cwd, stored_limits, requested_limits, epochs, steps, expected
):
    run = RunDirectory(cwd)
    run.write_summary({"epochs": epochs, "steps": steps, "max_epochs": stored_limits[0], "max_steps": stored_limits[1]})
    note = already_finished_note(run, SimpleNamespace(max_epochs=requested_limits[0], max_steps=requested_limits[1]))
    assert f"the same command with {expected}\n" in note and ("stopped early" in note) == (epochs == 2)


def test_a_finished_run_resumes_if_more_epochs_are_requested(cwd, capsys):
    fit_in_process(*TOY, "--epochs", "1", "--run", "x")
    fit_in_process(*TOY, "--epochs", "3", "--run", "x")
    assert "resuming from step-00000064" in capsys.readouterr().out
    assert json.loads((cwd / "runs/x/summary.json").read_text())["epochs"] == 3


def test_the_value_never_of_resume_starts_a_new_run_and_archives_the_earlier_run(cwd):
    fit_in_process(*TOY, "--epochs", "2", "--run", "x")
    fit_in_process(*TOY, "--epochs", "1", "--run", "x", "--resume", "never")
    assert json.loads((cwd / "runs/x/summary.json").read_text())["steps"] == 64
    assert json.loads((cwd / "runs/x.before-1/summary.json").read_text())["steps"] == 128


@pytest.mark.parametrize("path", ["runs/x", "runs/x/checkpoints/step-00000128"])
def test_a_new_run_can_start_from_a_checkpoint_of_another_run(cwd, path):
    fit_in_process(*TOY, "--epochs", "2", "--run", "x")
    fit_in_process(*TOY, "--epochs", "4", "--run", "y", "--resume", path)
    summary = json.loads((cwd / "runs/y/summary.json").read_text())
    assert (summary["epochs"], summary["samples"], summary["attempts"]) == (4, 4 * 2048, 1)


@pytest.mark.parametrize(("step", "resumed_step"), [(1, 128), (15, 140)])
def test_a_restarted_job_prefers_its_own_checkpoint_to_the_given_checkpoint(
    cwd, capsys, monkeypatch, step, resumed_step
):
    """The job's command contains `--resume PATH`, which applies only while the job has saved no checkpoint."""
    fit_in_process(*TOY, "--epochs", "2", "--run", "x")
    command = (*TOY, "--epochs", "4", "--run", "y", "--resume", "runs/x")
    crash_at(128 + step, *command, monkeypatch=monkeypatch, launch=Launch(job_id="7"))
    capsys.readouterr()
    fit_in_process(*command, launch=Launch(job_id="7", restarts=1))
    assert f"resuming from step-{resumed_step:08d}" in capsys.readouterr().out
    assert json.loads((cwd / "runs/y/summary.json").read_text())["samples"] == 4 * 2048


def test_a_refused_start_moves_no_checkpoints(cwd):
    for run in ("x", "y"):
        fit_in_process(*TOY, "--epochs", "1", "--run", run)
    before = sorted((cwd / "runs").rglob("*"))
    for flags in (("--seed", "1"), ("--model.hidden_sizes", "[7]")):
        with pytest.raises(CannotStart):
            fit_in_process(*TOY, "--epochs", "2", "--run", "x", "--resume", "runs/y", *flags)
        assert [path for path in sorted((cwd / "runs").rglob("*")) if "tfevents" not in path.name] == [
            path for path in before if "tfevents" not in path.name
        ]


def test_a_damaged_checkpoint_is_skipped(cwd, capsys):
    fit_in_process(*TOY, "--epochs", "1", "--run", "x")
    (cwd / "runs/x/checkpoints/step-00000064/state.pt").write_bytes(b"")
    fit_in_process(*TOY, "--epochs", "2", "--run", "x")
    out = capsys.readouterr().out
    assert "skipped" in out and "resuming from step-00000060" in out


@pytest.mark.parametrize("arguments", [("--data", "Digits"), ("--model", "ResNet", "--data", "Digits")])
def test_another_model_or_data_module_is_refused(cwd, arguments):
    fit_in_process(*TOY, "--epochs", "1", "--run", "x")
    with pytest.raises(CannotStart, match=r"--model lightning_modules\.MLP --data data_modules\.Toy"):
        fit_in_process(*TOY, "--epochs", "2", "--run", "x", *arguments)


def test_a_checkpoint_that_does_not_fit_the_model_is_refused(cwd):
    fit_in_process(*TOY, "--epochs", "1", "--run", "x")
    with pytest.raises(CannotStart, match="does not fit the model"):
        fit_in_process(*TOY, "--epochs", "2", "--run", "x", "--model.hidden_sizes", "[7]")
    assert len(json.loads((cwd / "runs/x/run.json").read_text())["attempts"]) == 1


def test_a_resume_from_an_older_checkpoint_archives_the_newer_checkpoints(cwd):
    fit_in_process(*TOY, "--epochs", "1", "--run", "x")
    fit_in_process(*TOY, "--epochs", "1", "--run", "x", "--resume", "runs/x/checkpoints/step-00000050")
    assert sorted(path.name for path in (cwd / "runs/x").glob("checkpoints*/*")) == [
        "step-00000050",
        "step-00000060",
        "step-00000060",
        "step-00000064",
        "step-00000064",
    ]


def test_a_refused_resume_from_an_older_checkpoint_moves_no_checkpoints(cwd):
    fit_in_process(*TOY, "--epochs", "1", "--run", "x")
    before = sorted((cwd / "runs").rglob("step-*"))
    with pytest.raises(CannotStart):
        fit_in_process(*TOY, "--data", "Digits", "--run", "x", "--resume", "runs/x/checkpoints/step-00000050")
    assert sorted((cwd / "runs").rglob("step-*")) == before


def test_a_refused_new_start_does_not_archive_the_earlier_run(cwd):
    fit_in_process(*TOY, "--epochs", "1", "--run", "x")
    with pytest.raises(CannotStart):
        fit_in_process(*TOY, "--epochs", "1", "--run", "x", "--resume", "never", "--batch_size", "5000")
    assert [path.name for path in (cwd / "runs").iterdir()] == ["x"]
    assert json.loads((cwd / "runs/x/summary.json").read_text())["steps"] == 64


def test_a_run_ended_by_max_steps_in_the_middle_of_an_epoch_resumes_there(cwd, capsys):
    arguments = (*TOY, "--model.schedule", "Constant", "--trainer.max_epochs=-1")
    fit_in_process(*arguments, "--trainer.max_steps", "192", "--run", "whole")
    for steps in ("100", "192", "192"):
        fit_in_process(*arguments, "--trainer.max_steps", steps, "--run", "parts")
    assert are_equal(weights(cwd / "runs/whole"), weights(cwd / "runs/parts"))
    assert "--trainer.max_steps 384" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "found", "instead"),
    [
        ("missing.ckpt", "there is no such file or folder", "runs/NAME/checkpoints/step-00000100"),
        ("lst.ckpt", r"there is no such file or folder; \S+ contains last.ckpt", "last.ckpt"),
        ("nowhere/x.ckpt", "there is no such file or folder, and no folder nowhere", "runs/NAME/checkpoints"),
        ("runs/y", r"there is no such file or folder; \S+ contains first", "runs/first"),
    ],
)
def test_a_missing_checkpoint_is_named_as_typed(cwd, path, found, instead):
    if path != "missing.ckpt":
        (cwd / "last.ckpt").write_text("")
    (cwd / "runs/first").mkdir(parents=True)
    (cwd / "runs/first/run.json").write_text("{}")
    with pytest.raises(RequestError) as error:
        requested_checkpoint(path)
    assert error.value.asked == f"the checkpoint {path}" and "manifest.json" not in str(error.value)
    assert re.fullmatch(found, error.value.found) and instead in error.value.instead


def test_the_refusal_of_a_missing_checkpoint_names_an_existing_checkpoint(cwd):
    fit_in_process(*TOY, "--epochs", "1", "--run", "x")
    with pytest.raises(CannotStart, match="step-00000064"):
        fit_in_process(*TOY, "--resume", "runs/x/checkpoints/step-00000007", "--run", "y")
    assert not (cwd / "runs/y").exists()


def ledger(run):
    return json.loads((run / "summary.json").read_text())["ledger"]


def test_changed_data_is_refused_with_a_description_of_the_change(cwd, monkeypatch):
    crash_at(80, *TOY, "--epochs", "3", "--run", "x", monkeypatch=monkeypatch)
    changed_arguments = (*TOY, "--epochs", "3", "--run", "x", "--data.data_seed", "5")
    with pytest.raises(CannotStart, match=r"inputs: was float32 \(2048, 20\), \w+, is float32 \(2048, 20\)"):
        fit_in_process(*changed_arguments)
    fit_in_process(*changed_arguments, "--accept_changed", "data")
    assert ledger(cwd / "runs/x") == [f"epoch {epoch}: 2,048 of 2,048 samples, each once" for epoch in (1, 2, 3)]
    assert json.loads((cwd / "runs/x/summary.json").read_text())["steps"] == 70 + 2 * 64  # the second epoch restarted


def test_a_run_resumed_with_another_global_batch_size_completes_the_epoch(cwd, monkeypatch):
    crash_at(85, *TOY, "--epochs", "3", "--run", "x", monkeypatch=monkeypatch)
    arguments = (*TOY, "--epochs", "3", "--run", "x", "--global_batch_size", "100")
    crash_at(91, *arguments, "--accept_changed", "global_batch_size", monkeypatch=monkeypatch)
    fit_in_process(*arguments)
    assert ledger(cwd / "runs/x") == [f"epoch {epoch}: 2,048 of 2,048 samples, each once" for epoch in (1, 2, 3)]
    remaining_steps = -(-(2048 - 16 * 32) // 100)
    assert json.loads((cwd / "runs/x/summary.json").read_text())["steps"] == 80 + remaining_steps + 21


MODEL_CHECKPOINT = (
    "--trainer.callbacks",
    "ModelCheckpoint",
    "--trainer.callbacks.dirpath",
    "own",
    "--trainer.callbacks.filename",
)
MODEL_CHECKPOINT += ("{step}", "--trainer.callbacks.save_top_k=-1")
CONSTANT = (*TOY, "--model.schedule", "Constant", "--trainer.val_check_interval", "0.5")


@pytest.mark.parametrize(
    ("step", "settings"),
    [
        (25, ("--trainer.callbacks.every_n_train_steps=25",)),
        (64, ("--trainer.callbacks.every_n_train_steps=64",)),
        (96, ("--trainer.callbacks.save_on_train_epoch_end=false",)),
        (64, ("--trainer.callbacks.save_on_train_epoch_end=false",)),
        (64, ("--trainer.callbacks.save_on_train_epoch_end=true",)),
        (100, ("--trainer.callbacks.save_on_train_epoch_end=true", "--trainer.max_steps=100")),
    ],
)
def test_a_run_resumes_exactly_from_a_checkpoint_of_lightnings_callback(cwd, monkeypatch, trained, step, settings):
    """The checkpoint is saved after a step, a validation, an epoch or a shortened epoch. The resumed run crashes."""
    fit_in_process(*CONSTANT, "--epochs", "3", "--run", "own", *MODEL_CHECKPOINT, *settings)
    resume = ("--epochs", "3", "--run", "rest", "--resume", f"own/step={step}.ckpt")
    crash_at(115, *CONSTANT, *resume, monkeypatch=monkeypatch)
    fit_in_process(*CONSTANT, "--epochs", "3", "--run", "rest")
    assert are_equal(trained(*CONSTANT, "--epochs", "3"), weights(cwd / "runs/rest"))
    assert ledger(cwd / "runs/rest")[-2:] == [f"epoch {epoch}: 2,048 of 2,048 samples, each once" for epoch in (2, 3)]


def test_a_checkpoint_not_written_by_rankzero_restarts_its_epoch(cwd, capsys):
    fit_in_process(
        *TOY, "--epochs", "2", "--run", "own", *MODEL_CHECKPOINT, "--trainer.callbacks.every_n_train_steps=100"
    )
    content = torch.load("own/step=100.ckpt", weights_only=True)
    for name in ("rankzero", "rank_states", "ledger"):
        del content[name]
    torch.save(content, "own/bare.ckpt")
    fit_in_process(*TOY, "--epochs", "2", "--run", "bare", "--resume", "own/bare.ckpt")
    assert "its last epoch restarts from the beginning" in capsys.readouterr().out
    assert ledger(cwd / "runs/bare") == ["epoch 2: 2,048 of 2,048 samples, each once"]
