"""Tests on real processes: the ancestor is a shell, whose command line the test chooses."""

import os
import subprocess
import sys

import psutil
import pytest

from rankzero.distributed.environments import ancestors as module
from rankzero.distributed.environments.ancestors import ancestor_commands, ancestor_ids, command_of, environment_of

PRINT = "from rankzero.distributed.environments.ancestors import ancestor_commands; print([*ancestor_commands()])"


def test_ancestor_ids_are_psutils_followed_by_0_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(module, "_GENERATIONS", 1000)
    assert [*ancestor_ids()] == [*(str(parent.pid) for parent in psutil.Process().parents()), "0"]
    monkeypatch.setattr(module, "_GENERATIONS", 1)
    assert [*ancestor_ids()] == [str(os.getppid())]
    assert len([*ancestor_commands()]) == 1


def test_command_lines_are_read_with_all_arguments_and_need_not_be_utf8():
    script = f"'{sys.executable}' -c '{PRINT}'; true"
    command = ["sh", "-c", script, "--nnodes", "1:2", "", "two words", "ä"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"[{[*command, '']}, ")
    script = script.replace("print(", "print(ascii(").replace(")'; true", "))'; true")
    result = subprocess.run([b"sh", b"-c", script.encode(), b"caf\xe9"], capture_output=True, text=True, check=True)
    assert "'caf\\udce9'" in result.stdout


def test_the_ancestors_end_at_a_process_that_cannot_be_read(monkeypatch):
    monkeypatch.setattr(module, "ancestor_ids", lambda: iter([str(os.getppid()), "0", str(os.getppid())]))
    assert [*ancestor_commands()] == [command_of(str(os.getppid()))]
    for read in (command_of, environment_of):
        with pytest.raises(OSError, match="No such file"):
            read("0")


def test_the_environment_of_a_process_is_read_as_it_was_at_the_start(monkeypatch):
    variables = {b"A": b"1=2", b"EMPTY": b"", b"LINES": b"a\nb", b"BYTES": b"\xff"}
    process = subprocess.Popen(["cat"], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    try:
        process.stdin.write(b"1")
        assert process.stdout.read(1) == b"1"  # the kernel shows the variables once the program has been loaded
        found = environment_of(str(process.pid))
    finally:
        process.kill()
        process.wait()
    assert found == {"A": "1=2", "EMPTY": "", "LINES": "a\nb", "BYTES": "\udcff"}
    monkeypatch.setenv("SET_LATER", "1")
    assert "SET_LATER" not in environment_of("self")


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
