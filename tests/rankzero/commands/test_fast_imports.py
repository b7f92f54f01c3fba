"""What is imported quickly is there in the end, as if it had been imported slowly."""

import subprocess
import sys

import pytest

from running import REPOSITORY

pytestmark = pytest.mark.system  # processes that import everything

CODE = """
import gc, sys
from rankzero.commands.fast_imports import fast_imports

with fast_imports():
    import rankzero.cli.lightning_cli
    assert not gc.isenabled()
    assert not any(name.startswith("scipy.signal.") for name in sys.modules)
    {within}
assert gc.isenabled() and gc.get_freeze_count() > 100_000
with fast_imports():
    assert gc.isenabled()  # nothing is left to be saved

import scipy.signal
from scipy.signal import convolve
assert sys.modules["scipy.signal"] is scipy.signal and scipy.signal.convolve is convolve and scipy.signal.__file__
print(convolve([1, 2], [1, 1]).tolist())
"""


def imported(within: str) -> str:
    """What a process prints that imports quickly, and then uses what was left out."""
    command = [sys.executable, "-c", CODE.format(within=within)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def test_what_was_left_out_is_there_afterwards():
    assert imported("pass") == "[1, 3, 2]\n"


def test_what_was_left_out_is_there_for_who_needs_it_meanwhile():
    assert imported("from scipy.signal import windows; windows.hann(3)") == "[1, 3, 2]\n"
