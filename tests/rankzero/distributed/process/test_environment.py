from pathlib import Path

import pytest

from rankzero.distributed.process.environment import config_folder, without_job_variables
from recorded import ENV, HYDRA, OPEN_MPI, PBS_TASK, STEP, TORCHRUN

IN_HOME = "/home/a/.config/rankzero"


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CONFIG_HOME": "/settings", "HOME": "/home/a"}, "/settings/rankzero"),
        ({"XDG_CONFIG_HOME": "/settings/"}, "/settings/rankzero"),
        ({"HOME": "/home/a"}, IN_HOME),
        *(({"XDG_CONFIG_HOME": path, "HOME": "/home/a"}, IN_HOME) for path in ("", "relative", "~/settings")),
        ({"HOME": "/"}, "/.config/rankzero"),
        *((variables, None) for variables in ({}, {"HOME": "relative"}, {"HOME": ""}, {"XDG_CONFIG_HOME": "relative"})),
    ],
)
def test_the_first_absolute_path_is_used(variables, folder, monkeypatch):
    for name in ("XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert config_folder() == (Path(folder) if folder else None)
    assert not Path("/settings").exists()


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
