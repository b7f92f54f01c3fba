import os
import subprocess
import sys

import pytest

SAYING = """
import os, sys
from rankzero.messages import say, settle, show
print("held back")
for _ in range(3):
    show("how it goes")
    say("what goes wrong")
settle()
"""


@pytest.mark.parametrize(
    "command",
    [
        "{{ sleep 0.2; {saying} 2>&1; echo $? >&3; }} 3>&2 | true",
        "{saying} >/dev/full 2>&1; echo $? >&2",
        "{saying} >&- 2>&-; echo $? >&2",
    ],
    ids=["a pipe that nobody reads", "a full disk", "closed"],
)
def test_nobody_has_to_hear_it(command):
    """The exit code stays what it is."""
    line = command.format(saying=f"'{sys.executable}' -c '{SAYING}'")
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, env=buffered)
    assert done.stderr.split() == ["0"]
