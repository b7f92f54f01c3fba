"""Replacement for PBS's `pbsdsh`, based on records of real OpenPBS 23.06 jobs; PBS cannot be installed here.

python pbs.py ENTER NODEFILE JOB [-n LINE] [--] COMMAND...

ENTER is a program that runs a command on a host. Each line of the node file gets a task on its host. As under PBS, the
task has almost no variables: PATH and working directory are PBS's, RANK is missing, and PBS_NODEFILE is missing on the
first host. Like the real `pbsdsh`, this program exits with 0 even if tasks fail.
"""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_MOMPORT": "15003"}
"""Variables of a job script, besides PBS_JOBID and PBS_NODEFILE."""


def task_variables(line: int, hosts: list[str], node_file: str, job: str) -> dict[str, str]:
    """Returns the variables of the task on one line of the node file."""
    machines = list(dict.fromkeys(hosts))
    node = machines.index(hosts[line])
    earlier_tasks = sum(host == hosts[line] for host in hosts[:line])
    number = f"{2 + earlier_tasks:08X}" if node == 0 else f"{node * 0x20000000 + 1 + earlier_tasks:08X}"
    variables = {"PBS_JOBID": job, "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODENUM": str(node), "PBS_TASKNUM": number}
    variables |= {"HOME": os.environ.get("HOME", "/"), "PATH": "/bin:/usr/bin"}
    return variables if node == 0 else variables | {"PBS_NODEFILE": node_file}


def main(enter: str, node_file: str, job: str, arguments: list[str]) -> int:
    hosts = Path(node_file).read_text().split()
    lines = range(len(hosts))
    if arguments[0] == "-n":
        lines, arguments = [int(arguments[1])], arguments[2:]
    command = arguments[arguments[0] == "--" :]
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
