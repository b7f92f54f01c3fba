"""Real parts, started once for all tests that need them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from running import require
from system.forks import Forks, forking
from system.hosts import Hosts, two_hosts
from system.learned import Alone, learn_alone
from system.slurm import cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """A Slurm of two nodes, n1 and n2; its environment variables."""
    require("slurm")
    with cluster(tmp_path_factory.mktemp("slurm") / "cluster") as environment:
        yield environment


@pytest.fixture(scope="session")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    """Two hosts with a network between them, rz1 and rz2."""
    require("hosts")
    with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(scope="session")
def alone(tmp_path_factory) -> Alone:
    """What one process learns, and two on one machine."""
    return learn_alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture
def mine(tmp_path) -> Path:
    """A folder with a module of one's own, whose classes note what they are given."""
    shutil.copy(Path(__file__).parent / "recording.py", tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Starts `fit` many times at the price of one."""
    with forking() as process:
        yield process
