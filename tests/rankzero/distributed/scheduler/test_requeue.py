"""The output of scontrol is recorded with Slurm 22.05, for job states that a test cannot maintain on a real Slurm.

tests/system/test_slurm_stops.py tests the other states. qrerun is a replacement.
"""

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler.requeue import requeue
from rankzero.distributed.timers import TIMERS
from recorded import FLUX, JSRUN, PBS_TASK, SBATCH, STEP, TORCHRUN
from system.qstat import qstat

JOB_RECORD = (
    "JobId=12 JobName=job.sh UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901755 Nice=0 Account=(null)"
    " QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag={batch}"
    " Reboot=0 ExitCode=0:15 RunTime=00:00:30 TimeLimit=00:01:00 TimeMin=N/A SubmitTime=2026-11-20T14:52:40"
    " EligibleTime=2026-11-20T14:52:40 AccrueTime=2026-11-20T14:52:40 StartTime=2026-11-20T14:52:42"
    " EndTime=2026-11-20T14:53:42 {preempt}Deadline=N/A SuspendTime=None SecsPreSuspend=0 Partition=main"
    " AllocNode:Sid=localhost:27027 NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=2 NumTasks=2 OverSubscribe=OK"
    " Command=/home/tester/job.sh WorkDir=/home/tester StdErr=/home/tester/12.out StdIn=/dev/null Power="
)
SLURM, PBS = Launch(launcher="slurm"), Launch(launcher="pbs")
REQUEUED = "job 12 is requeued; Slurm's line 'CANCELLED ... DUE TO JOB REQUEUE' is expected"
REQUEUED_BY_SLURM = [(state, 1) for state in ("COMPLETING", "PENDING", "RUNNING")]
"""Slurm requeues after preemption, a node failure or a user's command; tasks on a lost node see RUNNING."""


@pytest.fixture
def scontrol(programs, tmp_path):
    """Returns a function that installs a scontrol, which shows the job in a given state.

    The function returns the path of the file to which scontrol writes its requeue commands.
    """
    requests = tmp_path / "requests"

    def add(state="RUNNING", reason="None", restarts=0, preempt="", batch=1, requeue="exit 0"):
        fields = {"state": state, "reason": reason, "restarts": restarts, "preempt": preempt, "batch": batch}
        job_record = JOB_RECORD.format(**fields)
        programs(
            scontrol=f'if [ "$1" = show ]; then\n[ "$*" = "show job 12 --oneliner" ] && echo "{job_record}"\nexit\nfi\n'
            f"echo $* >> {requests}\n{requeue}"
        )
        return requests

    return add


def test_nothing_is_requeued_outside_a_job_or_in_an_interactive_one(scontrol):
    requests = scontrol(batch=0)
    torchrun, interactive = Launch(launcher="torchrun"), PBS_TASK | {"PBS_ENVIRONMENT": "PBS_INTERACTIVE"}
    others = ((Launch(launcher="mpi"), JSRUN), (Launch(launcher="flux"), FLUX))  # requeued by exit code or script
    for launch, variables in ((Launch(), {}), (torchrun, TORCHRUN), (PBS, interactive), (SLURM, STEP), *others):
        assert requeue(launch, environ=variables) == ""
    assert not requests.exists()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"preempt": "PreemptEligibleTime=2026-11-20T14:52:42 PreemptTime=2026-11-20T14:54:58 "},
        {"state": "COMPLETING", "reason": "TimeLimit"},
        {"state": "TIMEOUT", "reason": "TimeLimit"},
    ],
    ids=["running", "preempted, in its grace", "past its limit, in KillWait", "past its limit"],
)
def test_slurm_requeues_running_preempted_and_timed_out_jobs(scontrol, fields):
    requests = scontrol(**fields)
    assert requeue(SLURM, environ=STEP) == REQUEUED
    assert requests.read_text() == "requeue 12\n"


@pytest.mark.parametrize(
    ("state", "restarts"), [*((state, 0) for state in ("CANCELLED", "COMPLETING", "PENDING")), *REQUEUED_BY_SLURM]
)
def test_a_job_that_is_canceled_or_that_slurm_has_requeued_itself_is_not_requeued(scontrol, state, restarts):
    requests = scontrol(state, restarts=restarts)
    message = requeue(SLURM, environ=STEP)
    assert ("Slurm has already requeued job 12" if restarts else "it was probably canceled") in message
    assert not requests.exists()


def test_a_later_attempt_and_a_batch_job_under_torchrun_are_requeued(scontrol):
    scontrol(restarts=2)
    assert requeue(SLURM, environ=STEP | {"SLURM_RESTART_COUNT": "2"}) == REQUEUED
    scontrol()
    assert requeue(Launch(launcher="torchrun"), environ=TORCHRUN | SBATCH) == REQUEUED


def test_a_refusal_states_the_command_to_type_and_a_missing_or_silent_scontrol_is_one(scontrol, programs, monkeypatch):
    assert requeue(SLURM, environ=STEP).startswith("not requeued\n")
    scontrol(requeue="echo 'Requested operation is presently disabled for job 12' >&2; exit 1")
    assert requeue(SLURM, "my-run", STEP).splitlines() == [
        "not requeued",
        "  asked  to requeue job 12, whose run was stopped before its end",
        "  found  scontrol requeue 12: Requested operation is presently disabled for job 12",
        "  type   sbatch /home/tester/job.sh",
        "         The run resumes from its last checkpoint if the job's command has --name my-run.",
    ]
    monkeypatch.setattr(TIMERS, "scheduler", 0.2)
    programs(scontrol="exec sleep 60")
    assert "no answer within 0.2 s" in requeue(SLURM, environ=STEP)


def test_a_pbs_job_is_requeued_if_it_is_not_ending_and_a_refusal_states_the_command_to_type(programs, tmp_path):
    programs(qstat=qstat("15[3].pbs1"), qrerun='[ "$*" = "15[3].pbs1" ]')
    assert requeue(PBS, environ=PBS_TASK | {"PBS_JOBID": "15[3].pbs1"}) == "job 15[3].pbs1 is requeued"
    programs(qstat=qstat("0.pbs1", state="E"), qrerun=f"touch {tmp_path}/requests")
    assert "is about to end" in requeue(PBS, environ=PBS_TASK)
    assert not (tmp_path / "requests").exists()
    programs(qstat=qstat("0.pbs1"), qrerun='echo "qrerun: Unauthorized Request $1" >&2; exit 159')
    message = requeue(PBS, "my-run", PBS_TASK)
    assert message.startswith("not requeued\n")
    assert "found  qrerun 0.pbs1: qrerun: Unauthorized Request 0.pbs1" in message
    assert "type   qsub JOB_SCRIPT" in message and "--name my-run" in message
