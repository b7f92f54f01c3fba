from pathlib import Path

import pytest
from reported import ENVIRONMENT, SUMMARY

from rankzero.runs.directory import RunDirectory
from rankzero.runs.reports.html.next_commands import next_commands


def commands(run="runs/x", status="stopped", has_curves=False, summary=None, **environment):
    """Returns pairs of purpose and command."""
    summary = {**SUMMARY, "status": status, **(summary or {})}
    found = next_commands(RunDirectory(Path(run)), summary, {**ENVIRONMENT, **environment}, has_curves)
    return [tuple(command) for command in found]


FIT = ["python", "fit.py"]
IN_TORCHRUN = ", with the launch line of torchrun; each process runs"
SECRET = ["fit.py", "--api_key", "abc", "--name", "x"]


@pytest.mark.parametrize(
    ("environment", "purpose", "expected"),
    [
        ({"command": ["fit.py"]}, "", "fit.py --name x"),
        ({"command": ["fit.py", "--name", "x"]}, "", "fit.py --name x"),
        ({"command": ["fit.py", "--run_name=x", "--resume=never"]}, "", "fit.py --run_name=x"),
        ({"command": ["fit.py", "--resume", "runs/y", "--epochs", "3"]}, "", "fit.py --epochs 3 --name x"),
        ({"command": ["fit.py", "--model.sizes", "[4, 8]"]}, "", "fit.py --model.sizes '[4, 8]' --name x"),
        ({"launcher": "torchrun", "command": FIT}, IN_TORCHRUN, "python fit.py --name x"),
        ({"command": SECRET}, ", with the secret values in place of ...", "fit.py --api_key ... --name x"),
        ({"is_script": True, "command": FIT}, ": the same command with --name x", "python fit.py"),
    ],
)
def test_the_command_to_resume_is_the_typed_one_with_the_name_of_the_run(environment, purpose, expected):
    assert commands(**environment) == [(f"Resume{purpose}", expected)]


def test_a_submitted_job_is_resumed_with_submit(tmp_path):
    (tmp_path / "x.job.sh").touch()
    ((_, command),) = commands(run=tmp_path / "x")
    assert command == f"python launch/submit.py resume x --root {tmp_path}"


def test_a_finished_run_is_evaluated_if_a_command_has_trained_it():
    assert commands(status="finished", has_curves=True) == [
        ("Evaluate the newest checkpoint", "python launch/evaluate.py --name x"),
        ("Show all curves", "tensorboard --logdir runs --host localhost"),
    ]
    command = [".venv/bin/python", "-u", "../launch/fit.py", "--epochs", "3"]
    ((_, evaluate),) = commands(status="finished", command=command)
    assert evaluate == ".venv/bin/python -u ../launch/evaluate.py --name x"
    assert "--root 'my runs'" in commands(run="my runs/x", status="finished")[0][1]
    for settings in ({"is_script": True}, {"summary": {"checkpoint": None}}, {"summary": {"can_validate": False}}):
        assert commands(status="finished", **settings) == []


def test_a_failed_run_without_a_checkpoint_starts_again_from_the_same_checkpoint():
    failed = {"status": "failed", "summary": {"checkpoint": None}}
    for environment in ({}, {"command": []}, {"is_script": True}):
        ((purpose, _),) = commands(**failed, **environment)
        assert purpose.startswith("Start again")
    ((_, command),) = commands(**failed, command=["fit.py", "--resume", "runs/y"])
    assert command == "fit.py --resume runs/y --name x"
