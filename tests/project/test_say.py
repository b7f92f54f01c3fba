import os
import subprocess
import sys

SAYING = """
import os, sys
from project.say import say, settle, show
sys.stdout.write("held back")
for _ in range(3):
    show("how it goes")
    say("what goes wrong")
settle()
"""


def test_nobody_has_to_hear_it():
    """A pipe that is closed, and a disk that is full: the exit code stays what it is."""
    for sink in ("| true", "> /dev/full"):
        command = f"{{ sleep 0.2; '{sys.executable}' -c '{SAYING}' 2>&1; echo $? >&3; }} 3>&2 {sink}"
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, env=buffered)
        assert done.stderr.split() == ["0"], sink
