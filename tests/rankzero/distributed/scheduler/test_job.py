"""What programs print is as recorded: squeue of Slurm 22.05, `qstat -f` of OpenPBS (no PBS can be installed here)."""

import time

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler import job as allocation
from rankzero.distributed.scheduler import query as answer
from rankzero.distributed.scheduler.job import end_of_allocation, job_around
from recorded import PBS_SCRIPT, PBS_TASK, SBATCH, STEP, TORCHRUN
from system.qstat import qstat

STARTED = "Fri Nov 20 14:48:00 2026"
STARTED_SECONDS = 1795186080
ALONE, SLURM, PBS = Launch(), Launch(launcher="slurm"), Launch(launcher="pbs")


@pytest.fixture
def now(monkeypatch):
    """The time is a minute after the jobs started."""
    monkeypatch.setattr(time, "time", lambda: STARTED_SECONDS + 60.0)
    return STARTED_SECONDS + 60.0


def test_outside_of_a_job_there_is_no_end(programs):
    assert end_of_allocation(ALONE, {}) is None
    assert end_of_allocation(ALONE, TORCHRUN) is None


@pytest.mark.parametrize(
    ("left", "seconds"), [("0:33", 33), ("4:59", 299), ("1:00:00", 3600), ("23:59:59", 86399), ("6-23:59:58", 604798)]
)
def test_slurm_says_what_is_left(programs, now, left, seconds):
    programs(squeue=f'[ "$*" = "--noheader --jobs=12 --format=%L" ] && echo "{left}"')
    assert end_of_allocation(SLURM, STEP) == now + seconds


@pytest.mark.parametrize("left", ["UNLIMITED", "INVALID", "NOT_SET", "N/A", "", "0:00", "?", "12"])
def test_slurm_says_no_time(programs, left):
    programs(squeue=f'echo "{left}"')
    assert end_of_allocation(SLURM, STEP) is None


def test_a_slurm_that_says_its_end_by_a_variable_is_not_asked(programs, now):
    programs(squeue="echo 9:00")
    assert end_of_allocation(SLURM, STEP | {"SLURM_JOB_END_TIME": str(STARTED_SECONDS + 3600)}) == now + 3540


def test_what_a_person_has_set_for_squeue_does_not_count(programs, now, monkeypatch):
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    programs(squeue='[ -z "$SQUEUE_STATES" ] && echo 0:33')
    assert end_of_allocation(SLURM, STEP) == now + 33


@pytest.mark.parametrize("told", ["1", "0", str(STARTED_SECONDS)])
def test_an_end_in_the_past_is_none(programs, now, told):
    assert end_of_allocation(SLURM, STEP | {"SLURM_JOB_END_TIME": told}) is None


@pytest.mark.parametrize("told", ["soon", "-1", "1.5e9", "٣"])
def test_a_variable_that_is_no_time_is_left_aside(programs, now, told):
    programs(squeue="echo 0:33")
    assert end_of_allocation(SLURM, STEP | {"SLURM_JOB_END_TIME": told}) == now + 33


@pytest.mark.parametrize(
    "squeue",
    [
        "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
        "printf '\\377\\376'",
        "exec sleep 60",
        None,
    ],
    ids=["an error", "noise", "no answer", "no squeue"],
)
def test_a_scheduler_that_does_not_answer_says_no_end(programs, monkeypatch, squeue):
    monkeypatch.setattr(answer, "PATIENCE_SECONDS", 0.2)
    programs(**({"squeue": squeue} if squeue else {}))
    assert end_of_allocation(SLURM, STEP) is None


def test_pbs_tells_start_and_walltime(programs, now):
    programs(qstat=qstat("0.pbs1", stime=STARTED, walltime="01:00:00"))
    assert end_of_allocation(PBS, PBS_TASK) == STARTED_SECONDS + 3600


def test_the_time_zone_of_the_machine_does_not_count(programs, now, monkeypatch):
    """qstat prints the start in the zone that it is told, as this program does."""
    monkeypatch.setenv("TZ", "America/New_York")
    start = f'$(date -d @{STARTED_SECONDS} "+%a %b %e %T %Y")'
    programs(qstat=qstat("0.pbs1", stime=start, walltime="01:00:00"))
    assert end_of_allocation(PBS, PBS_TASK) == STARTED_SECONDS + 3600


def test_a_start_that_is_missing_once_is_asked_for_again(programs, now, tmp_path, monkeypatch):
    monkeypatch.setattr(allocation, "MOMENT_SECONDS", 0.0)
    first = qstat("0.pbs1", stime=None, walltime="100:00:00")
    later = qstat("0.pbs1", stime=STARTED, walltime="100:00:00")
    asked = tmp_path / "asked"
    programs(qstat=f"if [ -e {asked} ]; then\n{later}\nelse\n{first}\ntouch {asked}\nfi")
    assert end_of_allocation(PBS, PBS_TASK) == STARTED_SECONDS + 360000


@pytest.mark.parametrize(
    "said",
    [
        qstat("0.pbs1", stime=None, walltime="01:00:00"),
        qstat("0.pbs1", stime=STARTED, walltime=None),
        qstat("0.pbs1", stime="once upon a time", walltime="01:00:00"),
        "echo 'qstat: Unknown Job Id 0.pbs1' >&2; exit 153",
    ],
    ids=["no start", "no limit", "no time", "no job"],
)
def test_pbs_says_no_end(programs, monkeypatch, said):
    monkeypatch.setattr(allocation, "MOMENT_SECONDS", 0.0)
    programs(qstat=said)
    assert end_of_allocation(PBS, PBS_TASK) is None


def test_a_member_of_a_pbs_array_asks_for_itself(programs, now):
    programs(qstat=qstat("15[3].pbs1", stime=STARTED, walltime="00:20:00"))
    assert end_of_allocation(PBS, PBS_TASK | {"PBS_JOBID": "15[3].pbs1"}) == STARTED_SECONDS + 1200


@pytest.mark.parametrize(
    ("launcher", "variables", "scheduler", "name"),
    [
        ("torchrun", TORCHRUN | SBATCH, "slurm", "12"),
        ("mpi", PBS_SCRIPT, "pbs", "0.pbs1"),
        ("local", SBATCH, "slurm", "12"),
        ("slurm", STEP | {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "2"}, "slurm", "10_2"),
        ("pbs", SBATCH | PBS_TASK, "pbs", "0.pbs1"),
        ("slurm", STEP | PBS_SCRIPT, "slurm", "12"),
    ],
)
def test_the_job_counts_whatever_launcher_is_within_it(launcher, variables, scheduler, name):
    job = job_around(Launch(launcher=launcher), variables)
    assert job is not None and (job.scheduler, job.name) == (scheduler, name)
