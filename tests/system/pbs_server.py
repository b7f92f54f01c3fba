"""Replacement for the server and the MoM of PBS, which few machines have, based on records of real OpenPBS 23.06 jobs.

Installs `qsub`, `qstat`, `qdel`, `pbsdsh` and `pbs_tmrsh` in a folder that /etc/pbs.conf names. A job has the two hosts
of `system.hosts`. Recorded and replayed here:

- The job script starts in the home directory, with the recorded variables, and runs under `bash`.
- Tasks have PATH=/bin:/usr/bin, few variables and the home directory; their output goes to the output file of the job,
  through a process that ends at SIGTERM, so that later output is lost.
- The first task of the first host may be the last to connect.
- `pbsdsh` exits with 0 whatever its tasks do. After SIGTERM it passes the signal on, and exits with 1 at once.
- `pbs_tmrsh` runs no shell, and exits with 254 if its first argument is no program.
- What is left of a task whose first process has ended is killed.
- qdel and the walltime send SIGTERM to the session of the script and to the tasks on the first host, and SIGKILL to
  all processes after the kill delay.
- When no process of the script's session is left, tasks on the first host are killed at once, others after 6 s.
- qsub reads directives with quotes, and truncates the output file.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from system.hosts import Hosts

HOSTS = ("rz1", "rz2")
CONFIG = Path("/etc/pbs.conf")
SERVER = "rankzero-tests"
KILL_DELAY_SECONDS, REMOTE_GRACE_SECONDS = 10.0, 6.0
PATH, SCRIPT_PATH = "/bin:/usr/bin", "/usr/local/bin:/usr/bin:/bin"
SCRIPT = {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_MOMPORT": "15003"}
"""Variables of a job script, besides PBS_JOBID and PBS_NODEFILE."""
AS_ROOT = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
"""Variables that the job of a user who is not root lacks."""


def task_variables(line: int, hosts: list[str], node_file: str, job: str) -> dict[str, str]:
    """Returns the variables of the task on one line of the node file; a task on the first host lacks PBS_NODEFILE."""
    machines = list(dict.fromkeys(hosts))
    node = machines.index(hosts[line])
    earlier_tasks = sum(host == hosts[line] for host in hosts[:line])
    number = f"{2 + earlier_tasks:08X}" if node == 0 else f"{node * 0x20000000 + 1 + earlier_tasks:08X}"
    variables = {"PBS_JOBID": job, "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODENUM": str(node), "PBS_TASKNUM": number}
    variables |= {"HOME": os.environ.get("HOME", "/"), "PATH": PATH}
    return variables if node == 0 else variables | {"PBS_NODEFILE": node_file}


def install(hosts: "Hosts", folder: Path) -> Path:
    """Writes the programs for these hosts, and returns the folder that contains them."""
    programs = folder / "exec" / "bin"
    programs.mkdir(parents=True)
    (folder / "server.json").write_text(json.dumps({"enter": str(hosts.folder / "enter")}))
    for name in ("qsub", "qstat", "qdel", "pbsdsh", "pbs_tmrsh"):
        program = programs / name
        line = f'exec {sys.executable} -m system.pbs_server {shlex.quote(str(folder))} {name} "$@"'
        program.write_text(f"#!/bin/sh\nPYTHONPATH={Path(__file__).parents[1]} {line}\n")
        program.chmod(0o755)
    return programs


@contextmanager
def pbs_server(hosts: "Hosts", folder: Path) -> Iterator[Path]:
    """Installs the programs for all processes, and yields the folder that contains them."""
    programs = install(hosts, folder)
    if CONFIG.exists():  # left by a test that was killed
        assert SERVER in CONFIG.read_text(), "this machine has a PBS of its own"
    CONFIG.write_text(f"PBS_SERVER={SERVER}\nPBS_EXEC={folder / 'exec'}\n")
    try:
        yield programs
    finally:
        CONFIG.unlink()
        for file in folder.glob("*.job"):
            job = json.loads(file.read_text())
            if job["state"] != "F":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job["mom"], signal.SIGTERM)


class Job:
    """A job: its file, and the processes that belong to it."""

    def __init__(self, folder: Path, job_id: str) -> None:
        self.folder, self.id = folder, job_id
        self.file = folder / f"{job_id}.job"
        self.tasks_file = folder / f"{job_id}.tasks"
        self.enter = json.loads((folder / "server.json").read_text())["enter"]

    def read(self) -> dict[str, object]:
        content: dict[str, object] = json.loads(self.file.read_text())
        return content

    def update(self, **values: object) -> None:
        content = self.read() if self.file.exists() else {}
        temporary = self.file.with_suffix(".new")
        temporary.write_text(json.dumps({**content, **values}))
        temporary.rename(self.file)

    def start(
        self, host: str, command: list[str], variables: dict[str, str], **options: object
    ) -> "subprocess.Popen[bytes]":
        """Starts a process of the job on a host, in a session of its own, as a MoM does."""
        options |= {"env": variables, "cwd": variables["HOME"], "stdin": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen([self.enter, host, *command], **options)  # type: ignore[call-overload]
        with self.tasks_file.open("a") as file:
            file.write(f"{host} {process.pid}\n")
        return process

    def wait(self, task: "subprocess.Popen[bytes]") -> int:
        """Waits for the first process of a task, kills the others, and returns the exit code."""
        code = task.wait()
        _signal_session(task.pid, signal.SIGKILL)
        return code

    def signal(self, number: int, hosts: tuple[str, ...]) -> None:
        """Signals all processes of the job's sessions on these hosts."""
        for line in self.tasks_file.read_text().splitlines():
            host, session = line.split()
            if host in hosts:
                _signal_session(int(session), number)


