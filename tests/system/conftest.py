"""Fixtures that start real programs once for all tests that need them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from running import require
from system.hosts import Hosts, two_hosts
from system.learned import OBSERVED, Reference, train_reference
from system.slurm import cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Starts a Slurm with the nodes n1 and n2, and yields its environment variables."""
    require("slurm")
    with cluster(tmp_path_factory.mktemp("slurm") / "cluster") as environment:
        yield environment


@pytest.fixture(scope="session")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    """Creates two connected hosts, rz1 and rz2."""
    require("hosts")
    with two_hosts(tmp_path_factory.mktemp("hosts")) as created:
        yield created


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> Reference:
    """Returns the weights that one process learns, and the metrics of two processes on one machine."""
    return train_reference(tmp_path_factory.mktemp("alone"))


@pytest.fixture
def cores_shared(tmp_path, monkeypatch) -> Path:
    """Returns a folder with the callback of `OBSERVE`; the user sets no number of threads."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "observed.py").write_text(OBSERVED)
    return tmp_path


@pytest.fixture
def user_folder(tmp_path) -> Path:
    """Returns a folder with user classes that record the samples they receive."""
    shutil.copy(Path(__file__).parent / "recording.py", tmp_path)
    return tmp_path
