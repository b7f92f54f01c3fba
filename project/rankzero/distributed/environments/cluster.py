"""The world as a Lightning cluster environment, which gives ranks and addresses to the strategy."""

from lightning.fabric.plugins.environments import ClusterEnvironment

from rankzero.distributed.world import World


class LaunchEnvironment(ClusterEnvironment):
    """Cluster environment for processes of any launcher. World size and ranks are read-only."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @classmethod
    def detect(cls) -> bool:
        """Returns False: Lightning cannot choose this class by itself, because it needs a world."""
        return False

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._world.launch.address.partition(",")[0]

    @property
    def main_port(self) -> int:
        return self._world.launch.port

    def world_size(self) -> int:
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher defines the world size."""

    def global_rank(self) -> int:
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher defines the rank."""

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        return self._world.launch.node_rank or 0
