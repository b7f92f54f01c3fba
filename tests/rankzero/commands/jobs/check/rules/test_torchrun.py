import pytest

TO = "srun --cpus-per-task=4 --kill-on-bad-exit=1 torchrun --nnodes=2 --nproc-per-node=4"
C10D = "--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
PORT = "$((20000 + SLURM_JOB_ID % 12000))"


def test_a_correct_rendezvous_has_no_findings(slurm, findings):
    assert findings(slurm("host=$(hostname)", f"{TO} {C10D} --rdzv-endpoint=$host:{PORT} train.py")) == []
    bash = f"bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr={{}} --master_port={PORT} train.py'"
    assert findings(slurm("srun --cpus-per-task=4 -K1 " + bash.format("n1"))) == []


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("", "without an address, each of the 2 machines waits for the others on itself"),
        (C10D, "without an address"),
        ("--standalone", "--standalone ignores the other machines"),
        (f"{C10D} --rdzv-endpoint=localhost:0", "at localhost:0, each machine waits for the others on itself"),
        (f"--node_rank=$RANK --master_addr=127.0.0.1 --master_port={PORT}", "at 127.0.0.1, each machine waits"),
        (f"--master_addr=$host --master_port={PORT}", "without --node-rank, every machine has node rank 0"),
        (
            f"--node_rank=0 --master_addr=$host --master_port={PORT}",
            "srun starts torchrun with node rank 0 on every machine",
        ),
    ],
)
def test_machines_that_cannot_find_each_other(slurm, only, options, found):
    only(slurm("host=$(hostname)", f"{TO} {options} train.py"), 10, "wrong", found)


def test_one_machine_needs_no_address(findings):
    for nodes in ("", "--nnodes=1", "--standalone"):
        assert findings(f"torchrun {nodes} --nproc-per-node=4 train.py\n") == []


def test_the_old_launcher_is_deprecated(only):
    line = "python3 -u -m torch.distributed.launch --nproc_per_node=2 train.py"
    instead = only(f"{line}\n", 1, "risky", "is deprecated, and adds --local-rank to the arguments of the script")
    assert instead == "torchrun --nproc_per_node=2 train.py"
    line = "python -m torch.distributed.launch --use_env --nproc_per_node=2 train.py"
    assert only(f"{line}\n", 1, "risky", "is deprecated") == instead


def pair(end):
    line = "torchrun --nnodes=2 --node_rank={} --master_addr=n1 --master_port=$PORT train.py"
    return "".join(f"{line.format(rank)}{end}\n" for rank in range(2))


def test_commands_for_two_machines_cannot_run_one_after_the_other(only, findings):
    only(pair(""), 1, "wrong", "node rank 0 waits for node rank 1, whose command starts after this one has ended")
    assert findings(pair(" &") + "wait\n") == []
    line = "ssh n{} torchrun --nnodes=2 --node_rank={} --master_addr=n1 --master_port=$PORT train.py &\n"
    assert findings("".join(line.format(rank + 1, rank) for rank in range(2)) + "wait\n") == []
