"""Real processes: a shell is an ancestor whose command line the test chooses."""

import os
import subprocess
import sys

import psutil
import pytest

from rankzero.distributed.environments import ancestors as module
from rankzero.distributed.environments.ancestors import ancestor_ids, ancestors, command_of, environment_of, option

PRINT = "from rankzero.distributed.environments.ancestors import ancestors; print([*ancestors()])"


def test_ancestors_are_those_of_psutil_and_0_after_the_last(monkeypatch):
    monkeypatch.setattr(module, "_GENERATIONS", 1000)
    assert [*ancestor_ids()] == [*(str(parent.pid) for parent in psutil.Process().parents()), "0"]


def test_the_number_of_generations_is_limited(monkeypatch):
    monkeypatch.setattr(module, "_GENERATIONS", 1)
    assert [*ancestor_ids()] == [str(os.getppid())]
    assert len([*ancestors()]) == 1


def test_command_lines_are_read_with_every_word():
    script = f"'{sys.executable}' -c '{PRINT}'; true"
    command = ["sh", "-c", script, "--nnodes", "1:2", "", "two words", "ä"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith(f"[{[*command, '']}, ")


def test_a_command_line_need_not_be_utf8():
    script = f"'{sys.executable}' -c '{PRINT.replace('print(', 'print(ascii(')})'; true"
    ran = subprocess.run([b"sh", b"-c", script.encode(), b"caf\xe9"], capture_output=True, text=True, check=True)
    assert "'caf\\udce9'" in ran.stdout


def test_a_process_that_does_not_exist_ends_the_list(monkeypatch):
    monkeypatch.setattr(module, "ancestor_ids", lambda: iter([str(os.getppid()), "0", str(os.getppid())]))
    assert [*ancestors()] == [command_of(str(os.getppid()))]


def test_a_process_that_does_not_exist_has_no_command_line_and_no_environment():
    for read in (command_of, environment_of):
        with pytest.raises(OSError, match="No such file"):
            read("0")


def test_the_environment_is_what_the_process_was_started_with():
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


def test_variables_set_later_are_not_in_the_environment(monkeypatch):
    monkeypatch.setenv("SET_LATER", "1")
    assert "SET_LATER" not in environment_of("self")


def test_options_in_all_their_forms():
    words = ["torchrun", "--rdzv_endpoint=a:1", "--rdzv-id", "x", "fit.py"]
    assert option(words, "rdzv-endpoint") == "a:1" and option(words, "rdzv-id") == "x"
    assert option(words, "nnodes") is None


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], None),
        (["--nnodes"], ""),
        (["--nnodes=", "fit.py"], ""),
        (["--nnodes=a=b"], "a=b"),
        (["--nnodes", "1", "--nnodes", "2"], "1"),
        (["--nnodes-max", "1"], None),
        (["-nnodes", "1"], None),
        (["nnodes", "1"], None),
    ],
)
def test_only_the_whole_name_of_an_option_counts(words, value):
    assert option(words, "nnodes") == value
