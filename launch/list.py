"""Lists the runs of a folder: status, progress, metric, speed.

python launch/list.py
python launch/list.py --root runs --last 10 --json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "project"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first, so that a user's package cannot hide Rankzero's

from rankzero.commands.list import main

if __name__ == "__main__":
    sys.exit(main())
