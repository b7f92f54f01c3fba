"""A stand-in for PBS's `pbsdsh`, after what was recorded in real jobs of OpenPBS 23.06: no PBS can be installed here.

python pbs.py NODEFILE JOB pbsdsh [-n LINE] [--] COMMAND...

Each line of the node file gets a task on its host, with PBS's variables and next to nothing else: no RANK, PATH and
cwd as PBS sets them, PBS_NODEFILE on every host but the first. Like the real one it leaves with 0 whatever tasks did.
"""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_MOMPORT": "15003"}
"""What a job script has, besides PBS_JOBID and PBS_NODEFILE."""


def task_variables(line: int, hosts: list[str], node_file: str, job: str) -> dict[str, str]:
    """The variables of a task."""
    machines = list(dict.fromkeys(hosts))
    node = machines.index(hosts[line])
    before = sum(host == hosts[line] for host in hosts[:line])
    number = f"{2 + before:08X}" if node == 0 else f"{node * 0x20000000 + 1 + before:08X}"
    variables = {"PBS_JOBID": job, "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODENUM": str(node), "PBS_TASKNUM": number}
    variables |= {"HOME": os.environ.get("HOME", "/"), "PATH": "/bin:/usr/bin"}
    return variables if node == 0 else variables | {"PBS_NODEFILE": node_file}


def main(enter: str, node_file: str, job: str, words: list[str]) -> int:
    hosts = Path(node_file).read_text().split()
    lines = range(len(hosts))
    if words[0] == "-n":
        lines, words = [int(words[1])], words[2:]
    command = words[words[0] == "--" :]
    tasks = [
        subprocess.Popen(
            [enter, hosts[line], *command],
            env=task_variables(line, hosts, node_file, job),
            cwd=os.environ.get("HOME", "/"),
            stdin=subprocess.DEVNULL,
        )
        for line in lines
    ]
    for task in tasks:
        if task.wait():
            print(f"pbsdsh: task exited with {task.returncode}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
