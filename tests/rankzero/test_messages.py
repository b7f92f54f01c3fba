import contextlib
import io
import os
import pickle
import re
import socket
import subprocess
import sys

import pytest
import torch

import rankzero
from data_modules import in_memory
from data_modules.in_memory import at_least
from rankzero import messages
from rankzero.__main__ import COMMANDS, as_typed, main
from rankzero.cli.command import SUBCOMMANDS
from rankzero.messages import RequestError, is_peer_failure, print_line, set_spelling, user_message
from running import run


def test_only_errors_of_included_modules_become_user_messages_in_this_process_or_in_a_loader_process():
    with pytest.raises(ValueError, match="must be") as error:
        at_least(1, "batch_size", 0)
    assert user_message(error.value) == "--data.batch_size is 0; it must be 1 or more"
    with pytest.raises(ValueError, match="invalid literal") as error:
        int("x")
    assert user_message(error.value) is None
    text = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        f'  File "{in_memory.__file__}", line 3, in read\n    raise ValueError(text)\nValueError: corrupt: a.png\n'
    )
    assert user_message(ValueError(text)) == "corrupt: a.png"
    assert user_message(ValueError(text.replace(in_memory.__file__, "/somewhere/else.py"))) is None


def test_a_request_error_keeps_its_message_when_pickled():
    error = RequestError("--devices 3", "2 GPUs", "--devices 2")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_ipython_prints_a_refusal_without_a_traceback():
    assert RequestError("--devices 2", "a notebook", "--devices 1")._render_traceback_() == [
        "rankzero: cannot start\n  asked  --devices 2\n  found  a notebook\n  type   --devices 1"
    ]


def test_the_message_about_unused_parameters_names_the_rankzero_flag():
    torch_error = RuntimeError("... by setting the string value `strategy='ddp_find_unused_parameters_true'` or ...")
    assert "--trainer.strategy ddp_find_unused_parameters_true" in user_message(torch_error)


NCCL_2_30 = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
OF_NCCL = [
    "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL version 2.30.7\n"
    f"{NCCL_2_30}\nLast error:\nsocketProgress: Connection closed by remote peer n2<41234>",
    "NCCL error in: NCCLUtils.cpp:77, unhandled system error, NCCL version 2.30.7\nLast error:\n"
    "ncclOsSocketConnect: connect to 10.0.0.2<41234> returned No route to host, exceeded error retry count after 35 "
    "attempts",
    "NCCL communicator was aborted on rank 1. ",
    "NCCL operation timed out",
    "NCCL operation failed",
    "[PG ID 0 PG GUID 0(default_pg) Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, "
    "OpType=ALLREDUCE, NumelIn=421642, NumelOut=421642, Timeout(ms)=1800000) ran for 1800012 milliseconds before "
    "timing out.",
    "NCCL Async Error: remote process exited or there was a network error\nNCCL Last Error: ",
]
"""Constructed from the texts in torch 2.15.0 and NCCL 2.30.7."""


def test_errors_of_nccl_about_another_rank_count_as_its_failure_and_those_about_this_host_do_not():
    assert [text for text in OF_NCCL if not is_peer_failure(RuntimeError(text))] == []
    own = "NCCL error in: NCCLUtils.cpp:77, unhandled system error, NCCL version 2.30.7\nLast error:\n"
    own += (
        "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888), error: No space left on device (28)"
    )
    assert not is_peer_failure(RuntimeError(own))
    for own in ("connect to the database failed", "tracking server: Connection refused"):
        assert not is_peer_failure(RuntimeError(own))
    assert is_peer_failure(torch.distributed.DistNetworkError("recvValue failed: Connection reset by peer"))


PRINTING = """
from rankzero.messages import flush_streams, print_error, print_line
print("held back")
for _ in range(3):
    print_line("how it goes")
    print_error("what goes wrong")
flush_streams()
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_each_line_is_a_single_write(unbuffered):
    """Ranks share a pipe, so a newline in a separate write could follow the line of another rank."""
    receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # preserves the boundaries of writes
    code = "from rankzero.messages import print_error, print_line; print_line('a line'); print_error('an error')"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with receiver, sender:
        subprocess.run([sys.executable, "-c", code], stdout=sender, stderr=sender, env=environment, check=True)
        receiver.setblocking(False)
        writes = []
        with contextlib.suppress(BlockingIOError):
            while True:
                writes.append(receiver.recv(100))
    writes = [written for written in writes if written]  # print also writes its empty `end`
    assert writes == [b"a line\n", b"rankzero: an error\n"]


def test_an_error_erases_the_line_of_a_terminal_on_which_a_bar_is_drawn():
    own_end, end = os.openpty()
    code = "from rankzero.messages import print_error; print_error('a', prefix='Traceback\\n')"
    subprocess.run([sys.executable, "-c", code], stderr=end, check=True)
    assert os.read(own_end, 1000) == b"\r\x1b[2KTraceback\r\nrankzero: a\r\n"
    os.close(own_end)
    os.close(end)


@pytest.mark.parametrize(
    "command",
    [
        "{{ sleep 0.2; {printing} 2>&1; echo $? >&3; }} 3>&2 | true",
        "{printing} >/dev/full 2>&1; echo $? >&2",
        "{printing} >&- 2>&-; echo $? >&2",
    ],
    ids=["a pipe without a reader", "a full disk", "closed"],
)
def test_unwritable_output_does_not_change_the_exit_code(command):
    line = command.format(printing=f"'{sys.executable}' -c '{PRINTING}'")
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    process = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, env=environment)
    assert process.stderr.split() == ["0"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_characters_that_stdout_cannot_encode_are_replaced_and_no_line_is_lost(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    print_line("größe 漢 │ 1")
    stream.seek(0)
    assert re.fullmatch(r"gr.{1,2}e \? \? 1\n", stream.read())


def test_notices_are_printed_unless_quiet(capsys):
    try:
        for quiet in (False, True):
            messages.set_quiet(quiet)
            assert messages.is_quiet() is quiet
            messages.print_notice(f"quiet {quiet}")
            print_line("result")
    finally:
        messages.set_quiet(False)
    assert capsys.readouterr().out == "rankzero: quiet False\nresult\nresult\n"


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
    assert "type   rankzero fit" in run_command("train")[1].err
    code, printed = run_command("fit", "--devices", "none")
    assert code == 2 and "launch/" not in printed.err
    assert as_typed("srun python launch/fit.py --nodes 2") == "srun rankzero fit --nodes 2"
    assert as_typed("torchrun launch/evaluate.py") == "torchrun -m rankzero evaluate"
    assert as_typed('pbsdsh -- p "$PWD/launch/fit.py"') == "pbsdsh -- p -m rankzero fit"


@pytest.mark.parametrize("start", [("rankzero",), ("python", "-m", "rankzero")], ids=["command", "module"])
def test_explain_works_in_any_folder(tmp_path, start):
    assert "launcher:" in run(*start, "explain", folder=tmp_path).out
