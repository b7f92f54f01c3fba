import pytest

from rankzero.distributed.process.clean_environment import without_job_variables
from recorded import ENV, HYDRA, OPEN_MPI, PBS_TASK, STEP, TORCHRUN


@pytest.mark.parametrize("variables", [ENV, HYDRA, OPEN_MPI, PBS_TASK, STEP, TORCHRUN])
def test_the_variables_of_launchers_and_jobs_are_removed(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not variables.keys() & without_job_variables().keys()


@pytest.mark.parametrize("job", [{}, {"SLURM_JOB_ID": "12", "PBS_JOBID": "0.pbs1"}])
def test_settings_of_the_user_are_kept_and_variables_of_a_scheduler_outside_its_jobs(monkeypatch, job):
    settings = ("SLURM_CONF", "PBS_CONF_FILE", "PBS_DEFAULT", "OMPI_MCA_btl", "MPI_HOME", "SBATCH_PARTITION", "PATH")
    for name in (*settings, "SLURM_CLUSTERS", *job):
        monkeypatch.setenv(name, job.get(name, "value"))
    assert dict.fromkeys(settings, "value").items() <= without_job_variables().items()
    assert ("SLURM_CLUSTERS" in without_job_variables()) == (not job)
