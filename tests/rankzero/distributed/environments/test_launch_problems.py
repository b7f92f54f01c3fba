import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.environments.launch_problems import launch_problems, relevant_variables

SLURM = Launch(launcher="slurm", world_size=4, local_world_size=4)


def problems(environ, cpus=1, launch=SLURM):
    return [found.problem for found in launch_problems(launch, cpus, False, True, environ)]


def test_one_visible_gpu_per_rank_hides_the_gpus_of_the_other_ranks():
    (found,) = launch_problems(SLURM, 1, True, False, {})
    assert "sees only its own GPU" in found.problem and not found.ends_run
    assert "srun --gpus-per-node=4, not --gpus-per-task=1" in found.advice
    assert [*launch_problems(SLURM, 1, False, False, {}), *launch_problems(Launch(), 1, True, False, {})] == []


def test_srun_without_cpus_per_task_is_reported():
    assert problems({"SLURM_CPUS_ON_NODE": "32"}) == ["srun without --cpus-per-task gives each rank 1 of 32 CPUs"]
    assert problems({"SLURM_CPUS_ON_NODE": "32"}, cpus=8) == []
    for cpus in (1, 2):  # srun gives one of two hardware threads on request
        assert problems({"SLURM_CPUS_ON_NODE": "32", "SLURM_CPUS_PER_TASK": "1"}, cpus) == []
    assert len(problems({"SLURM_CPUS_ON_NODE": "32", "SLURM_CPUS_PER_TASK": "8"})) == 1  # sbatch's value, not srun's
    assert problems({"SLURM_CPUS_ON_NODE": "32"}, launch=Launch()) == []
    for unknown in ("", "32(x2)", "many"):
        assert problems({"SLURM_CPUS_ON_NODE": unknown}) == []


@pytest.mark.parametrize("uses_gloo", [True, False])
@pytest.mark.parametrize(("value", "is_invalid"), [("^lo", True), ("=eth0", True), ("eth0", False), ("", False)])
def test_nccls_syntax_for_gloos_interface_ends_a_run_on_gloo(value, is_invalid, uses_gloo):
    found = launch_problems(SLURM, 8, False, uses_gloo, {"GLOO_SOCKET_IFNAME": value, "NCCL_SOCKET_IFNAME": "^lo"})
    assert [problem.ends_run for problem in found] == [uses_gloo] * is_invalid


def test_variables_of_computation_and_communication_are_relevant_unless_set_per_rank():
    environ = {"NCCL_DEBUG": "INFO", "HOME": "/root", "OMP_SCHEDULE": "static", "TORCH_LOGS": "x", "MY_NCCL_X": "1"}
    per_rank = {"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "eth0"}
    assert relevant_variables(environ | per_rank) == {"NCCL_DEBUG": "INFO", "OMP_SCHEDULE": "static", "TORCH_LOGS": "x"}
