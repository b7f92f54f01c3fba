from pathlib import Path

import pytest
from reported import ENVIRONMENT, SUMMARY

from rankzero.runs.directory import RunDirectory
from rankzero.runs.reports.html.next_commands import next_commands


def commands(run="runs/x", status="stopped", has_curves=False, summary=None, **environment):
    summary = {**SUMMARY, "status": status, **(summary or {})}
    return next_commands(RunDirectory(Path(run)), summary, {**ENVIRONMENT, **environment}, has_curves)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["fit.py"], "fit.py --name x"),
        (["fit.py", "--name", "x"], "fit.py --name x"),
        (["fit.py", "--run_name=x", "--resume=never"], "fit.py --run_name=x"),
        (["fit.py", "--resume", "runs/y", "--epochs", "3"], "fit.py --epochs 3 --name x"),
        (["fit.py", "--model.hidden_sizes", "[4, 8]"], "fit.py --model.hidden_sizes '[4, 8]' --name x"),
    ],
)
def test_the_command_to_resume_is_the_typed_one_with_the_name_of_the_run(typed, expected):
    assert [tuple(command) for command in commands(command=typed)] == [("Resume", expected)]


def test_under_a_launcher_the_command_is_that_of_each_process():
    ((purpose, command),) = commands(launcher="torchrun", command=["python", "fit.py"])
    assert purpose == "Resume, with the launch line of torchrun; each process runs" and command.endswith("--name x")


def test_a_command_with_hidden_secrets_says_that_they_have_to_be_typed():
    ((purpose, command),) = commands(command=["fit.py", "--api_key", "abc", "--name", "x"])
    assert purpose == "Resume, with the secret values in place of ..." and command == "fit.py --api_key ... --name x"


def test_a_script_is_started_again_as_it_is():
    ((purpose, command),) = commands(is_script=True, command=["python", "train.py"])
    assert purpose == "Resume: the same command with --name x" and command == "python train.py"


def test_a_submitted_job_is_resumed_with_submit(tmp_path):
    (tmp_path / "x.job.sh").touch()
    ((_, command),) = commands(run=tmp_path / "x")
    assert command == f"python launch/submit.py resume x --root {tmp_path}"


def test_a_finished_run_is_evaluated_if_a_command_has_trained_it():
    assert [tuple(command) for command in commands(status="finished", has_curves=True)] == [
        ("Evaluate the newest checkpoint", "python launch/evaluate.py --name x"),
        ("Show all curves", "tensorboard --logdir runs --host localhost"),
    ]
    command = [".venv/bin/python", "-u", "../launch/fit.py", "--epochs", "3"]
    evaluate = commands(status="finished", command=command)[0].command
    assert evaluate == ".venv/bin/python -u ../launch/evaluate.py --name x"
    assert "--root 'my runs'" in commands(run="my runs/x", status="finished")[0].command
    assert commands(status="finished", is_script=True) == []
    assert commands(status="finished", summary={"checkpoint": None}) == []
    assert commands(status="finished", summary={"can_validate": False}) == []


@pytest.mark.parametrize("environment", [{}, {"command": []}, {"is_script": True}])
def test_a_failed_run_without_a_checkpoint_starts_again(environment):
    ((purpose, _),) = commands(status="failed", summary={"checkpoint": None}, **environment)
    assert purpose.startswith("Start again")


def test_a_run_without_a_checkpoint_starts_again_from_the_same_checkpoint():
    typed = ["fit.py", "--resume", "runs/y"]
    assert (
        commands(status="failed", summary={"checkpoint": None}, command=typed)[0].command
        == "fit.py --resume runs/y --name x"
    )
