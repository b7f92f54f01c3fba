import pytest

from project.environments.detect import LOCAL_MARK, Launch, detect
from project.errors import RequestError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job-7",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
SBATCH = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
STEP = {
    **SBATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
LOCAL = {LOCAL_MARK: "1", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def test_nothing_is_one_local_process():
    assert detect(environ={}) == Launch()


def test_torchrun():
    launch = detect(environ=TORCHRUN)
    assert (launch.launcher, launch.rank, launch.local_rank, launch.world_size) == ("torchrun", 3, 1, 4)
    assert (launch.num_nodes, launch.node_rank, launch.devices, launch.job_id) == (2, 1, 2, "job-7")
    assert launch.created and "TORCHELASTIC_RUN_ID=job-7" in launch.evidence


@pytest.mark.parametrize(
    ("run_id", "job_id"), [("none", None), ("221830f4-58ef-4bbe-9de5-a47d32b1b98b", "221830f4"), ("my-job", "my-job")]
)
def test_torchruns_id_is_the_jobs(run_id, job_id):
    assert detect(environ={**TORCHRUN, "TORCHELASTIC_RUN_ID": run_id}).job_id == job_id


def test_a_slurm_step():
    launch = detect(environ=STEP)
    assert (launch.launcher, launch.rank, launch.node_rank, launch.num_nodes) == ("slurm", 2, 1, 2)
    assert launch.job_id == "12" and launch.devices == 2


def test_a_batch_script_is_no_step():
    assert detect(environ=SBATCH).launcher == "local"


def test_torchrun_inside_a_slurm_step_is_torchrun():
    assert detect(environ={**STEP, **TORCHRUN}).launcher == "torchrun"


def test_processes_that_we_started_inside_a_slurm_step_are_ours():
    assert detect(environ={**STEP, **LOCAL}).launcher == "local"


def test_a_launcher_that_is_named_but_not_there():
    with pytest.raises(RequestError, match="not started by torchrun"):
        detect("torchrun", environ={})
    assert detect("local", environ=STEP).launcher == "local"


def test_half_of_the_variables():
    variables = {name: value for name, value in TORCHRUN.items() if name != "WORLD_SIZE"}
    with pytest.raises(RequestError, match="WORLD_SIZE"):
        detect(environ=variables)
