"""The commands that start processes: help, defaults, exit codes and refusals."""

import importlib
import json
import re
import shlex

import pytest

from rankzero.cli.arguments import parse_arguments
from rankzero.commands import preflight
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.world import World
from rankzero.messages import CannotStart, RequestError
from running import command_of, refusal_of, restore_process_state

COMMANDS = {name: command_of(name) for name in ("fit", "evaluate", "predict", "preflight")}


def call(name, *arguments):
    """Calls the function of a command, as `start` does after a rendezvous of one process."""
    work = getattr(importlib.import_module(f"rankzero.commands.{name}"), name)
    with restore_process_state():
        return work(parse_arguments(COMMANDS[name], arguments), World())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_in_the_help_are_valid_command_lines(name):
    for example in COMMANDS[name].examples:
        start, arguments = re.split(rf"launch/{name}\.py", example)
        assert start.split()[0] in ("python", "torchrun", "srun")
        assert parse_arguments(COMMANDS[name], shlex.split(arguments)).command is COMMANDS[name]


def test_fit_alone_stops_at_a_safe_point():
    assert [name for name, command in COMMANDS.items() if command.stops_at_safe_point] == ["fit"]


@pytest.mark.parametrize(("name", "split"), [("evaluate", "val"), ("predict", "predict")])
def test_evaluate_and_predict_have_a_default_split_and_refuse_an_unknown_run(cwd, name, split):
    flags = parse_arguments(COMMANDS[name], [])
    assert flags.arguments == [] and flags.get("split") == split
    error = refusal_of(call, name, "--name", "x")
    assert error.asked == f"to {name} --name x" and "there is no folder" in error.found and not list(cwd.iterdir())
    assert refusal_of(call, name).asked == f"to {name} the newest run"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_rendezvous_replaces_the_json_file_on_each_rank(cwd, monkeypatch, rank):
    monkeypatch.setattr("rankzero.commands.preflight.refuse", lambda error, launch, code: code)
    flags = parse_arguments(COMMANDS["preflight"], [])
    assert preflight.report_failed_rendezvous(CannotStart("reason"), flags, Launch()) == 1
    assert list(cwd.iterdir()) == []  # without --json
    (cwd / "preflight.json").write_text('{"fit_to_train": true}')
    flags = parse_arguments(COMMANDS["preflight"], ["--json", "preflight.json"])
    error = RequestError("2 nodes x 1 process", "missing rank 1", "the same command on every machine")
    assert preflight.report_failed_rendezvous(error, flags, Launch(launcher="slurm", rank=rank, world_size=2)) == 1
    content = json.loads((cwd / "preflight.json").read_text())
    assert [check["status"] for check in content["checks"][:3]] == ["ok", "fail", "skipped"]
    assert content["checks"][1]["summary"] == "missing rank 1" and not content["fit_to_train"]
    assert content["checks"][1]["advice"] == ["the same command on every machine"]
