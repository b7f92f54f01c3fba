import re
from pathlib import Path

import pytest

from rankzero.jobs.record import Record, State
from rankzero.jobs.schedulers import pbs

RECORD = Record("x", "pbs", "pbsdsh", "15.pbs1")

RUNNING = """\
    exec_host = pbs1/0*2+pbs2/0*2+
\tpbs3/0*2+p
\tbs4/0*2
    comment = Job run at Sat Nov 21 at 12:00 on (pbs1:ncpus=2)+(pbs2:ncpus=2)
    resources_used.walltime = 00:01:02
    Resource_List.walltime = 02:00:00
"""


def qstat(text):
    return f"cat <<'END'\nJob Id: 15.pbs1\n{text}\nEND"


def test_qsub_passes_the_key_on_by_its_name_and_prints_the_id(monkeypatch):
    monkeypatch.delenv("RANKZERO_KEY", raising=False)
    assert pbs.submit_command(Path("/my runs/x.job.sh")) == ("qsub", "/my runs/x.job.sh")
    monkeypatch.setenv("RANKZERO_KEY", "k" * 32)
    assert pbs.submit_command(Path("/runs/x.job.sh")) == ("qsub", "-v", "RANKZERO_KEY", "/runs/x.job.sh")
    for output in ("15.pbs1", "15[].pbs1", "15.pbs1.example.org", "15"):
        assert re.match(pbs.JOB_ID, output)[0] == output
    for output in ("", "qsub: Unknown queue"):
        assert not re.match(pbs.JOB_ID, output)


def test_a_server_that_does_not_answer_and_a_missing_qstat_give_an_unknown_state(programs):
    assert pbs.state(RECORD).is_active is None
    programs(qstat="echo 'Connection refused' >&2; exit 111")
    assert pbs.state(RECORD) == State("UNKNOWN", None, "(qstat: Connection refused)")


@pytest.mark.parametrize(
    ("letter", "attributes", "state"),
    [
        *((letter, "", State(word, True)) for letter, word in (("R", "RUNNING"), ("Q", "QUEUED"), ("H", "HELD"))),
        *((letter, "", State(word, True)) for letter, word in (("E", "EXITING"), ("B", "RUNNING (array)"), ("Z", "Z"))),
        ("R", "    exec_host = n1/0", State("RUNNING", True, "on n1")),
        ("R", "    exec_host = n1/0\n    Resource_List.walltime = 1:00", State("RUNNING", True, "on n1, 0 of 1:00")),
        ("R", RUNNING, State("RUNNING", True, "on pbs1, pbs2, pbs3, pbs4, 00:01:02 of 02:00:00")),
        ("Q", "    comment = Not Running: no free node", State("QUEUED", True, "(Not Running: no free node)")),
        ("F", "    comment = Job run at Sat Nov 21", State("FINISHED", False, has_failed=False)),
        ("F", "    Exit_status = 75", State("FINISHED", False, has_failed=True)),
        ("X", "", State("FINISHED", False, has_failed=False)),
    ],
)
def test_the_state_is_the_word_for_the_letter_of_qstat(programs, letter, attributes, state):
    programs(qstat=qstat(f"    job_state = {letter}\n{attributes}"))
    assert pbs.state(RECORD) == state


FINISHED = "printf 'Job Id: 15\\n    job_state = F\\n'"
FORGOTTEN = "echo 'not configured to maintain job history' >&2; exit 1"


@pytest.mark.parametrize(
    ("reason", "history", "state"),
    [
        ("Unknown Job Id", FORGOTTEN, "ENDED (PBS no longer knows the job)"),
        ("Unknown Job Id", FINISHED, "FINISHED"),
        ("15.pbs1 Job has finished, use -x or -H", FINISHED, "FINISHED"),
    ],
)
def test_an_ended_job_is_looked_up_in_the_history(programs, calls, reason, history, state):
    programs(qstat=f'if [ "$1" = -x ]; then {history}\nelse echo "qstat: {reason}" >&2; exit 153\nfi')
    found = pbs.state(Record("x", "pbs", "pbsdsh", "15[].pbs1"))
    assert str(found) == state and found.is_active is False
    assert calls("qstat") == ["-f 15[].pbs1", "-x -f 15[].pbs1"]
