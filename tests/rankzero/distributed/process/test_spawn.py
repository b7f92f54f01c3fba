import os
import socket
import subprocess
import sys

import pytest

from rankzero.distributed.environments.launchers import local
from rankzero.distributed.process import spawn
from rankzero.distributed.process.exit_reports import REPORT_FD, report_exit
from rankzero.distributed.process.spawn import run_processes
from rankzero.distributed.timers import TIMERS

REPORTING = "from rankzero.distributed.process.exit_reports import report_exit; report_exit()\n"
"""Code that a process runs before an intended exit."""
WRITE_VARIABLES = """
import os, pathlib
e = os.environ
pathlib.Path(e["RANK"]).write_text(f"{e['LOCAL_RANK']} {e['WORLD_SIZE']} {e['MASTER_ADDR']} {e['MASTER_PORT']}")
"""


def run(code, count=2):
    return run_processes([sys.executable, "-c", code], count)


STARTED_AGAIN = """
import os, pathlib, sys
import rankzero
from rankzero.distributed.process.exit_reports import report_exit
from rankzero.distributed.process.spawn import own_command, run_processes
os.chdir("job")
if "RANK" not in os.environ:
    sys.exit(run_processes(own_command(), 2))
pathlib.Path(os.environ["RANK"]).write_text(" ".join(sys.argv[1:]))
report_exit()
"""
HYDRA_JOB = """
import os, sys
from types import SimpleNamespace as Config
config = Config(runtime=Config(cwd=os.getcwd()), mode=Config(name="MULTIRUN"), sweep=Config(dir="sweep"))
hydra = Config(initialized=lambda: True, get=lambda: config)
sys.modules["hydra.core.hydra_config"] = Config(HydraConfig=hydra)
os.chdir("job")
"""


def test_every_process_receives_its_rank_world_size_and_rendezvous_address(cwd, monkeypatch):
    monkeypatch.setattr(spawn, "START_FOLDER", cwd)
    assert run(WRITE_VARIABLES + REPORTING, count=3) == 0
    texts = [(cwd / str(rank)).read_text().split() for rank in range(3)]
    assert [text[0] for text in texts] == ["0", "1", "2"] and {text[1] for text in texts} == {"3"}
    assert len({(text[2], text[3]) for text in texts}) == 1 and texts[0][2] == "127.0.0.1"


@pytest.mark.parametrize("program", [["train.py"], ["-m", "pkg.train"]], ids=("script", "module"))
def test_a_program_that_changes_its_folder_is_started_again_in_its_first_folder(cwd, program):
    (cwd / "job").mkdir()
    (cwd / "pkg").mkdir()
    for file in ("train.py", "pkg/train.py"):
        (cwd / file).write_text(STARTED_AGAIN)
    subprocess.run([sys.executable, *program, "a", "b c"], check=True)
    assert [(cwd / "job" / rank).read_text() for rank in "01"] == ["a b c"] * 2


def test_a_hydra_job_that_imports_rankzero_late_is_started_again_in_its_first_folder(cwd):
    (cwd / "job").mkdir()
    (cwd / "train.py").write_text(HYDRA_JOB + STARTED_AGAIN.replace('os.chdir("job")\n', ""))
    subprocess.run([sys.executable, "train.py", "a"], check=True)
    assert [(cwd / "job" / rank).read_text() for rank in "01"] == [f'a hydra.sweep.dir="{cwd}/sweep"'] * 2


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75])
def test_any_exit_code_without_a_report_is_a_failure(code, capfd):
    exits = f"import os; os._exit({code} if os.environ['RANK'] == '1' else 0)"
    assert run("import os\nif os.environ['RANK'] == '0':\n    " + REPORTING + exits) == 1
    failure = f"rankzero: rank 1 on {socket.gethostname()} exited with code {code} without an exit report"
    assert capfd.readouterr().err == f"{failure}; stopping the other processes\n"


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_a_reported_exit_code_is_kept(code, capfd):
    assert run(REPORTING + f"import os; os._exit({code})") == code
    assert capfd.readouterr().err == ""


def test_the_first_failure_sets_the_exit_code_and_ends_the_other_processes(monkeypatch):
    monkeypatch.setattr(TIMERS, "grace", 0.5)
    assert run(REPORTING + "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(3600)") == 3


@pytest.fixture
def report():
    """The variable that a process gets to report its exit, and a function that reads the report."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    with os.fdopen(write_end, "wb"), os.fdopen(read_end, "rb", buffering=0) as file:
        yield {REPORT_FD: str(write_end)}, lambda: file.read(1)


def set_parent(monkeypatch, parent, variables):
    """Sets variables as if the parent process with the given id had started this process."""
    for name, value in {local.SUPERVISOR_PID: str(parent), **variables}.items():
        monkeypatch.setenv(name, value)


def test_only_a_child_of_the_supervising_process_with_both_variables_reports_once(report, monkeypatch):
    variables, read = report
    for parent in (os.getpid(), 0, ""):
        set_parent(monkeypatch, parent, variables)
        report_exit()
        assert read() is None
    set_parent(monkeypatch, os.getppid(), {REPORT_FD: ""})
    report_exit()
    monkeypatch.delenv(REPORT_FD)
    report_exit()
    set_parent(monkeypatch, os.getppid(), variables)
    monkeypatch.delenv(local.SUPERVISOR_PID)
    report_exit()
    assert read() is None
    set_parent(monkeypatch, os.getppid(), variables)
    report_exit()
    assert [read(), read()] == [b".", None]


def test_a_child_of_a_local_process_reports_nothing(capfd):
    """The child may have opened another file under the same descriptor."""
    run_again = f"subprocess.run([sys.executable, '-c', {REPORTING!r}], close_fds=False, check=True)"
    assert run_processes([sys.executable, "-c", f"import subprocess, sys; {run_again}"], 1) == 1
    assert "exited with code 0 without an exit report" in capfd.readouterr().err
