"""Who may import whom; and what answers without torch."""

import ast
import subprocess
import sys

import pytest

from running import REPOSITORY

PACKAGES = ("launch", "project", "lightning_modules", "data_modules", "tests")
ALLOWED = {
    "launch": {"project", "lightning_modules", "data_modules"},
    "project": set(),
    "lightning_modules": set(),
    "data_modules": set(),
}
WITHOUT_TORCH = (
    "rankzero.commands.start",
    "rankzero.cli.arguments",
    "rankzero.runs.directory",
    "rankzero.distributed.environments.detect",
    "rankzero.distributed.process.spawn",
    "rankzero.distributed.rendezvous.client",
    "rankzero.distributed.scheduler.job",
    "rankzero.distributed.scheduler.requeue",
    "rankzero.commands.fast_imports",
    "rankzero.training.callbacks.wall_time",
    "rankzero.commands.explain",
    "lightning_modules",
    "data_modules",
)


def imported_packages(package: str) -> set[str]:
    """Our packages that the files of one of them import, itself left out."""
    found = set()
    for file in (REPOSITORY / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            found |= {name.split(".")[0] for name in names}
    return found & set(PACKAGES) - {package}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_it_may(package):
    assert imported_packages(package) <= ALLOWED[package]


def test_the_check_sees_imports():
    assert imported_packages("launch") == ALLOWED["launch"]


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_answers_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_environment_variables_are_read_in_environments_alone():
    readers = {
        str(file.relative_to(REPOSITORY).parent)
        for package in ALLOWED
        for file in (REPOSITORY / package).rglob("*.py")
        if "os.environ" in file.read_text() or "getenv" in file.read_text()
    }
    assert readers == {"project/environments"}
