"""Checkpoints from which a run resumes, and the results of the resumed run."""

import json
import re
import shutil
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, timer

from rankzero.distributed.environments.launch import Launch
from rankzero.messages import CannotStart, RequestError
from rankzero.runs.directory import RunDirectory
from rankzero.runs.resume import requested_checkpoint
from rankzero.runs.summary import already_finished_note
from running import TOY, fit_in_folder, fit_in_process, refusal_of, weights
from stock import differences

EACH_ONCE = [f"epoch {epoch}: 2,048 of 2,048 samples, each once" for epoch in (1, 2, 3)]


def crash_at(step, *arguments, **options):
    """Runs `fit`, which crashes after a step."""
    from rankzero.commands import fit as cli

    def crash(trainer, *_):
        if trainer.global_step == step:
            raise ZeroDivisionError

    def with_crash(*build_arguments, build=cli.build_trainer):
        trainer = build(*build_arguments)
        trainer.callbacks.append(LambdaCallback(on_train_batch_end=crash))
        return trainer

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(cli, "build_trainer", with_crash)
        fit_in_process(*arguments, **options)


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def test_crashes_at_any_step_change_neither_weights_nor_ledger_nor_metrics(cwd, trained):
    """One run crashes five times, with and without loader processes; each newest checkpoint is compared."""
    arguments = (*TOY, "--epochs", "3", "--keep", "100")
    whole, run = trained(*arguments) / "x", cwd / "runs/x"
    for step, workers in ((25, "0"), (64, "0"), (100, "0"), (128, "1"), (150, "1")):
        crash_at(step, *arguments, "--run", "x", "--data.num_workers", workers)
        newest = sorted((run / "checkpoints").iterdir())[-1].name
        assert step - 10 <= int(newest.removeprefix("step-")) <= step
        assert differences(weights(whole, newest), weights(run, newest)) == [], newest
    fit_in_process(*arguments, "--run", "x", "--data.num_workers", "1")
    assert differences(weights(whole), weights(run)) == []
    summary = summary_of(run)
    assert (summary["samples"], summary["steps"], summary["attempts"]) == (3 * 2048, 192, 6)
    assert summary["ledger"] == EACH_ONCE and summary["metrics"] == summary_of(whole)["metrics"]


def test_an_unnamed_run_says_how_to_resume_the_one_before_if_it_has_not_finished(cwd, capsys):
    hint = "run MLP-Toy-1 is not finished; the same command with --name MLP-Toy-1 resumes it"
    crash_at(25, *TOY, "--epochs", "1", "--save_every", "10steps")
    assert "not finished" not in capsys.readouterr().out
    for is_hinted in (True, False):
        fit_in_process(*TOY, "--epochs", "1")
        assert (hint in capsys.readouterr().out) == is_hinted


def test_fewer_epochs_than_an_unfinished_run_has_trained_are_refused(cwd):
    crash_at(150, *TOY, "--epochs", "9", "--run", "x")
    with pytest.raises(RequestError, match=r"run x has trained 2 epochs(?s:.*)--epochs 3"):
        fit_in_process(*TOY, "--epochs", "1", "--run", "x")


def test_a_finished_run_is_reported_resumes_for_more_epochs_and_is_archived_by_the_value_never(finished, capsys):
    run = finished(2)
    before = (run / "run.json").read_text()
    assert fit_in_process(*TOY, "--epochs", "2", "--run", "x") == 0
    out = capsys.readouterr().out
    assert "already finished (2 epochs" in out and "--epochs 4" in out and "--resume never" in out
    with pytest.raises(RequestError, match="run x has trained 2 epochs"):
        fit_in_process(*TOY, "--epochs", "1", "--run", "x")
    assert (run / "run.json").read_text() == before
    fit_in_process(*TOY, "--epochs", "3", "--run", "x")
    assert "resuming from step-00000128" in capsys.readouterr().out
    assert summary_of(run)["epochs"] == 3
    fit_in_process(*TOY, "--epochs", "1", "--run", "x", "--resume", "never")
    assert summary_of(run)["steps"] == 64 and summary_of(run.with_name("x.before-1"))["steps"] == 192


