"""What a scheduler's program answers: asked without ever hanging or raising. Imports no torch."""

import os
import subprocess
from dataclasses import dataclass

PATIENCE_SECONDS = 10.0
"""How long a program has; without its controller squeue takes half a minute to say so (Slurm 22.05)."""


@dataclass(frozen=True)
class Answer:
    """What a program printed.

    Args:
        ok: Whether it was there, answered in time and left with 0.
        text: What it printed; where it was not ok, why.
    """

    ok: bool
    text: str


def ask(*command: str) -> Answer:
    """Runs a scheduler's program, with all times in UTC and without what a person has set for the eye."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    environment["TZ"] = "UTC0"
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Answer(False, f"no answer within {PATIENCE_SECONDS:g} s")
    except (OSError, ValueError) as error:
        return Answer(False, str(error))
    out, err = (stream.decode(errors="replace").strip() for stream in (done.stdout, done.stderr))
    if done.returncode:
        return Answer(False, err or out or f"left with {done.returncode}")
    return Answer(True, out)
