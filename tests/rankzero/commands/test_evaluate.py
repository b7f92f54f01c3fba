import re
import shlex
import sys

import pytest

from rankzero.cli.arguments import parse_arguments
from rankzero.commands.evaluate import EVALUATE, evaluate, main
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.result import RendezvousResult
from rankzero.messages import RequestError
from running import restore_process_state

NO_RENDEZVOUS = RendezvousResult.without_rendezvous(Launch())


@pytest.mark.parametrize("example", EVALUATE.examples)
def test_the_examples_in_the_help_are_valid_command_lines(example):
    start, arguments = re.split(r"launch/evaluate\.py", example)
    assert start.split()[0] in ("python", "torchrun", "srun")
    assert parse_arguments(EVALUATE, shlex.split(arguments)).command is EVALUATE


def test_main_reads_the_command_line_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch/evaluate.py", "--devices", "0"])
    assert main() == 2
    assert "asked  --devices 0\n" in capsys.readouterr().err
    assert main(["--explain", "--devices", "2"]) == 0
    assert "would start: 2 processes on this machine" in capsys.readouterr().out


def test_an_unknown_run_is_refused(cwd):
    with restore_process_state(), pytest.raises(RequestError, match="no such run") as error:
        evaluate(parse_arguments(EVALUATE, ["--name", "x"]), NO_RENDEZVOUS)
    assert error.value.asked == "to evaluate --name x" and not list(cwd.iterdir())


def test_model_and_data_have_no_default_and_the_split_is_val():
    flags = parse_arguments(EVALUATE, [])
    assert flags.arguments == [] and flags.get("split") == "val"


def test_evaluate_ends_at_once_on_a_signal():
    assert not EVALUATE.stops_at_safe_point
