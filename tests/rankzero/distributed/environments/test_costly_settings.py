import pytest

from rankzero.distributed.environments.costly_settings import costly_settings
from rankzero.distributed.environments.launch import Launch

SLURM = Launch(launcher="slurm", world_size=4, local_world_size=4)


def problems(environ, cores=1, gpus=0, launch=SLURM):
    return [setting.problem for setting in costly_settings(launch, cores, gpus, environ)]


def test_one_visible_gpu_per_rank_hides_the_gpus_of_the_other_ranks():
    (setting,) = costly_settings(SLURM, 1, 1, {})
    assert "sees only its own GPU" in setting.problem and not setting.ends_run
    assert setting.advice == "srun --gpus-per-node=4 in place of --gpus-per-task=1"
    assert problems({}, gpus=4) == problems({}, gpus=1, launch=SLURM._replace(local_world_size=1)) == []


@pytest.mark.parametrize("cores_on_node", ["", "32(x2)", "many"])
def test_an_unknown_number_of_cores_is_no_problem(cores_on_node):
    assert problems({"SLURM_CPUS_ON_NODE": cores_on_node}) == []


def test_srun_without_cpus_per_task_is_reported():
    assert problems({"SLURM_CPUS_ON_NODE": "32"}) == ["srun without --cpus-per-task gives each rank 1 of 32 cores"]
    assert problems({"SLURM_CPUS_ON_NODE": "32"}, cores=8) == []
    assert problems({"SLURM_CPUS_ON_NODE": "32", "SLURM_CPUS_PER_TASK": "1"}) == []
    assert problems({"SLURM_CPUS_ON_NODE": "32"}, launch=Launch()) == []


@pytest.mark.parametrize(("value", "is_invalid"), [("^lo", True), ("=eth0", True), ("eth0", False), ("", False)])
def test_nccls_syntax_for_gloos_interface_ends_a_run(value, is_invalid):
    settings = costly_settings(SLURM, 8, 0, {"GLOO_SOCKET_IFNAME": value, "NCCL_SOCKET_IFNAME": "^lo"})
    assert [setting.ends_run for setting in settings] == [True] * is_invalid