def test_a_run_ended_early_by_a_callback_is_reported_and_resumes_with_more_epochs(cwd, capsys):
    callback = ("--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "val/loss")
    early = (*TOY, "--run", "x", *callback, "--trainer.callbacks.patience", "0", "--trainer.callbacks.mode", "max")
    fit_in_process(*early, "--epochs", "5")
    assert "2 of 5 (128 steps" in capsys.readouterr().out
    fit_in_process(*early, "--epochs", "5")
    out, summary = capsys.readouterr().out, summary_of(cwd / "runs/x")
    assert "(2 epochs, 128 steps; stopped early by a callback" in out and "--epochs 10" in out
    assert (summary["attempts"], summary["steps"]) == (1, 128)
    fit_in_process(*early, "--epochs", "10")
    assert summary_of(cwd / "runs/x")["epochs"] == 3


def test_a_run_ended_by_max_time_resumes_with_a_longer_max_time(cwd, capsys, monkeypatch):
    monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=count().__next__))  # each reading is a second later
    arguments = (*TOY, "--model.schedule", "Constant", "--run", "x", "--trainer.max_time")
    steps = []
    for seconds in (30, 30, 59):
        fit_in_process(*arguments, f"00:00:00:{seconds}")
        steps.append(summary_of(cwd / "runs/x")["steps"])
    assert 0 < steps[0] == steps[1] < steps[2] and "already finished" not in capsys.readouterr().out
    fit_in_process(*arguments, "00:00:00:59", "--trainer.max_steps", "1")
    assert f"--trainer.max_steps {2 * steps[2]}" in capsys.readouterr().out


def test_the_note_about_a_finished_run_states_which_limits_to_raise(cwd):
    for stored, requested, epochs, steps, expected in (
        *(((5, -1), (5, -1), epochs, 10 * epochs, "--epochs 10") for epochs in (5, 2)),
        *(((-1, 50), (-1, 50), epochs, 10 * epochs, "--trainer.max_steps 100") for epochs in (5, 2)),
        *(((5, 60), (5, 60), epochs, 10 * epochs, "--epochs 10") for epochs in (5, 2)),
        *(((5, -1), (3, -1), 5, 50, "--epochs 10"), ((-1, -1), (3, -1), 5, 50, "--epochs 10")),
        ((-1, 50), (3, 50), 5, 50, "--epochs 10 --trainer.max_steps 100"),
        ((5, 50), (5, 50), 4, 50, "--trainer.max_steps 100"),
        ((5, 50), (5, 50), 5, 50, "--epochs 10 --trainer.max_steps 100"),
    ):
        run = RunDirectory(cwd)
        run.write_summary({"epochs": epochs, "steps": steps, "max_epochs": stored[0], "max_steps": stored[1]})
        note = already_finished_note(run, SimpleNamespace(max_epochs=requested[0], max_steps=requested[1]))
        assert f"the same command with {expected}\n" in note and ("stopped early" in note) == (epochs == 2)


