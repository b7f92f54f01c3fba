"""The same command under srun, on two nodes of a real Slurm."""

import pytest
import torch

from running import BIN, fit, run, script, weights
from system.slurm import submit

pytestmark = pytest.mark.xdist_group("slurm")

TOY = ("--model", "MLP", "--data", "Toy", "--epochs", "2", "--global_batch_size", "32")


def test_one_task_a_device_on_two_nodes(slurm, tmp_path):
    python = ("python", script("fit"), "--nodes", "2", "--devices", "1", *TOY)
    result = run("srun", "--nodes=2", "--ntasks-per-node=1", *python, folder=tmp_path, environment=slurm)
    summary = result.summary("MLP-Toy-*")
    assert (summary["launcher"], summary["nodes"], summary["devices"], summary["world_size"]) == ("slurm", 2, 1, 2)
    assert (summary["status"], summary["samples"]) == ("finished", 4096)
    assert result.out.count("rankzero: slurm (SLURM_JOB_ID=") == 1
    fit(*TOY, "--run", "alone", folder=tmp_path)
    there, alone = weights(tmp_path / "runs" / summary["run"]), weights(tmp_path / "runs/alone")
    assert all(torch.allclose(there[name], alone[name], atol=1e-6) for name in alone)


def test_a_job_finds_its_own_run_again(slurm, tmp_path):
    command = f"srun --nodes=2 --ntasks-per-node=1 python {script('fit')} {' '.join(TOY)}"
    script_file = tmp_path / "job.sh"
    script_file.write_text(f"#!/bin/sh\n{command} --epochs 1 && {command} --epochs 2\n")
    environment = {**slurm, "PATH": f"{BIN}:{slurm['PATH']}"}
    job_id, printed = submit(script_file, environment, "--nodes=2", "--ntasks-per-node=1")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [f"MLP-Toy-{job_id}"]
    assert "carrying on from step-00000064" in printed
