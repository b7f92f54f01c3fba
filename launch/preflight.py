"""Checks whether all processes can train together; takes the flags of `fit.py`.

python launch/preflight.py --devices 2
srun python launch/preflight.py --nodes 2 --devices 4 --json preflight.json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "project"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first, so that a user's package cannot hide Rankzero's

from rankzero.commands.preflight import main
from rankzero.distributed.process.at_exit import exit_quickly_with

if __name__ == "__main__":
    sys.exit(exit_quickly_with(main()))
