from rankzero.distributed.environments.relevant_variables import relevant_variables


def test_variables_of_computation_and_communication_are_relevant_unless_set_per_rank():
    environ = {"NCCL_DEBUG": "INFO", "HOME": "/root", "OMP_SCHEDULE": "static", "TORCH_LOGS": "x", "MY_NCCL_X": "1"}
    per_rank = {"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "eth0"}
    assert relevant_variables(environ | per_rank) == {"NCCL_DEBUG": "INFO", "OMP_SCHEDULE": "static", "TORCH_LOGS": "x"}
