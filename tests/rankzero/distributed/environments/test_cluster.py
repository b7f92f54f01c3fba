"""In a bare Trainer of Lightning's, with nothing else of ours."""

import subprocess

import pytest
from lightning.fabric.utilities import rank_zero as fabric_rank_zero
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities import rank_zero as lightning_rank_zero

from rankzero.distributed.environments import local
from rankzero.distributed.environments.cluster import (
    LaunchEnvironment,
    LocalEnvironment,
    MPIEnvironment,
    PBSEnvironment,
    SlurmEnvironment,
    TorchrunEnvironment,
    VariablesEnvironment,
)
from rankzero.distributed.environments.launch import Launch
from running import BIN

PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
GROUP = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
KINDS = {
    LocalEnvironment: {**PLACE, **GROUP, local.MARK: "1"},
    TorchrunEnvironment: {**PLACE, **GROUP, "TORCHELASTIC_RUN_ID": "x"},
    VariablesEnvironment: PLACE,
    PBSEnvironment: {**PLACE, "PBS_JOBID": "1.pbs1", "PBS_TASKNUM": "00000003", "PBS_NODENUM": "0"},
    SlurmEnvironment: {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
    },
    MPIEnvironment: {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
}
each = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def variables(kind, monkeypatch):
    for module in (lightning_rank_zero, fabric_rank_zero):
        monkeypatch.setattr(module.rank_zero_only, "rank", 0)  # a Trainer sets it for the whole process
    for name, value in {**KINDS[kind], "MASTER_PORT": "29530"}.items():
        monkeypatch.setenv(name, value)


@each
def test_a_bare_trainer_takes_it(kind, variables):
    assert kind.detect()
    trainer = Trainer(
        plugins=[kind()],
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    environment = trainer.strategy.cluster_environment
    assert isinstance(environment, kind) and environment.creates_processes_externally
    assert (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size) == (1, 1, 0, 2)
    assert (environment.main_address, environment.main_port) == ("127.0.0.1", 29530)


@each
def test_other_numbers_are_refused(kind, variables):
    kind().validate_settings(num_devices=2, num_nodes=1)
    with pytest.raises(ValueError, match="devices=2"):
        kind().validate_settings(num_devices=2, num_nodes=2)


@each
def test_the_launcher_alone_says_how_many_there_are(kind, variables):
    environment = kind()
    environment.set_world_size(9)
    environment.set_global_rank(9)
    assert (environment.world_size(), environment.global_rank()) == (2, 1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not LocalEnvironment])
def test_without_its_variables(kind):
    assert not kind.detect()
    with pytest.raises(KeyError):
        kind().world_size()


def test_they_are_lightnings_where_lightning_has_one():
    assert issubclass(SlurmEnvironment, SLURMEnvironment) and issubclass(TorchrunEnvironment, TorchElasticEnvironment)


def test_slurm_meets_where_the_step_begins(monkeypatch):
    for name, value in {"SLURM_STEP_NODELIST": "gpu[07-09],gpu12", "SLURM_NODELIST": "gpu[01-20]"}.items():
        monkeypatch.setenv(name, value)
    environment = SlurmEnvironment()
    assert environment.main_address == "gpu07" and not environment.auto_requeue
    ports = set()
    for step in ("0", "1"):
        monkeypatch.setenv("SLURM_STEP_ID", step)
        ports.add(environment.main_port)
    assert len(ports) == 2


def test_one_that_knows_all():
    environment = LaunchEnvironment(
        Launch(rank=5, local_rank=2, world_size=6, node_rank=1, address="10.0.0.1,a", port=7)
    )
    assert (environment.global_rank(), environment.local_rank(), environment.node_rank()) == (5, 2, 1)
    assert (environment.main_address, environment.main_port) == ("10.0.0.1", 7)
    environment.validate_settings(num_devices=1, num_nodes=1)  # the run has compared the numbers already


BARE = """
import sys, torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from rankzero.distributed.environments.cluster import TorchrunEnvironment

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(plugins=[TorchrunEnvironment()], accelerator="cpu", devices=2, max_steps=2, **quiet)
trainer.fit(Net(), DataLoader(torch.rand(8, 1), batch_size=2))
ranks = int(trainer.strategy.reduce(torch.tensor(float(trainer.global_rank)), reduce_op="sum"))
sys.stdout.write(f"ranks {ranks}\\n")  # at once: two processes write to one pipe
torch.distributed.destroy_process_group()
"""


@pytest.mark.system
def test_a_bare_trainer_trains_with_it(tmp_path):
    (tmp_path / "bare.py").write_text(BARE)
    command = [str(BIN / "torchrun"), "--nproc-per-node", "2", "bare.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks 1") == 2
