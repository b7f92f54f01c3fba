"""Tests on real processes: the ancestor is a shell, whose command line the test chooses."""

import subprocess
import sys

import psutil
import pytest

from rankzero.distributed.environments import ancestors as module
from rankzero.distributed.environments.ancestors import ancestor_commands
from rankzero.distributed.environments.launchers import torchrun

PRINT = "from rankzero.distributed.environments.ancestors import ancestor_commands; print([*ancestor_commands()])"


def test_command_lines_are_read_with_all_arguments_and_need_not_be_utf8():
    script = f"'{sys.executable}' -c '{PRINT}'; true"
    command = ["sh", "-c", script, "--nnodes", "1:2", "", "two words", "ä"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"[{command}, ")
    script = script.replace("print(", "print(ascii(").replace(")'; true", "))'; true")
    result = subprocess.run([b"sh", b"-c", script.encode(), b"caf\xe9"], capture_output=True, text=True, check=True)
    assert "'caf\\udce9'" in result.stdout


def test_the_ancestors_end_at_a_process_that_cannot_be_read(monkeypatch):
    class Hidden:
        def cmdline(self):
            raise psutil.AccessDenied

    parent = psutil.Process().parent()
    monkeypatch.setattr(psutil.Process, "parents", lambda process: [parent, Hidden(), parent])
    assert [*ancestor_commands()] == [parent.cmdline()]
    monkeypatch.setattr(psutil.Process, "parents", lambda process: [Hidden()])
    assert torchrun.agent_environment() is None


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        *[([], None), (["--nnodes"], ""), (["--nnodes=", "fit.py"], ""), (["--nnodes=a=b"], "a=b")],
        *[(["--nnodes", "1", "--nnodes", "2"], "1"), (["--nnodes-max", "1"], None), (["-nnodes", "1"], None)],
        *[(["nnodes", "1"], None), (["torchrun", "--nnodes", "x", "fit.py"], "x")],
    ],
)
def test_an_option_is_matched_by_its_whole_name_in_all_notations(arguments, value):
    assert module.option(arguments, "nnodes") == value
    arguments = ["torchrun", "--rdzv_endpoint=a:1", "--rdzv-id", "x", "fit.py"]
    assert [module.option(arguments, name) for name in ("rdzv-endpoint", "rdzv-id", "nnodes")] == ["a:1", "x", None]
