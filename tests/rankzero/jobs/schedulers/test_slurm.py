import re
from pathlib import Path

import pytest

from rankzero.jobs.record import Record, State
from rankzero.jobs.schedulers import slurm

RECORD = Record("x", "slurm", "srun", "123")


def test_sbatch_prints_only_the_id():
    assert slurm.submit_command(Path("/runs/x.job.sh")) == ("sbatch", "--parsable", "/runs/x.job.sh")
    for output in ("123", "123;cluster", "123\n"):
        assert re.match(slurm.JOB_ID, output)[0] == "123"
    for output in ("", "sbatch: error", " 123"):
        assert not re.match(slurm.JOB_ID, output)


RAN, WAITS = "on n1, 1:02 of 2:00:00", "0:00|2:00:00|"


@pytest.mark.parametrize(
    ("output", "state"),
    [
        *(("RUNNING|None|1:02|2:00:00|n1", State("RUNNING", True, RAN)), ("RUNNING", State("RUNNING", True))),
        ("RUNNING|None|1:02|2:00:00|n[1-2]", State("RUNNING", True, "on n[1-2], 1:02 of 2:00:00")),
        (f"PENDING|Resources|{WAITS}", State("PENDING", True, "(Resources)")),
        *((f"PENDING|{reason}|{WAITS}", State("PENDING", True)) for reason in ("None", "")),
        (f"REQUEUE_HOLD|x|{WAITS}", State("REQUEUE_HOLD", True)),
        ("COMPLETING|None|1:02|2:00:00|n1", State("COMPLETING", True, RAN)),
        ("COMPLETED|None|1:02|2:00:00|n1", State("COMPLETED", False, RAN, has_failed=False)),
        (f"CANCELLED|None|{WAITS}", State("CANCELLED", False, has_failed=True)),
        ("TIMEOUT|TimeLimit|2:00|2:00|n1", State("TIMEOUT", False, "on n1, 2:00 of 2:00", has_failed=True)),
        ("RUNNING|||||\nRUNNING||||\nPENDING||||", State("2 RUNNING, 1 PENDING", True)),  # a job array
        ("COMPLETED||||\nFAILED||||", State("1 COMPLETED, 1 FAILED", False, has_failed=True)),
        ("COMPLETED||||\nRUNNING||||", State("1 COMPLETED, 1 RUNNING", True)),
        ("REVOKED|None|0:00|1:00|n1", State("REVOKED", False, "on n1, 0:00 of 1:00", has_failed=True)),
    ],
)
def test_the_state_is_that_of_squeue(programs, output, state):
    programs(squeue=f"echo '{output}'")
    assert slurm.state(RECORD) == state


NO_JOB = "slurm_load_jobs error: Invalid job id specified"
FORGOTTEN = State("ENDED", False, "(Slurm no longer knows the job)")
UNKNOWN = State("UNKNOWN", None, "(squeue: Unable to contact slurm controller)")


@pytest.mark.parametrize(
    ("error", "state"), [("", FORGOTTEN), (NO_JOB, FORGOTTEN), ("Unable to contact slurm controller", UNKNOWN)]
)
def test_squeue_is_asked_for_ended_jobs_too(programs, calls, error, state):
    assert str(slurm.state(RECORD)) == "UNKNOWN (squeue: not found on PATH)"
    programs(squeue=f"echo '{error}' >&2; exit 1" if error else "true")
    assert slurm.state(RECORD) == state
    assert calls("squeue") == ["--noheader --jobs=123 --states=all --format=%T|%r|%M|%l|%N"]
