"""The output of squeue (Slurm 22.05), `qstat -f` (OpenPBS) and `flux job timeleft` (Flux 0.80) is recorded.

No PBS and no LSF can be installed here; the output of bjobs follows LSF's documentation.
"""

import time

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler.job import current_job, end_of_allocation
from rankzero.distributed.timers import TIMERS
from recorded import FLUX, JSRUN, PBS_SCRIPT, PBS_TASK, SBATCH, STEP, TORCHRUN
from system.qstat import qstat

STARTED = "Fri Nov 20 14:48:00 2026"
STARTED_SECONDS = 1795186080
NO_LAUNCHER, SLURM, PBS = Launch(), Launch(launcher="slurm"), Launch(launcher="pbs")


@pytest.fixture
def now(monkeypatch):
    """Sets the clock to one minute after the jobs' start; returns that time in seconds since 1970."""
    monkeypatch.setattr(time, "time", lambda: STARTED_SECONDS + 60.0)
    return STARTED_SECONDS + 60.0


@pytest.mark.parametrize(
    ("remaining", "seconds"),
    [("0:33", 33), ("4:59", 299), ("1:00:00", 3600), ("23:59:59", 86399), ("6-23:59:58", 604798)],
)
def test_the_end_of_a_slurm_job_follows_from_squeues_remaining_time(programs, now, remaining, seconds):
    programs(squeue=f'[ "$*" = "--noheader --jobs=12 --format=%L" ] && echo "{remaining}"')
    assert end_of_allocation(SLURM, STEP) == now + seconds


def test_slurms_end_time_variable_takes_precedence_over_squeue_if_it_is_valid(programs, now):
    for end_time, seconds in (
        (str(STARTED_SECONDS + 3600), 3540),
        *((past, None) for past in ("1", "0", str(STARTED_SECONDS))),
        *((invalid, 33) for invalid in ("soon", "-1", "1.5e9", "٣")),
    ):
        programs(squeue="echo 0:33")
        assert end_of_allocation(SLURM, STEP | {"SLURM_JOB_END_TIME": end_time}) == (seconds and now + seconds)


@pytest.mark.parametrize(
    "scripts",
    [
        *({"squeue": f"echo {text}"} for text in ("UNLIMITED", "INVALID", "NOT_SET", "N/A", "", "0:00", "'?'", "12")),
        {"squeue": "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"},
        {"squeue": "printf '\\377\\376'"},
        {"squeue": "exec sleep 60"},
        {},
        {"qstat": qstat("0.pbs1", stime=None, walltime="01:00:00")},
        {"qstat": qstat("0.pbs1", stime=STARTED, walltime=None)},
        {"qstat": qstat("0.pbs1", stime="once upon a time", walltime="01:00:00")},
        {"qstat": "echo 'qstat: Unknown Job Id 0.pbs1' >&2; exit 153"},
    ],
    ids=lambda scripts: str(scripts)[:50],
)
def test_the_end_is_unknown_without_a_valid_answer_of_the_scheduler(programs, monkeypatch, scripts):
    if "sleep" in scripts.get("squeue", ""):
        monkeypatch.setattr(TIMERS, "scheduler", 0.2)
    monkeypatch.setattr(TIMERS, "scheduler_pause", 0.0)
    programs(**scripts)
    assert end_of_allocation(SLURM, STEP) is end_of_allocation(PBS, PBS_TASK) is None


@pytest.mark.parametrize(
    ("launch", "variables", "message"),
    [
        (PBS, PBS_TASK, "the time limit of job 0.pbs1 is unknown (qstat: qstat: Unknown Job Id); set --time_limit"),
        (SLURM, STEP, "the time limit of job 12 is unknown (squeue: connect failure); set --time_limit"),
    ],
)
def test_a_scheduler_that_does_not_answer_is_reported_once(programs, monkeypatch, launch, variables, message):
    monkeypatch.setattr(TIMERS, "scheduler_pause", 0.0)
    programs(qstat="echo 'qstat: Unknown Job Id' >&2; exit 153", squeue="printf 'error\nconnect failure' >&2; exit 1")
    warnings = []
    assert end_of_allocation(launch, variables, warnings.append) is None
    assert len(warnings) == 1 and warnings[0].startswith(message)


def test_neither_a_process_outside_a_job_nor_a_job_without_a_time_limit_has_an_end_or_a_warning(programs):
    assert end_of_allocation(NO_LAUNCHER, {}) is end_of_allocation(NO_LAUNCHER, TORCHRUN) is None
    programs(qstat=qstat("0.pbs1", stime=STARTED, walltime=None), squeue="echo UNLIMITED")
    warnings = []
    assert end_of_allocation(PBS, PBS_TASK, warnings.append) is end_of_allocation(SLURM, STEP, warnings.append) is None
    assert warnings == []