def _signal_session(session: int, number: int) -> None:
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == session:
                os.kill(process.pid, number)


def qsub(folder: Path, script: str) -> int:
    text = Path(script).read_text()
    directives = " ".join(re.findall("^#PBS(.*)", text, re.MULTILINE))
    words = shlex.split(directives, comments=False)  # qsub removes both kinds of quotes and expands nothing
    options = dict(zip(words[::2], words[1::2], strict=True))
    resources = dict(re.findall(r"(\w+)=(.*)", word)[0] for word in words if "=" in word and not word.startswith("/"))
    number = len(list(folder.glob("*.job")))
    job = Job(folder, f"{number}.pbs1")
    count, *chunk = resources["select"].split(":")
    processes = int(dict(item.split("=", 1) for item in chunk)["mpiprocs"])
    hosts = [host for host in HOSTS[: int(count)] for _ in range(processes)]
    (folder / f"{job.id}.nodes").write_text("\n".join(hosts) + "\n")
    seconds = sum(int(part) * 60**i for i, part in enumerate(reversed(resources.get("walltime", "0").split(":"))))
    job.update(
        state="Q", walltime=seconds, workdir=str(Path.cwd()), script=text, output=options["-o"], name=options["-N"]
    )
    command = [sys.executable, "-m", "system.pbs_server", str(folder), "mom", job.id]
    with (folder / f"{job.id}.mom").open("w") as log:
        mom = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    job.update(mom=mom.pid)
    print(job.id)
    return 0


