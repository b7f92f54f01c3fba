"""bjobs is a stand-in whose output follows LSF's documentation; LSF is proprietary, and cannot be installed here."""

import re
from pathlib import Path

import pytest

from rankzero.jobs.record import Record, State, member_records
from rankzero.jobs.schedulers import lsf

RECORD = Record("x", "lsf", "mpirun", "123")


def test_bsub_reads_the_script_and_prints_the_id_in_a_sentence():
    assert lsf.submit_command(Path("/runs/x.job.sh")) == ("bsub",)
    assert re.search(lsf.JOB_ID, "Job <123> is submitted to queue <normal>.")[0] == "123"
    for output in ("", "Request aborted by esub. Job not submitted.", "Queue <12> is closed"):
        assert not re.search(lsf.JOB_ID, output)


def test_a_member_of_an_array_has_its_index_in_brackets():
    members = member_records(Record("x", "lsf", "mpirun", "123", "1-3:2"))
    assert [(member.name, member.id) for member in members] == [("x-1", "123[1]"), ("x-3", "123[3]")]


@pytest.mark.parametrize(
    ("output", "state"),
    [
        ("echo 'RUN|4*n1:4*n2|1:58 L'", State("RUN", True, "on n1, n2, 1:58 left")),
        *((f"echo 'RUN|n1|{left}'", State("RUN", True, "on n1")) for left in ("-", "")),
        *((f"echo '{word}|-|-'", State(word, True)) for word in ("PEND", "PSUSP", "SSUSP", "UNKWN")),
        ("echo 'DONE|n1|-'", State("DONE", False, has_failed=False)),
        ("echo 'EXIT|n1|-'", State("EXIT", False, has_failed=True)),
        ("printf 'RUN|n1|-\\nPEND|-|-\\nRUN|n2|-\\n'", State("2 RUN, 1 PEND", True)),
        ("printf 'DONE|n1|-\\nEXIT|n2|-\\n'", State("1 DONE, 1 EXIT", False, has_failed=True)),
        *(
            (f"echo 'Job <123> is not found' >&2; exit {code}", State("ENDED", False, "(LSF no longer knows the job)"))
            for code in (0, 255)
        ),
        ("echo 'LSF is down' >&2; exit 255", State("UNKNOWN", None, "(bjobs: LSF is down)")),
    ],
)
def test_the_state_is_that_of_bjobs(programs, calls, output, state):
    programs(bjobs=output)
    assert lsf.state(RECORD) == state
    assert calls("bjobs") == ["-noheader -o stat exec_host time_left delimiter='|' 123"]
