"""Prints in which settings and results runs differ, and draws their curves.

python launch/compare.py first second
python launch/compare.py runs/first other-folder/runs/first --x samples --output figure.svg
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "project"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first, so that a user's package cannot hide Rankzero's

from rankzero.commands.compare import main

if __name__ == "__main__":
    sys.exit(main())
