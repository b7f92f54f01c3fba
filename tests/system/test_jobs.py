"""`submit` with a real Slurm of two nodes, Open MPI, MPICH and sshd, and with a stand-in for PBS."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from rankzero.checkpoints.manifest import checkpoints_in
from running import BIN, Result, processes_in, require, run, script, wait_until, write_program
from system.forks import summary
from system.pbs_server import pbs_server
from system.slurm import run_slurm_command
from system.ssh import ssh_servers
from system.test_exactly_once import CLASSES

PYTHON = str(BIN / "python")
FIT = ("--", *CLASSES, "--model.pause", "0.1", "--data.count", "160", "--global_batch_size", "16")
SHORT, LONG = (*FIT, "--epochs", "1"), (*FIT, "--epochs", "9", "--save_every", "5steps")
DEVICES = {"srun": "1", "ssh": "1", "openmpi": "1", "mpich": "1", "mpirun": "1"}
"""Form -> processes per machine, 2 for all others; the start of each process takes seconds of a core."""
MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Submitter:
    """Runs `submit` in a folder, on this machine or on one of the two hosts."""

    def __init__(self, folder: Path, environment: dict[str, str], prefix: tuple[str, ...] = ()) -> None:
        self.folder, self.environment, self.prefix = folder, environment, prefix

    def __call__(self, *arguments: str, code: int = 0) -> Result:
        command = (*self.prefix, PYTHON, script("submit"), *arguments)
        return run(*command, folder=self.folder, environment=self.environment, code=code)

    def job(self) -> str:
        return str(json.loads((self.folder / "runs/x.job.json").read_text())["id"])

    def wait_for_attempt(self, number: int) -> None:
        """Waits until an attempt has saved a checkpoint of its own."""

        def has_saved() -> bool:
            run_file, checkpoints = self.folder / "runs/x/run.json", self.folder / "runs/x/checkpoints"
            if not run_file.exists() or len(json.loads(run_file.read_text())["attempts"]) < number:
                return False
            begun = run_file.stat().st_mtime
            return any((path / "manifest.json").stat().st_mtime > begun for path in checkpoints_in(checkpoints))

        wait_until(has_saved, f"a checkpoint of attempt {number}")


def finishes(submit: Submitter, attempts: int) -> None:
    """Checks that the run has used each sample once in its last epoch, after this number of attempts."""
    written = summary(submit.folder)
    assert (written["status"], written["attempts"]) == ("finished", attempts)
    assert written["ledger"] and all("each once" in entry for entry in written["ledger"])


@pytest.mark.xdist_group("slurm")
@pytest.mark.parametrize("form", ["srun", "torchrun"])
def test_a_slurm_job_is_requeued_stopped_and_resumed(slurm, user_folder, form):
    submit = Submitter(user_folder, slurm)
    options = ("--form", form, "--nodes", "2", "--devices", DEVICES.get(form, "2"), "--name", "x")
    out = submit("--scheduler", "slurm", *options, *LONG).out
    assert f"submitted run x as job {submit.job()} (slurm, {form})" in out
    assert "launch/submit.py stop x" in out and "no GPU is requested" in out
    submit.wait_for_attempt(1)
    run_slurm_command("scancel", "--signal=USR1", submit.job(), environment=slurm)  # as --signal does before the limit
    submit.wait_for_attempt(2)
    assert "RUNNING on n[1-2]" in submit("status", "x").out
    assert "is RUNNING" in submit("--scheduler", "slurm", "--name", "x", *LONG, code=2).err
    submit("stop", "x")
    assert "run x: stopped" in submit("log", "x", "--follow", code=75).out
    assert "CANCELLED" in submit("status", "x").out
    out = submit("resume", "x", "--follow").out
    assert "resuming from step-" in out and "run x: finished" in out and "CANCELLED" not in out
    finishes(submit, attempts=3)


@pytest.mark.xdist_group("slurm")
def test_slurm_accepts_arrays_and_dependencies(slurm, user_folder):
    submit = Submitter(user_folder, slurm)
    submit("--scheduler", "slurm", "--name", "x", "--follow", *SHORT)
    dependency = ("--dependency", f"afterok:{submit.job()}", "--memory", "100M", "--cpus_per_device", "1")
    array = ("--name", "sweep", "--array", "0-1", "--time", "10min", "--mail", "user@localhost")
    out = submit("--scheduler", "slurm", *array, *dependency, "--follow", *SHORT, "--seed", "{array_index}").out
    assert "2 COMPLETED" in out and "run sweep-0: finished" in out and "run sweep-1: finished" in out
    configurations = [(user_folder / f"runs/sweep-{index}/config.yaml").read_text() for index in (0, 1)]
    assert ["seed_everything: 0\n" in configurations[0], "seed_everything: 1\n" in configurations[1]] == [True, True]


@pytest.fixture
def submit_on_hosts(hosts, user_folder, tmp_path_factory):
    """Returns a Submitter on the first of two hosts with sshd."""
    require("ssh")
    with ssh_servers(hosts, tmp_path_factory.mktemp("ssh") / "ssh") as path:
        environment = {**MPI_AS_ROOT, "PATH": path}
        yield Submitter(user_folder, environment, ("env", f"PATH={path}", *hosts.command_on("rz1")))


FORMS = {
    "ssh": ("--scheduler", "ssh", "--hosts", "rz1,rz2", "--setup", "[ ${#RANKZERO_KEY} -eq 64 ] || exit 3"),
    "openmpi": ("--scheduler", "mpirun", "--form", "openmpi", "--hosts", "rz1,rz2"),
    "mpich": ("--scheduler", "mpirun", "--form", "mpich", "--hostfile", "hosts.txt"),
    "local": ("--scheduler", "local"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_job_without_a_queue_is_stopped_and_resumed(submit_on_hosts, user_folder, form):
    if form in ("openmpi", "mpich"):
        require(form)
    (user_folder / "hosts.txt").write_text("rz1\nrz2\n")
    submit = submit_on_hosts
    submit(*FORMS[form], "--devices", DEVICES.get(form, "2"), "--name", "x", *LONG)
    submit.wait_for_attempt(1)
    assert "RUNNING as process" in submit("status", "x").out
    submit("stop", "x")
    assert "run x: stopped" in submit("log", "x", "--follow", code=75).out
    assert "ENDED" in submit("status", "x").out
    out = submit("resume", "x", "--follow").out
    assert "resuming from step-" in out and "run x: finished" in out and "\033" not in out
    finishes(submit, attempts=2)
    assert summary(user_folder)["nodes"] == (1 if form == "local" else 2)


LSF = {
    "bsub": "cat >job; PATH=$LSF_BINDIR:$PATH\n(until bash job; [ $? -ne 75 ]; do :; done) >>x.job.log 2>&1 &\n"
    'echo $! >pid; echo "Job <7> is submitted"',
    "bjobs": 'if [ "$3" = time_left ]; then cat "$0.left"; echo - >"$0.left"; exit; fi\n'
    "kill -0 $(cat runs/pid) 2>/dev/null && echo 'RUN|rz1:rz2|-' || echo 'DONE|rz1:rz2|-'",
    "blaunch": 'host=$1; shift; exec ssh -o BatchMode=yes "$host" "PATH=$PATH; $*"',
}
"""Stand-ins for LSF's programs: the job runs on this machine, and again after exit code 75."""


