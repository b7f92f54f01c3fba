"""`submit` with a real Flux of one machine (tried with Flux 0.80), where one is installed."""

import os
import subprocess

import pytest

from running import REPOSITORY, require, wait_until
from system.test_jobs import FIT, Submitter

LONG = (*FIT, "--epochs", "1000", "--save_every", "5steps")


@pytest.fixture
def flux(tmp_path):
    """Starts an instance of Flux, and returns the variables of its clients."""
    require("flux")
    uri = tmp_path / "uri"
    command = ["flux", "start", "bash", "-c", f'echo "$FLUX_URI" >{uri}.new; mv {uri}.new {uri}; exec sleep infinity']
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True) as broker:
        wait_until(uri.exists)
        yield {"FLUX_URI": uri.read_text().strip(), "OMP_NUM_THREADS": "1"}
        broker.terminate()


def test_a_job_of_flux_stops_before_its_limit_is_submitted_again_and_can_be_canceled(tmp_path, flux):
    submit = Submitter(tmp_path, {**os.environ, **flux, "PYTHONPATH": str(REPOSITORY / "tests")})
    submit("--scheduler", "flux", "--devices", "2", "--time", "40s", "--name", "x", *LONG)
    log, next_id = tmp_path / "runs/x.job.log", tmp_path / "runs/.x.job.next"
    wait_until(lambda: next_id.exists() and next_id.read_text().strip())
    assert "rankzero: the time limit: stopping after this step" in log.read_text()
    submit.wait_for_attempt(2)
    assert "resuming from step-" in log.read_text()
    submit("stop", "x")
    wait_until(lambda: "CANCELED" in submit("status", "x").out)
    assert "; run stopped" in submit("status", "x").out
    jobs = subprocess.run(["flux", "jobs", "-ano", "{id} {status}"], env={**os.environ, **flux}, capture_output=True)
    assert [line.split()[1] for line in jobs.stdout.decode().splitlines()] == ["CANCELED", "FAILED"]


def test_a_finished_job_of_flux_has_the_exit_code_of_its_run(tmp_path, flux):
    submit = Submitter(tmp_path, {**os.environ, **flux, "PYTHONPATH": str(REPOSITORY / "tests")})
    followed = submit("--scheduler", "flux", "--name", "x", "--follow", *FIT, "--epochs", "1")
    assert "COMPLETED" in followed.out and "run x: finished" in followed.out
    assert "run finished" in submit("status", "x").out
