"""Writes the report of a run, also of one that was killed.

python launch/report.py first
python launch/report.py first --root runs
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "project"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first, so that a user's package cannot hide Rankzero's

from rankzero.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