def test_a_job_of_lsf_stops_before_its_limit_and_resumes_on_two_hosts(submit_on_hosts, user_folder):
    require("openmpi")
    (user_folder / "hosts.txt").write_text("rz1\nrz2\n")
    (user_folder / "bin").mkdir()
    for name, line in LSF.items():
        write_program(user_folder / "bin" / name, line)
    (user_folder / "bin" / "bjobs.left").write_text("0:00:25 L\n")
    variables = {"LSB_JOBID": "7", "LSF_BINDIR": f"{user_folder}/bin", "LSB_DJOB_HOSTFILE": f"{user_folder}/hosts.txt"}
    environment = submit_on_hosts.environment | variables
    submit = Submitter(user_folder, environment, submit_on_hosts.prefix)
    out = submit("--scheduler", "lsf", "--nodes", "2", "--name", "x", "--follow", *FIT, "--epochs", "20").out
    assert "the time limit: stopping after this step" in out and "resuming from step-" in out
    assert "DONE" in out and "run x: finished" in out
    finishes(submit, attempts=2)


def test_ssh_ends_all_hosts_if_one_fails(submit_on_hosts, hosts, user_folder):
    """On the second host, Python exits with 3."""
    (user_folder / "bin").mkdir()
    write_program(user_folder / "bin/python", f'[ "$(hostname)" = rz1 ] && exec {PYTHON} "$@"\nexit 3')
    options = ("--hosts", "rz1,rz2", "--venv", ".", "--name", "x", "--follow")
    submit_on_hosts("--scheduler", "ssh", *options, *SHORT, code=1)
    # Without the second host, the first one would wait for 300 s, longer than the limit of the command.
    assert not processes_in(user_folder)


@pytest.fixture
def submit_to_pbs(hosts, user_folder, tmp_path_factory):
    """Returns a Submitter for the PBS replacement, whose programs are not on PATH."""
    with pbs_server(hosts, tmp_path_factory.mktemp("pbs") / "server"):
        yield Submitter(user_folder, {})


@pytest.mark.xdist_group("pbs")
@pytest.mark.parametrize("form", ["pbsdsh", "torchrun", "mpirun"])
def test_a_stopped_pbs_job_submits_itself_again_unless_it_was_deleted(submit_to_pbs, user_folder, form):
    submit = submit_to_pbs
    options = ("--form", form, "--nodes", "2", "--devices", DEVICES.get(form, "2"), "--time", "2h", "--name", "x")
    submit("--scheduler", "pbs", *options, *FIT, "--epochs", "99", "--save_every", "5steps")
    first_job = submit.job()
    submit.wait_for_attempt(1)
    rank_zero = json.loads((user_folder / "runs/.x.lock").read_text())["pid"]
    os.kill(rank_zero, signal.SIGUSR1)  # stops the run as its time limit does, at a moment of this test's choice
    submit.wait_for_attempt(2)
    status = submit("status", "x").out
    assert "RUNNING on rz1, rz2" in status and f"job {first_job} " not in status
    assert (user_folder / f"runs/x.job.log.{first_job}").exists()
    submit("stop", "x")
    out = submit("log", "x", "--follow", code=75).out
    table = out.rpartition("pbsdsh: killing task")[2]
    assert "run x: stopped" in table and "│ to resume " in table
    assert "FINISHED" in submit("status", "x").out
    written = summary(user_folder)
    assert (written["status"], written["attempts"], written["nodes"]) == ("stopped", 2, 2)
    time.sleep(2)
    assert "FINISHED" in submit("status", "x").out  # no job was submitted after qdel


@pytest.mark.xdist_group("pbs")
def test_a_pbs_job_finishes_with_the_options_of_a_site(submit_to_pbs, user_folder):
    (user_folder / "site.yaml").write_text("scheduler: pbs\nsetup: ['export FROM_SETUP=1']\ncpus_per_device: 1\n")
    submit = submit_to_pbs
    out = submit("--site", "site.yaml", "--name", "x", "--follow", *SHORT).out
    assert "run x: finished" in out and "1 node x 1 process" in out
    assert "the time limit of job" not in out  # qstat was found
    finishes(submit, attempts=1)
