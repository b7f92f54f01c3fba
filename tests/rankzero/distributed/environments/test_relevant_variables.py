from rankzero.distributed.environments.relevant_variables import relevant_variables


def test_variables_that_change_how_ranks_compute_or_communicate_are_relevant():
    environ = {"NCCL_DEBUG": "INFO", "HOME": "/root", "OMP_SCHEDULE": "static", "TORCH_LOGS": "x", "MY_NCCL_X": "1"}
    assert relevant_variables(environ) == {"NCCL_DEBUG": "INFO", "OMP_SCHEDULE": "static", "TORCH_LOGS": "x"}


def test_variables_that_launchers_set_per_rank_are_left_out():
    environ = {"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "eth0"}
    assert relevant_variables(environ) == {}
