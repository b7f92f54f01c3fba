"""How commands start their work: exit codes, processes and signals, in separate processes without torch."""

import json
import os
import signal
import subprocess
import sys

import pytest

from rankzero.commands.start import resolve_subcommand, start
from recorded import TORCHRUN
from running import REPOSITORY, SOURCES, command_of, reserved_port, run

PROGRAM = f"""
import json, os, signal, sys, time
sys.path[:0] = [{str(REPOSITORY)!r}, {str(REPOSITORY / "project")!r}]
from rankzero.commands.fit import FIT
from rankzero.commands.start import start
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.messages import RequestError, Stopped

def raises(error):
    raise error

def stopped_by_signal():
    os.kill(os.getpid(), signal.SIGTERM)
    while not SIGNALS.received:
        time.sleep(0.01)
    return 6

WORK = {{
    "seven": lambda: 7,
    "refuses": lambda: raises(RequestError("--devices 9", "2 GPUs", "--devices 2")),
    "stopped": lambda: raises(Stopped("SIGTERM: stopped in a test")),
    "interrupted": lambda: raises(KeyboardInterrupt()),
    "fails": lambda: raises(KeyError("in the work")),
    "signal": stopped_by_signal,
}}

def work(flags, world):
    launch = world.launch
    members = len(world.peers)
    seen = {{"rank": launch.rank, "world": launch.world_size, "members": members, "epochs": flags.get("epochs")}}
    seen |= {{"torch": "torch" in sys.modules, "threads": os.environ.get("OMP_NUM_THREADS")}}
    seen |= {{"prints": flags.only_prints, "path": os.getcwd() in sys.path}}
    os.write(1, (json.dumps(seen) + "\\n").encode())
    return WORK[os.environ["WORK"]]()

if __name__ == "__main__":
    sys.exit(start(FIT._replace(stops_at_safe_point=os.environ["WORK"] == "signal"), work, sys.argv[1:]))
"""


@pytest.fixture
def start_program(cwd):
    """Returns a function that starts the program and returns its process."""
    (cwd / "code").mkdir()
    (cwd / "code" / "program.py").write_text(PROGRAM)

    def start_process(work, *arguments, **variables):
        environment = {**os.environ, "WORK": work, **variables}
        environment.pop("OMP_NUM_THREADS", None)
        command = [sys.executable, "code/program.py", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=cwd, env=environment, text=True, **pipes)

    return start_process


def wait_for(process):
    out, err = process.communicate()
    return process.returncode, [json.loads(line) for line in out.splitlines() if line.startswith("{")], err


@pytest.mark.parametrize(
    ("work", "code", "error"),
    [
        ("seven", 7, ""),
        ("refuses", 2, "rankzero: cannot start\n  asked  --devices 9\n  found  2 GPUs\n  type   --devices 2\n"),
        ("stopped", 75, "rankzero: SIGTERM: stopped in a test\n"),
        ("interrupted", 130, ""),
        ("fails", 1, "KeyError: 'in the work'\nrankzero: this process failed with the error above\n"),
        ("signal", 6, ""),
    ],
)
def test_the_outcome_of_the_work_determines_the_exit_code(start_program, work, code, error):
    exit_code, calls, err = wait_for(start_program(work, "--epochs", "3"))
    assert exit_code == code and (err.endswith(error) if code == 1 else err == error)
    (call,) = calls
    expected = {"rank": 0, "world": 1, "members": 1, "epochs": 3, "torch": False, "prints": False, "path": True}
    assert call.items() >= expected.items()


def test_the_work_runs_once_on_each_rank(start_program):
    code, calls, _ = wait_for(start_program("seven", "--devices", "3"))
    assert code == 7 and sorted(call["rank"] for call in calls) == [0, 1, 2]
    assert {(call["world"], call["members"]) for call in calls} == {(3, 3)}
    cores = len(os.sched_getaffinity(0)) // 3
    assert {call["threads"] for call in calls} <= {str(max(1, cores)), str(max(1, cores) + 1)}


