"""Ranks in processes of their own, for tests of collectives."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.messages import lost_contact
from running import as_rank, reserved_port


@pytest.fixture(scope="session")
def fork_server():
    """A server that has imported torch and forks a process in milliseconds, as pytest's own process cannot safely."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torchmetrics", "rankzero.training.fit_loop"])
    with ProcessPoolExecutor(1, context) as pool:  # so that the server runs before a test counts its child processes
        pool.submit(os.getpid).result()
    return context


@pytest.fixture
def on_ranks(fork_server):
    """Calls a function of a test module on all ranks of a world; returns what each rank returned."""

    def call(work, world_size, *arguments):
        with reserved_port() as port, ProcessPoolExecutor(world_size, fork_server) as pool:
            world = Launch(
                launcher="env",
                world_size=world_size,
                local_world_size=world_size,
                port=port,
                world_id="test",
                externally_created=True,
            )
            launches = [world._replace(rank=rank, local_rank=rank) for rank in range(world_size)]
            waiting = [pool.submit(as_rank, work, launch, *arguments) for launch in launches]
            errors = [error for future in waiting if (error := future.exception())]
            for error in sorted(errors, key=lost_contact):  # the cause before the other ranks' lost connections
                raise error
            return [future.result() for future in waiting]

    return call
