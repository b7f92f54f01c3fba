from lightning.fabric.utilities import rank_zero as fabric_rank_zero
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero as lightning_rank_zero

from rankzero.distributed.environments.cluster import LaunchEnvironment
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.world import World
from recorded import ENV
from stock import SILENT


def test_lightnings_trainer_uses_a_detected_launch(monkeypatch):
    for module in (lightning_rank_zero, fabric_rank_zero):
        monkeypatch.setattr(module.rank_zero_only, "rank", 0)  # a Trainer sets the rank for the whole process
    launch = detect(environ=ENV | {"LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"})
    trainer = Trainer(plugins=[LaunchEnvironment(World(launch))], devices=2, **SILENT)
    environment = trainer.strategy.cluster_environment
    assert isinstance(environment, LaunchEnvironment) and environment.creates_processes_externally
    assert (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size) == (1, 1, 0, 2)
    assert (environment.main_address, environment.main_port) == ("127.0.0.1", 29500)


def test_setters_do_not_change_the_values_of_a_launch():
    launch = Launch(rank=5, local_rank=2, world_size=6, node_rank=1, address="10.0.0.1,a", port=7)
    environment = LaunchEnvironment(World(launch))
    environment.set_world_size(9)
    environment.set_global_rank(9)
    assert (environment.global_rank(), environment.local_rank(), environment.node_rank()) == (5, 2, 1)
    assert (environment.world_size(), environment.main_address, environment.main_port) == (6, "10.0.0.1", 7)
    environment.validate_settings(num_devices=1, num_nodes=1)  # no error: `check_world` compares the numbers
    assert not LaunchEnvironment.detect()
