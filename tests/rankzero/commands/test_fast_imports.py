"""After `fast_imports`, the same modules are available as after plain imports."""

import subprocess
import sys

import pytest

from running import REPOSITORY

pytestmark = pytest.mark.system  # each test starts a process that imports torch and Lightning

CODE = """
import gc, sys
from rankzero.commands.fast_imports import fast_imports

with fast_imports():
    import rankzero.cli.lightning_cli
    assert not gc.isenabled()
    assert not any(name.startswith("scipy.signal.") for name in sys.modules)
    {statement}
assert gc.isenabled() and gc.get_freeze_count() > 100_000
with fast_imports():
    assert gc.isenabled()  # nothing is left to be saved

import scipy.signal
from scipy.signal import convolve
assert sys.modules["scipy.signal"] is scipy.signal and scipy.signal.convolve is convolve and scipy.signal.__file__
print(convolve([1, 2], [1, 1]).tolist())
"""


def run_code(statement: str) -> str:
    """Runs `CODE` in a new process, with `statement` inside the `fast_imports` block; returns its output."""
    command = [sys.executable, "-c", CODE.format(statement=statement)]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert process.returncode == 0 and process.stderr == "", process.stderr
    return process.stdout


def test_a_delayed_module_can_be_imported_afterwards():
    assert run_code("pass") == "[1, 3, 2]\n"


def test_a_delayed_module_can_be_used_during_fast_imports():
    assert run_code("from scipy.signal import windows; windows.hann(3)") == "[1, 3, 2]\n"