def test_ranks_of_a_launcher_complete_the_rendezvous_before_the_work(start_program):
    with reserved_port() as port:
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        own = [{"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
        ranks = [start_program("seven", "--devices", "2", **variables | names) for names in own]
        results = [wait_for(process) for process in ranks]
    for rank, (code, (call,), _) in enumerate(results):
        assert (code, call["rank"], call["world"], call["members"]) == (7, rank, 2, 2)


ONE_NODE = TORCHRUN | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0"}
ONE_NODE |= {"MASTER_ADDR": "nowhere.invalid"}


def test_a_contradiction_or_a_configuration_is_printed_without_a_rendezvous(start_program):
    code, calls, err = wait_for(start_program("seven", "--devices", "3", "--start_timeout", "1", **ONE_NODE))
    assert (code, calls) == (2, [])
    assert "asked  --devices 3\n  found  torchrun started 1 node x 2 processes" in err
    ranks = [start_program("seven", "--print_config", **ONE_NODE | {"RANK": str(rank)}) for rank in range(2)]
    (first_code, first_calls, _), (second_code, second_calls, _) = map(wait_for, ranks)
    assert (first_code, len(first_calls), first_calls[0]["prints"]) == (7, 1, True)
    assert (second_code, second_calls) == (0, [])


def test_a_subcommand_resolves_to_its_command_and_the_remaining_arguments():
    expected = {"": ("fit", ""), "predict fit": ("predict", "fit"), "test": ("evaluate", "--split test")}
    expected |= dict.fromkeys(("--epochs 3", "fit --epochs 3"), ("fit", "--epochs 3"))
    expected |= {"validate --name x": ("evaluate", "--split val --name x")}
    expected |= {arguments: ("fit", arguments) for arguments in ("--name test", "evaluate")}
    for arguments, (name, rest) in expected.items():
        assert resolve_subcommand(command_of("fit"), arguments.split()) == (name, rest.split())


def test_a_subcommand_of_fit_starts_the_other_command(capsys):
    for subcommand, script in (("test", "evaluate"), ("predict", "predict")):
        with pytest.raises(SystemExit) as exit_info:
            start(command_of("fit"), pytest.fail, [subcommand, "--help"])
        assert exit_info.value.code == 0 and capsys.readouterr().out.startswith(f"python launch/{script}.py: ")


def test_a_wrong_request_or_explain_prints_one_message_and_does_not_start_the_work(capsys):
    for arguments, message in {
        "--devics 3": "type   --devices 3",
        "--devices 1000000": "cores on this machine",
        "--launcher slurm": "was not started by slurm",
    }.items():
        for explained in ([], ["--explain"]):
            assert start(command_of("evaluate"), pytest.fail, [*arguments.split(), *explained]) == 2
            printed = capsys.readouterr()
            assert printed.err.startswith("rankzero: cannot start\n  asked  ") and message in printed.err
            assert not printed.out or explained
    assert start(command_of("evaluate"), pytest.fail, ["--explain", "--devices", "1"]) == 0
    assert "would start: one process" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "code"),
    [
        *(("rankzero list", 130), ("-m rankzero fit", 130), (f"{REPOSITORY}/launch/fit.py", 130)),
        *((f"{REPOSITORY}/launch/evaluate.py --devices 2", 130), ("own.py", -signal.SIGINT)),
    ],
    ids=["rankzero", "module", "launch", "local processes", "a user's script"],
)
def test_ctrl_c_at_the_start_of_a_command_prints_no_traceback(tmp_path, command, code):
    """Interrupts the import of a package or, with two devices, the start of Python in the local processes."""
    starts_processes = "--devices" in command
    condition, file = ("'RANK' in os.environ", "sitecustomize") if starts_processes else ("True", "psutil")
    (tmp_path / f"{file}.py").write_text(f"import os, signal\nif {condition}:\n    os.kill(os.getpid(), signal.SIGINT)")
    (tmp_path / "rankzero").write_text("import sys\nfrom rankzero.__main__ import run\nsys.exit(run())")
    (tmp_path / "own.py").write_text("import rankzero")
    environment = {"PYTHONPATH": f"{tmp_path}:{SOURCES}"}
    result = run("python", *command.split(), folder=tmp_path, environment=environment, code=code)
    assert "KeyboardInterrupt" in result.err if code < 0 else result.err == ""
