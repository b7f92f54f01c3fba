"""After `fast_imports`, the same modules are available as after plain imports."""

import subprocess
import sys

import pytest

from running import REPOSITORY

pytestmark = pytest.mark.system  # each test starts a process that imports torch and Lightning

CODE = """
import gc, sys
from rankzero.commands.start import fast_imports

with fast_imports():
    import rankzero.cli.lightning_cli
    assert not gc.isenabled()
    assert not any(name.startswith(("scipy.signal.", "matplotlib.")) for name in sys.modules)
    {statement}
assert gc.isenabled() and gc.get_freeze_count() > 100_000
with fast_imports():
    assert gc.isenabled()  # nothing is left to be saved

import scipy.signal
from scipy.signal import convolve
assert sys.modules["scipy.signal"] is scipy.signal and scipy.signal.convolve is convolve and scipy.signal.__file__
print(convolve([1, 2], [1, 1]).tolist())

from torchmetrics import MeanMetric
from torchmetrics.utilities import plot
assert plot.__file__
metric = MeanMetric()
metric.update(1)
figure, axes = metric.plot()
print(type(figure).__module__)
"""


PLOT = "import torchmetrics; metric = torchmetrics.SumMetric(); metric.update(1); metric.plot()"


@pytest.mark.parametrize("statement", ["pass", "from scipy.signal import windows; windows.hann(3)", PLOT])
def test_a_delayed_module_can_be_imported_afterwards_or_used_during_fast_imports(statement):
    command = [sys.executable, "-c", CODE.format(statement=statement)]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, "[1, 3, 2]\nmatplotlib.figure\n", "")
