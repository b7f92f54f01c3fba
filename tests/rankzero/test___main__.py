import sys

import pytest

import rankzero
from rankzero.__main__ import COMMANDS, as_typed, main
from rankzero.cli.command import SUBCOMMANDS
from rankzero.messages import set_spelling
from running import run


@pytest.fixture
def run_command(monkeypatch, capsys, restore_signals):
    def type_line(*words):
        monkeypatch.setattr(sys, "argv", ["rankzero", *words])
        code = main()
        return code, capsys.readouterr()

    yield type_line
    set_spelling(None)


def test_the_help_lists_the_commands_and_the_version_is_printed(run_command):
    for words in ((), ("--help",), ("-h",)):
        code, printed = run_command(*words)
        assert code == 0 and all(f"  {name} " in printed.out for name in COMMANDS)
    assert run_command("--version") == (0, (rankzero.__version__ + "\n", ""))


@pytest.mark.parametrize("name", ["validate", "test", "check"])
def test_subcommands_of_the_scripts_are_commands_of_rankzero(run_command, monkeypatch, name):
    monkeypatch.setitem(SUBCOMMANDS, "check", ("evaluate", ("--split", "val")))
    code, printed = run_command(name, "--split", "none")
    assert code == 2 and "asked  --split none" in printed.err


def test_messages_name_the_command_as_typed_and_suggest_one_for_a_mistyped_command(run_command):
    code, printed = run_command("trian")
    assert code == 2 and "asked  rankzero trian" in printed.err and "type   rankzero" in printed.err
    code, printed = run_command("fit", "--devices", "none")
    assert code == 2 and "launch/" not in printed.err
    assert as_typed("srun python launch/fit.py --nodes 2") == "srun rankzero fit --nodes 2"
    assert as_typed("torchrun launch/evaluate.py") == "torchrun -m rankzero evaluate"


@pytest.mark.parametrize("start", [("rankzero",), ("python", "-m", "rankzero")], ids=["command", "module"])
def test_explain_works_in_any_folder(tmp_path, start):
    assert "launcher:" in run(*start, "explain", folder=tmp_path).out
