import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.preflight.launcher import has_invalid_interface, launcher_problems

SLURM = Launch(launcher="slurm", world_size=4, local_world_size=4)


def problems(launch, environ, visible_gpus=0, cores=1, monkeypatch=None):
    monkeypatch.setattr("rankzero.preflight.launcher.usable_cores", lambda: frozenset(range(cores)))
    return [problem for problem, _ in launcher_problems(launch, environ, visible_gpus)]


def test_one_visible_gpu_per_rank_hides_the_gpus_of_the_other_ranks(monkeypatch):
    (problem,) = problems(SLURM, {}, visible_gpus=1, monkeypatch=monkeypatch)
    assert "sees only its own GPU" in problem
    assert problems(SLURM, {}, visible_gpus=4, monkeypatch=monkeypatch) == []
    assert problems(SLURM._replace(local_world_size=1), {}, visible_gpus=1, monkeypatch=monkeypatch) == []


def test_srun_without_cpus_per_task_is_reported(monkeypatch):
    (problem,) = problems(SLURM, {"SLURM_CPUS_ON_NODE": "32"}, monkeypatch=monkeypatch)
    assert problem == "srun without --cpus-per-task gives each rank 1 of 32 cores"
    assert problems(SLURM, {"SLURM_CPUS_ON_NODE": "32"}, cores=8, monkeypatch=monkeypatch) == []
    environ = {"SLURM_CPUS_ON_NODE": "32", "SLURM_CPUS_PER_TASK": "1"}
    assert problems(SLURM, environ, monkeypatch=monkeypatch) == []


@pytest.mark.parametrize(("value", "is_invalid"), [("^lo", True), ("=eth0", True), ("eth0", False), ("", False)])
def test_nccls_syntax_for_gloos_interface_is_invalid(value, is_invalid):
    assert has_invalid_interface({"GLOO_SOCKET_IFNAME": value}) is is_invalid
    assert not has_invalid_interface({"NCCL_SOCKET_IFNAME": "^lo"})
