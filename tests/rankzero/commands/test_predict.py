import re
import shlex
import sys

import pytest

from rankzero.cli.arguments import parse_arguments
from rankzero.commands.predict import PREDICT, main, predict
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.result import RendezvousResult
from rankzero.messages import RequestError
from running import restore_process_state

NO_RENDEZVOUS = RendezvousResult.without_rendezvous(Launch())


@pytest.mark.parametrize("example", PREDICT.examples)
def test_the_examples_in_the_help_are_valid_command_lines(example):
    start, arguments = re.split(r"launch/predict\.py", example)
    assert start.split()[0] in ("python", "torchrun", "srun")
    assert parse_arguments(PREDICT, shlex.split(arguments)).command is PREDICT


def test_main_reads_the_command_line_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch/predict.py", "--devices", "0"])
    assert main() == 2
    assert "asked  --devices 0\n" in capsys.readouterr().err
    assert main(["--explain", "--devices", "2"]) == 0
    assert "would start: 2 processes on this machine" in capsys.readouterr().out


def test_an_unknown_run_is_refused(cwd):
    with restore_process_state(), pytest.raises(RequestError, match="no such run") as error:
        predict(parse_arguments(PREDICT, ["--name", "x"]), NO_RENDEZVOUS)
    assert error.value.asked == "to predict --name x" and not list(cwd.iterdir())


def test_predict_is_refused_if_there_is_no_run(cwd):
    with restore_process_state(), pytest.raises(RequestError) as error:
        predict(parse_arguments(PREDICT, []), NO_RENDEZVOUS)
    assert error.value.asked == "to predict the newest run"


def test_model_and_data_have_no_default_and_the_split_is_predict():
    flags = parse_arguments(PREDICT, [])
    assert flags.arguments == [] and flags.get("split") == "predict"


def test_predict_ends_at_once_on_a_signal():
    assert not PREDICT.stops_at_safe_point
