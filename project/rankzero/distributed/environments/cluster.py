"""The launchers as Lightning's ClusterEnvironment: for our own Trainer, and for any other, `Trainer(plugins=[...])`.

Our own Trainer has met before it is made and is given a `LaunchEnvironment` that knows all. In a bare Trainer each of
the other classes reads its launcher's variables.
"""

import logging
import os
from signal import Signals
from typing import ClassVar

from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment

from rankzero.distributed.environments import slurm
from rankzero.distributed.environments.detect import LAUNCHERS
from rankzero.distributed.environments.launch import Launch, RequestedWorld, Variables, derived_port

log = logging.getLogger(__name__)


class LaunchEnvironment(ClusterEnvironment):
    """Where this process stands, as a `Launch` tells.

    Args:
        launch: What is known; None where each question is answered from the launcher's variables.

    Raises:
        KeyError: When asked, where a variable is not set.
    """

    launcher: ClassVar[str] = "local"

    def __init__(self, launch: Launch | None = None) -> None:
        super().__init__()
        self._launch = launch

    @property
    def launch(self) -> Launch:
        """What is known, or what the variables say now."""
        if self._launch is not None:
            return self._launch
        launch: Launch = LAUNCHERS[self.launcher].read(Variables(os.environ), RequestedWorld())
        return launch

    @classmethod
    def detect(cls) -> bool:
        return bool(LAUNCHERS[cls.launcher].found(Variables(os.environ)))

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.launch.address.partition(",")[0]

    @property
    def main_port(self) -> int:
        return self.launch.port

    def world_size(self) -> int:
        return self.launch.world_size

    def set_world_size(self, size: int) -> None:
        log.debug("setting world size is not allowed. Ignored.")

    def global_rank(self) -> int:
        return self._told(self.launch.rank, "rank")

    def set_global_rank(self, rank: int) -> None:
        log.debug("setting global rank is not allowed. Ignored.")

    def local_rank(self) -> int:
        return self._told(self.launch.local_rank, "local rank")

    def node_rank(self) -> int:
        return self.launch.node_rank or 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compares a bare Trainer's numbers with the launcher's; our own have been compared.

        Raises:
            ValueError: They differ.
        """
        if self._launch is None and num_devices * num_nodes != self.world_size():
            raise ValueError(
                f"devices={num_devices} and num_nodes={num_nodes} make {num_devices * num_nodes} processes, but "
                f"{self.launcher} started {self.world_size()}; set devices and num_nodes so that they multiply to that"
            )

    def _told(self, value: int | None, name: str) -> int:
        if value is None:
            raise KeyError(f"{self.launcher} does not tell this process its {name}")
        return value


class LocalEnvironment(LaunchEnvironment):
    """Processes that `rankzero.distributed.process.spawn` started."""


class MPIEnvironment(LaunchEnvironment):
    """mpirun's processes, by variables alone: Lightning's own calls MPI_Init as soon as mpi4py can be imported."""

    launcher = "mpi"


class PBSEnvironment(LaunchEnvironment):
    """Tasks of pbsdsh that were given RANK and WORLD_SIZE on their command line."""

    launcher = "pbs"


class VariablesEnvironment(LaunchEnvironment):
    """Processes that were given RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    launcher = "env"


class TorchrunEnvironment(TorchElasticEnvironment):
    """torchrun's processes; Lightning's own, but for elastic worlds, whose size is torchrun's to say."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if LAUNCHERS["torchrun"].elastic_nodes(Variables(os.environ)) is None:
            super().validate_settings(num_devices, num_nodes)


class SlurmEnvironment(SLURMEnvironment):
    """Tasks of a Slurm step; Lightning's own takes a batch script for one, and two steps share its port."""

    def __init__(self, auto_requeue: bool = False, requeue_signal: Signals | None = None) -> None:
        super().__init__(auto_requeue, requeue_signal)

    @staticmethod
    def detect() -> bool:
        return slurm.found(Variables(os.environ))

    @staticmethod
    def _validate_srun_variables() -> None:
        """Lightning refuses `--ntasks` without `--ntasks-per-node`; here it is as good as any other."""

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        return slurm.expand_hosts(nodes.replace(" ", ","))[0]

    @property
    def main_address(self) -> str:
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "127.0.0.1")
        return os.environ.get("MASTER_ADDR") or self.resolve_root_node_address(nodes)

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT") or derived_port(slurm.key(Variables(os.environ))))

    def world_size(self) -> int:
        return int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ["SLURM_NTASKS"])

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != self.world_size():
            raise ValueError(
                f"devices={num_devices} and num_nodes={num_nodes} make {num_devices * num_nodes} processes, but srun "
                f"started {self.world_size()} tasks; srun --nodes={num_nodes} --ntasks-per-node={num_devices} fits"
            )
