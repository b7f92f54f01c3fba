"""The supported launchers, one per module."""

from rankzero.distributed.environments.launch import Launcher
from rankzero.distributed.environments.launchers import env, flux, local, mpi, pbs, slurm, torchrun

LAUNCHERS: dict[str, Launcher] = {
    module.LAUNCHER.name: module.LAUNCHER for module in (local, torchrun, mpi, flux, slurm, pbs, env)
}
"""Launchers by name, most specific first: a launcher may itself have been started by one listed after it."""