@pytest.mark.parametrize(
    ("step", "resumed_step", "path"), [(1, 64, "runs/x"), (15, 70, "runs/x/checkpoints/step-00000064")]
)
def test_a_new_run_starts_from_a_checkpoint_of_another_run_but_prefers_its_own_if_its_job_is_restarted(
    finished, capsys, step, resumed_step, path
):
    """The job's command contains `--resume PATH`, which applies only while the job has saved no checkpoint."""
    run = finished(1).with_name("y")
    command = (*TOY, "--epochs", "3", "--run", "y", "--resume", path)
    crash_at(64 + step, *command, launch=Launch(job_id="7"))
    assert "resuming from step-00000064" in capsys.readouterr().out
    fit_in_process(*command, launch=Launch(job_id="7", restarts=1))
    assert f"resuming from step-{resumed_step:08d}" in capsys.readouterr().out
    summary = summary_of(run)
    assert (summary["epochs"], summary["samples"], summary["attempts"]) == (3, 3 * 2048, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data", "Digits"), r"--model lightning_modules\.MLP --data data_modules\.Toy"),
        (("--model", "ResNet", "--data", "Digits"), r"--model lightning_modules\.MLP --data data_modules\.Toy"),
        (("--model.hidden_sizes", "[7]"), "does not fit the model"),
        (("--resume", "runs/y", "--seed", "1"), r"keeps its seed, 0\n.*--seed 0, --name .*, or --resume never"),
        (("--global_batch_size", "8"), r"keeps its global batch size, 32\n.*--accept_changed global"),
        (("--resume", "runs/y", "--model.hidden_sizes", "[7]"), "does not fit the model"),
        (("--resume", "runs/x/checkpoints/step-00000050", "--data", "Digits"), r"--data data_modules\.Toy"),
        (("--resume", "never", "--batch_size", "5000"), "--batch_size 5000"),
        (("--run", "z", "--resume", "runs/x/checkpoints/step-00000007"), "step-00000064"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_refused_start_changes_no_run(finished, flags, message):
    run = finished(1)
    shutil.copytree(run, run.with_name("y"))

    def files():
        return [path for path in sorted(run.parent.rglob("*")) if "tfevents" not in path.name]

    before = files(), (run / "run.json").read_text(), summary_of(run)
    with pytest.raises(CannotStart, match=message):
        fit_in_process(*TOY, "--epochs", "2", "--run", "x", *flags)
    assert (files(), (run / "run.json").read_text(), summary_of(run)) == before


def test_a_damaged_checkpoint_is_skipped_and_a_resume_from_an_older_one_archives_the_newer(finished, capsys):
    run = finished(1)
    fit_in_process(*TOY, "--epochs", "1", "--run", "x", "--resume", "runs/x/checkpoints/step-00000050")
    assert sorted(int(path.name.removeprefix("step-")) for path in run.glob("checkpoints*/*")) == [50, 60, 60, 64, 64]
    (run / "checkpoints/step-00000064/state.pt").write_bytes(b"")
    fit_in_process(*TOY, "--epochs", "2", "--run", "x")
    out = capsys.readouterr().out
    assert "skipped" in out and "resuming from step-00000060" in out


def test_a_run_ended_by_max_steps_in_the_middle_of_an_epoch_resumes_there(cwd, trained, capsys):
    arguments = (*TOY, "--model.schedule", "Constant", "--trainer.max_epochs=-1", "--trainer.max_steps")
    for steps in ("100", "192", "192"):
        fit_in_process(*arguments, steps, "--run", "parts")
    assert "--trainer.max_steps 384" in capsys.readouterr().out
    assert differences(weights(trained(*arguments, "192") / "x"), weights(cwd / "runs/parts")) == []


@pytest.mark.parametrize(
    ("path", "found", "instead"),
    [
        ("missing.ckpt", "there is no such file or folder", "runs/NAME/checkpoints/step-00000100"),
        ("lst.ckpt", r"there is no such file or folder; \S+ contains last.ckpt", "last.ckpt"),
        ("nowhere/x.ckpt", "there is no such file or folder, and no folder nowhere", "runs/NAME/checkpoints"),
        ("runs/y", r"there is no such file or folder; \S+ contains first", "runs/NAME/checkpoints"),
    ],
)
def test_a_missing_checkpoint_is_named_as_typed(cwd, path, found, instead):
    if path != "missing.ckpt":
        (cwd / "last.ckpt").write_text("")
    (cwd / "runs/first").mkdir(parents=True)
    (cwd / "runs/first/run.json").write_text("{}")
    error = refusal_of(requested_checkpoint, path)
    assert error.asked == f"the checkpoint {path}" and "manifest.json" not in str(error)
    assert re.fullmatch(found, error.found) and instead in error.instead


def test_changed_data_is_refused_with_a_description_of_the_change(cwd):
    arguments = (*TOY, "--epochs", "3", "--run", "x")
    crash_at(80, *arguments)
    with pytest.raises(CannotStart, match=r"inputs: was float32 \(2048, 20\), \w+, is float32 \(2048, 20\)"):
        fit_in_process(*arguments, "--data.data_seed", "5")
    fit_in_process(*arguments, "--data.data_seed", "5", "--accept_changed", "data")
    summary = summary_of(cwd / "runs/x")
    assert summary["ledger"] == EACH_ONCE and summary["steps"] == 70 + 2 * 64  # the second epoch restarted


def test_a_run_resumed_with_another_global_batch_size_completes_the_epoch(cwd):
    arguments = (*TOY, "--epochs", "3", "--run", "x")
    crash_at(85, *arguments)
    arguments = (*arguments, "--global_batch_size", "100")
    crash_at(91, *arguments, "--accept_changed", "global_batch_size")
    fit_in_process(*arguments)
    summary, remaining_steps = summary_of(cwd / "runs/x"), -(-(2048 - 16 * 32) // 100)
    assert summary["ledger"] == EACH_ONCE and summary["steps"] == 80 + remaining_steps + 21


def model_checkpoint(folder, **settings):
    settings |= {"dirpath": f"own/{folder}", "filename": "{step}", "save_top_k": -1}
    return {"class_path": "ModelCheckpoint", "init_args": settings}


MODEL_CHECKPOINTS = [
    model_checkpoint("steps", every_n_train_steps=25),
    model_checkpoint("val", save_on_train_epoch_end=False, monitor="val/loss"),
    model_checkpoint("epoch", save_on_train_epoch_end=True),
]
"""Saved after every 25th step, after a validation, and after an epoch."""
CONSTANT = (*TOY, "--model.schedule", "Constant", "--trainer.val_check_interval", "0.5")


@pytest.fixture(scope="module")
def lightnings_checkpoints(tmp_path_factory):
    """Trains with three callbacks `ModelCheckpoint`, and returns the folder of their checkpoints."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "callbacks.yaml").write_text(json.dumps({"trainer": {"callbacks": MODEL_CHECKPOINTS}}))
    fit_in_folder(folder, *CONSTANT, "--config", "callbacks.yaml", "--epochs", "3", "--run", "own")
    return folder / "own"


@pytest.mark.parametrize("checkpoint", ["steps/step=25", "val/step=64", "epoch/step=64"])
def test_a_run_resumes_exactly_from_a_checkpoint_of_lightnings_callback_even_if_it_crashes(
    cwd, trained, lightnings_checkpoints, checkpoint
):
    arguments = (*CONSTANT, "--epochs", "2", "--run", "rest")
    crash_at(115, *arguments, "--resume", str(lightnings_checkpoints / f"{checkpoint}.ckpt"))
    fit_in_process(*arguments)
    assert differences(weights(trained(*CONSTANT, "--epochs", "2") / "x"), weights(cwd / "runs/rest")) == []
    assert summary_of(cwd / "runs/rest")["ledger"][-1] == EACH_ONCE[1]


@pytest.mark.parametrize(
    ("checkpoint", "steps"), [("steps/step=100", 164), ("val/step=64", 128), ("epoch/step=64", 128)]
)
def test_a_checkpoint_not_written_by_rankzero_restarts_its_epoch_unless_it_was_complete(
    cwd, capsys, lightnings_checkpoints, checkpoint, steps
):
    content = torch.load(lightnings_checkpoints / f"{checkpoint}.ckpt", weights_only=True)
    for name in ("rankzero", "rank_states", "ledger"):
        del content[name]
    torch.save(content, "bare.ckpt")
    fit_in_process(*CONSTANT, "--epochs", "2", "--run", "bare", "--resume", "bare.ckpt")
    assert "its last epoch restarts from the beginning" in capsys.readouterr().out
    summary = summary_of(cwd / "runs/bare")
    assert summary["ledger"] == ["epoch 2: 2,048 of 2,048 samples, each once"] and summary["steps"] == steps
