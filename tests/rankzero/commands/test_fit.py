import re
import shlex
import sys

import pytest

from rankzero.cli.arguments import parse_arguments
from rankzero.commands.fit import FIT, fit, main
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous.result import RendezvousResult
from running import restore_process_state

NO_RENDEZVOUS = RendezvousResult.without_rendezvous(Launch())


@pytest.mark.parametrize("example", FIT.examples)
def test_the_examples_in_the_help_are_valid_command_lines(example):
    start, arguments = re.split(r"launch/fit\.py", example)
    assert start.split()[0] in ("python", "torchrun", "srun")
    assert parse_arguments(FIT, shlex.split(arguments)).command is FIT


def test_main_reads_the_command_line_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch/fit.py", "--devices", "0"])
    assert main() == 2
    assert "asked  --devices 0\n" in capsys.readouterr().err
    assert main(["--explain", "--devices", "2"]) == 0
    assert "would start: 2 processes on this machine" in capsys.readouterr().out


def test_the_default_model_and_data_are_used_if_none_are_given(cwd, capsys):
    with restore_process_state(), pytest.raises(SystemExit) as exit_info:
        fit(parse_arguments(FIT, ["--print_config"]), NO_RENDEZVOUS)
    printed = capsys.readouterr().out
    assert exit_info.value.code == 0
    assert "class_path: lightning_modules.ResNet" in printed and "class_path: data_modules.Digits" in printed


def test_fit_stops_at_a_safe_point():
    assert FIT.stops_at_safe_point
