"""Reads recorded output of Flux 0.80. The tests in tests/system/test_flux.py run Flux itself, if it is installed."""

import re
from pathlib import Path

import pytest

from rankzero.jobs.record import Record, State
from rankzero.jobs.schedulers import flux

RECORD = Record("x", "flux", None, "ƒTQUD7D")


def test_flux_batch_prints_only_the_id():
    assert flux.submit_command(Path("/runs/x.job.sh")) == ("flux", "batch", "/runs/x.job.sh")
    for output in ("ƒTQUD7D", "fTQUD7D"):  # without UTF-8, Flux prints the letter f
        assert re.search(flux.JOB_ID, output)[0] == output
    assert not re.search(flux.JOB_ID, "")


@pytest.mark.parametrize(
    ("output", "state"),
    [
        ("echo 'RUN|vm|11s|50s'", State("RUN", True, "on vm, 11s of 50s")),
        ("echo 'RUN|vm[1-2]|0.794s|0s'", State("RUN", True, "on vm[1-2], 0.794s")),
        ("echo 'SCHED||0s|50s'", State("SCHED", True)),
        ("echo 'COMPLETED|vm|4.2s|0s'", State("COMPLETED", False, "on vm, 4.2s", has_failed=False)),
        *(
            (f"echo '{word}|vm|9s|50s'", State(word, False, "on vm, 9s of 50s", has_failed=True))
            for word in ("FAILED", "CANCELED", "TIMEOUT")
        ),
        ("echo 'JobID ƒTQUD7D unknown' >&2; exit 1", State("ENDED", False, "(Flux no longer knows the job)")),
        (
            "echo 'Unable to connect to Flux' >&2; exit 1",
            State("UNKNOWN", None, "(flux jobs: Unable to connect to Flux)"),
        ),
    ],
)
def test_the_state_is_that_of_flux_jobs(programs, output, state):
    programs(flux=output)
    assert flux.state(RECORD) == state
