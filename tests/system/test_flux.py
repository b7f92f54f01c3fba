"""`submit` with a real Flux of one machine (tried with Flux 0.80), where one is installed."""

import subprocess

import pytest

from running import require, run, wait_until
from system.test_jobs import FIT, Submitter

LONG = (*FIT, "--epochs", "1000", "--save_every", "5steps")


@pytest.fixture
def submit(user_folder):
    """Starts an instance of Flux, and returns a function that runs `submit` with it."""
    require("flux")
    uri = user_folder / "uri"
    command = ["flux", "start", "bash", "-c", f'echo "$FLUX_URI" >{uri}.new; mv {uri}.new {uri}; exec sleep infinity']
    with subprocess.Popen(command, cwd=user_folder, start_new_session=True) as broker:
        wait_until(uri.exists)
        yield Submitter(user_folder, {"FLUX_URI": uri.read_text().strip(), "OMP_NUM_THREADS": "1"})
        broker.terminate()


def test_a_job_of_flux_stops_before_its_limit_is_submitted_again_and_can_be_canceled(submit):
    submit("--scheduler", "flux", "--devices", "2", "--time", "40s", "--name", "x", *LONG)
    log, next_id = submit.folder / "runs/x.job.log", submit.folder / "runs/.x.job.next"
    wait_until(lambda: next_id.exists() and next_id.read_text().strip())
    assert "rankzero: the time limit: stopping after this step" in log.read_text()
    submit.wait_for_attempt(2)
    assert "resuming from step-" in log.read_text()
    submit("stop", "x")
    wait_until(lambda: "CANCELED" in submit("status", "x").out)
    assert "; run stopped" in submit("status", "x").out
    jobs = run("flux", "jobs", "-ano", "{status}", folder=submit.folder, environment=submit.environment)
    assert jobs.out.split() == ["CANCELED", "FAILED"]


def test_a_finished_job_of_flux_has_the_exit_code_of_its_run(submit):
    followed = submit("--scheduler", "flux", "--name", "x", "--follow", *FIT, "--epochs", "1")
    assert "COMPLETED" in followed.out and "run x: finished" in followed.out
    assert "run finished" in submit("status", "x").out
