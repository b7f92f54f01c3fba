"""Runs `fit.py` as a job on a cluster: writes the script, submits it, and watches, stops or resumes it.

python launch/submit.py --scheduler slurm --nodes 2 --devices 4 --time 02:00:00 --name my-run -- --model ResNet
python launch/submit.py log my-run --follow
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "project"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first, so that a user's package cannot hide Rankzero's

from rankzero.commands.submit import main

if __name__ == "__main__":
    sys.exit(main())