def mom(folder: Path, job_id: str) -> int:
    """Runs a job."""
    time.sleep(0.5)
    job = Job(folder, job_id)
    content = job.read()
    (folder / f"{job_id}.SC").write_text(str(content["script"]))
    variables = {**SCRIPT, "PBS_JOBID": job_id, "PBS_NODEFILE": str(folder / f"{job_id}.nodes"), **AS_ROOT}
    variables |= {"PBS_O_WORKDIR": str(content["workdir"]), "TMPDIR": str(folder / f"pbs.{job_id}")}
    variables |= {"HOME": str(folder), "PATH": SCRIPT_PATH, "SHELL": "/bin/bash"}
    Path(variables["TMPDIR"]).mkdir()
    deleted = []
    signal.signal(signal.SIGTERM, lambda *_: deleted.append(time.monotonic()))
    output = os.open(Path(str(content["workdir"]), str(content["output"])), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    script = job.start("rz1", ["/bin/bash", str(folder / f"{job_id}.SC")], variables, stdout=output, stderr=output)
    job.update(state="R", stime=time.time())
    started, ending = time.monotonic(), 0.0
    while script.poll() is None:
        time.sleep(0.05)
        now = time.monotonic()
        if not ending and (deleted or (content["walltime"] and now - started > int(str(content["walltime"])))):
            ending = now
            job.signal(signal.SIGTERM, ("rz1",))
        if ending and now - ending > KILL_DELAY_SECONDS:
            job.signal(signal.SIGKILL, HOSTS)
    job.signal(signal.SIGKILL, ("rz1",))
    time.sleep(REMOTE_GRACE_SECONDS)
    job.signal(signal.SIGKILL, ("rz2",))
    job.update(state="F", exit=script.returncode)
    return 0


def pbsdsh(folder: Path, arguments: list[str]) -> int:
    job = Job(folder, os.environ["PBS_JOBID"])
    hosts = Path(os.environ["PBS_NODEFILE"]).read_text().split()
    lines: Sequence[int] = range(len(hosts))
    if arguments[0] == "-n":
        lines, arguments = [int(arguments[1])], arguments[2:]
    command = arguments[arguments[0] == "--" :]
    tasks = []
    signal.signal(signal.SIGTERM, lambda *_: _relay(tasks))
    output = subprocess.Popen("cat", stdin=subprocess.PIPE)
    for line in reversed(lines):
        if line == 0:
            time.sleep(1)
        variables = task_variables(line, hosts, os.environ["PBS_NODEFILE"], job.id)
        tasks.append(job.start(hosts[line], command, variables, stdout=output.stdin, stderr=output.stdin))
    assert output.stdin
    output.stdin.close()
    for task in tasks:
        if code := job.wait(task):
            print(f"pbsdsh: task 0x00000000 exit status {code}", file=sys.stderr)
    output.wait()
    return 0


def _relay(tasks: "list[subprocess.Popen[bytes]]") -> None:
    """Passes SIGTERM on, and ends pbsdsh while its tasks continue."""
    for task in tasks:
        print("pbsdsh: killing task 0x00000000 signal 15", file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(task.pid, signal.SIGTERM)
    os._exit(1)


def pbs_tmrsh(folder: Path, host: str, *command: str) -> int:
    job = Job(folder, os.environ["PBS_JOBID"])
    variables = {"PBS_JOBID": job.id, "HOME": str(folder), "PATH": PATH, **AS_ROOT}
    return job.wait(job.start(host, [*command], variables)) if shutil.which(command[0]) else 254


def qstat(folder: Path, *arguments: str) -> int:
    job = Job(folder, arguments[-1])
    if not job.file.exists():
        print(f"qstat: Unknown Job Id {arguments[-1]}", file=sys.stderr)
        return 153
    content = job.read()
    rows = {"Job_Name": content["name"], "job_state": content["state"], "exec_host": "rz1/0*2+rz2/0*2"}
    if content["walltime"]:
        rows["Resource_List.walltime"] = time.strftime("%H:%M:%S", time.gmtime(int(str(content["walltime"]))))
    if "stime" in content:
        rows["stime"] = time.asctime(time.gmtime(float(str(content["stime"]))))
    print(f"Job Id: {job.id}\n" + "\n".join(f"    {name} = {value}" for name, value in rows.items()))
    return 0


def qdel(folder: Path, job_id: str) -> int:
    os.kill(int(str(Job(folder, job_id).read()["mom"])), signal.SIGTERM)
    return 0


if __name__ == "__main__":
    server, program, *rest = sys.argv[1:]
    run = {"qsub": qsub, "mom": mom, "qstat": qstat, "qdel": qdel, "pbs_tmrsh": pbs_tmrsh}.get(program)
    sys.exit(run(Path(server), *rest) if run else pbsdsh(Path(server), rest))  # type: ignore[operator]
