"""The detected launch as a Lightning cluster environment, which gives ranks and addresses to the strategy."""

from lightning.fabric.plugins.environments import ClusterEnvironment

from rankzero.distributed.environments.launch import Launch


class LaunchEnvironment(ClusterEnvironment):
    """Cluster environment for a launch by any launcher. World size and ranks are read-only."""

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self._launch = launch

    @classmethod
    def detect(cls) -> bool:
        """Returns False: Lightning cannot choose this class by itself, because it needs a launch."""
        return False

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._launch.address.partition(",")[0]

    @property
    def main_port(self) -> int:
        return self._launch.port

    def world_size(self) -> int:
        return self._launch.world_size

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launch defines the world size."""

    def global_rank(self) -> int:
        assert self._launch.rank is not None
        return self._launch.rank

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launch defines the rank."""

    def local_rank(self) -> int:
        assert self._launch.local_rank is not None
        return self._launch.local_rank

    def node_rank(self) -> int:
        return self._launch.node_rank or 0
