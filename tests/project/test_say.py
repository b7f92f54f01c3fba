import contextlib
import os
import socket
import subprocess
import sys

import pytest

SAYING = """
import os, sys
from project.say import say, settle, show
print("held back")
for _ in range(3):
    show("how it goes")
    say("what goes wrong")
settle()
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_each_line_is_a_single_write(unbuffered):
    """Ranks share a pipe: a newline in a write of its own may follow the line of another rank."""
    reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps each write apart
    code = "from project.say import say, show; show('a line'); say('an error')"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with reading, writing:
        subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=writing, env=environment, check=True)
        reading.setblocking(False)
        writes = []
        with contextlib.suppress(BlockingIOError):
            while True:
                writes.append(reading.recv(100))
    writes = [written for written in writes if written]  # print's empty `end` is a write too, and prints nothing
    assert writes == [b"a line\n", b"rankzero: an error\n"]


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
