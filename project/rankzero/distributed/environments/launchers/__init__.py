"""The launchers, one per module. Imports no torch."""

from rankzero.distributed.environments.launch import Launcher
from rankzero.distributed.environments.launchers import env, local, mpi, pbs, slurm, torchrun

LAUNCHERS: dict[str, Launcher] = {
    module.LAUNCHER.name: module.LAUNCHER for module in (local, torchrun, mpi, slurm, pbs, env)
}
"""Most specific first: what stands further up may have been started by what stands below it."""
