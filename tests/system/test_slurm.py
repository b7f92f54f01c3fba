"""Runs under srun, on two nodes of a real Slurm."""

import psutil
import pytest

from running import BIN, processes_in, run, wait_until
from system.learned import TORCHRUN, TRAIN, check
from system.slurm import submit

pytestmark = pytest.mark.xdist_group("slurm")


@pytest.mark.parametrize(
    ("tasks", "requested", "shape"),
    [
        (("--ntasks=4",), (), (3, 1)),
        (("--ntasks-per-node=2", "--gpus-per-task=1"), ("--nodes", "2", "--devices", "2"), (2, 2)),
        (("--ntasks-per-node=1", "--gres=gpu:2"), (), (1, 1)),
    ],
    ids=["uneven tasks", "a GPU a task", "all GPUs for all tasks"],
)
def test_one_task_per_device_on_two_nodes_learns_as_one_process(slurm, tmp_path, reference, tasks, requested, shape):
    result = run("srun", "--nodes=2", *tasks, "python", *TRAIN, *requested, folder=tmp_path, environment=slurm)
    check(tmp_path, result.out + result.err, reference, "slurm", shape)


def test_a_torchrun_on_each_node_learns_as_one_process(slurm, tmp_path, reference):
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint n1:29540 --rdzv-id $SLURM_JOB_ID"
    command = f"{TORCHRUN} --nnodes 2 --nproc-per-node 1 {rendezvous} {' '.join(TRAIN)} --nodes 2 --devices 1"
    script_file = tmp_path / "job.sh"
    script_file.write_text(f"#!/bin/sh\nsrun --ntasks-per-node=1 {command}\n")
    job_id, printed = submit(script_file, slurm, "--nodes=2", "--ntasks-per-node=1")
    summary = check(tmp_path, printed, reference, "torchrun", (1, 1))
    assert summary["run"] == f"MLP-Toy-{job_id}"


def test_simultaneous_steps_of_a_job_meet_separately_and_a_later_step_resumes_the_run_of_the_job(slurm, tmp_path):
    command = f"srun --exact --nodes=2 --ntasks-per-node=1 {BIN}/python {' '.join(TRAIN)}"
    script_file = tmp_path / "job.sh"
    script_file.write_text(f"#!/bin/sh\n{command} &\n{command} --run other &\nwait\n{command} --epochs 2\n")
    job_id, printed = submit(script_file, slurm, "--nodes=2", "--ntasks-per-node=2")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [f"MLP-Toy-{job_id}", "other"]
    starts = [line for line in printed.splitlines() if line.startswith("rankzero: slurm (")]
    simultaneous = {line.split("rendezvous at ")[1].split(";")[0] for line in starts[:2]}
    assert len(starts) == 3 and len(simultaneous) == 2, printed
    assert printed.count("finished") == 3 and printed.count("resuming from step-00000032") == 1


@pytest.mark.soak
@pytest.mark.parametrize(
    ("launcher", "count"),
    [(("torchrun", "--nproc-per-node=2"), 100), (("srun", "--nodes=2", "--ntasks-per-node=1", "python"), 50)],
    ids=["torchrun", "srun"],
)
def test_many_starts_exit_with_0_and_leave_neither_processes_nor_ports(slurm, tmp_path, launcher, count):
    def listening_ports():
        return {found.laddr.port for found in psutil.net_connections("tcp") if found.status == psutil.CONN_LISTEN}

    before = listening_ports()
    for _ in range(count):
        run(*launcher, *TRAIN, folder=tmp_path, environment=slurm)
    left = listening_ports() - before  # other tests open ports later
    wait_until(lambda: not processes_in(tmp_path) and not left & listening_ports(), "the end of all processes")