@pytest.mark.parametrize(
    ("start", "walltime", "job", "seconds"),
    [
        (STARTED, "01:00:00", "0.pbs1", 3600),
        (f'$(date -d @{STARTED_SECONDS} "+%a %b %e %T %Y")', "01:00:00", "0.pbs1", 3600),
        (STARTED, "00:20:00", "15[3].pbs1", 1200),
    ],
    ids=["one hour", "in the time zone of qstat", "a member of an array"],
)
def test_the_end_of_a_pbs_job_is_its_start_plus_its_walltime(programs, now, monkeypatch, start, walltime, job, seconds):
    monkeypatch.setenv("TZ", "America/New_York")  # qstat prints the start in the time zone of this variable
    programs(qstat=qstat(job, stime=start, walltime=walltime))
    assert end_of_allocation(PBS, PBS_TASK | {"PBS_JOBID": job}) == STARTED_SECONDS + seconds


def test_qstat_is_called_again_if_the_start_is_missing_once(programs, now, tmp_path, monkeypatch):
    monkeypatch.setattr(TIMERS, "scheduler_pause", 0.0)
    first = qstat("0.pbs1", stime=None, walltime="100:00:00")
    later = qstat("0.pbs1", stime=STARTED, walltime="100:00:00")
    called = tmp_path / "called"
    programs(qstat=f"if [ -e {called} ]; then\n{later}\nelse\n{first}\ntouch {called}\nfi")
    assert end_of_allocation(PBS, PBS_TASK) == STARTED_SECONDS + 360000


LSF, FLUX_TASK = Launch(launcher="mpi"), Launch(launcher="flux")


@pytest.mark.parametrize(
    ("left", "seconds"),
    [("1:59 L", 7080), ("0:02 L", 60), ("01:59:30 L", 7170), ("100:00 L", 359940), ("0:00 L", None), ("1:59 E", None)],
)
def test_the_end_of_an_lsf_job_follows_from_the_time_left_until_its_limit(programs, now, left, seconds):
    programs(bjobs=f"""[ "$*" = "-noheader -o time_left 7[2]" ] && echo '{left}'""")
    assert end_of_allocation(LSF, JSRUN | {"LSB_JOBINDEX": "2"}) == (seconds and now + seconds)


def test_the_end_of_a_flux_job_follows_from_the_seconds_left(programs, now):
    programs(flux='[ "$*" = "job timeleft" ] && echo 118')
    for variables in (FLUX, {"FLUX_ENCLOSING_ID": "f1"}):  # of a task, and of the script of `flux batch`
        assert end_of_allocation(FLUX_TASK, variables) == now + 118


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        *(("echo soon", "'soon'"), ("echo 1:59 X", "'1:59 X'"), ("echo -1", "'-1'")),
        ("echo 'LSF is down' >&2; exit 255", "LSF is down"),
        *((script, None) for script in ("true", "echo -", "echo 4294967295")),
    ],
)
def test_an_answer_of_lsf_or_flux_in_another_form_is_ignored_with_a_line(programs, script, reason):
    programs(bjobs=script, flux=script)
    warnings = []
    for launch, variables, no_limit in ((LSF, JSRUN, "echo -"), (FLUX_TASK, FLUX, "echo 4294967295")):
        assert end_of_allocation(launch, variables, warnings.append) is None
        if reason is None:
            assert warnings == [] or script not in ("true", no_limit)
            warnings.clear()
    assert all(reason in warning and "set --time_limit" in warning for warning in warnings)
    assert len(warnings) == (2 if reason else 0)


@pytest.mark.parametrize(
    ("launcher", "variables", "scheduler", "job_id"),
    [
        *[("torchrun", TORCHRUN | SBATCH, "slurm", "12"), ("local", SBATCH, "slurm", "12")],
        *[("mpi", PBS_SCRIPT, "pbs", "0.pbs1"), ("pbs", SBATCH | PBS_TASK, "pbs", "0.pbs1")],
        ("slurm", STEP | {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "2"}, "slurm", "10_2"),
        ("slurm", STEP | PBS_SCRIPT, "slurm", "12"),
        *[("mpi", JSRUN, "lsf", "7"), ("mpi", JSRUN | {"LSB_JOBINDEX": "0"}, "lsf", "7")],
        *[("mpi", JSRUN | {"LSB_JOBINDEX": "3"}, "lsf", "7[3]"), ("flux", FLUX, "flux", "ƒAbc")],
        *[("flux", FLUX | SBATCH, "slurm", "12"), ("slurm", FLUX | STEP, "slurm", "12")],
    ],
)
def test_the_job_is_found_under_any_launcher(launcher, variables, scheduler, job_id):
    found = current_job(Launch(launcher=launcher), variables)
    assert found is not None and (found.scheduler, found.id) == (scheduler, job_id)
