"""Runs scripts whose arguments and paths are hostile strings, with stand-ins for the programs of a cluster."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest
import yaml

from rankzero.jobs.options import JobRequest
from rankzero.jobs.script import render, script_path
from running import wait_until, write_program

PARTS = (
    *("'", '"', " ", "  ", "\\", "\\\\", "\n", "\t", "$", "$HOME", "$1", "${x}", "$(touch PWNED)", "`touch PWNED`"),
    *("`", "-", "--", "-n", "*", "?", "[a-z]", "{a,b}", "é", "漢", "🙂", "\u2028", "END_OF_TASK", "\nEND_OF_TASK\n"),
    *("&", "&&", ";", "|", "||", "#", "!", "~", "%j", "%", "<", ">", "(", ")", "=", "'\\''", "\r", "\x01", "\x7f"),
    *("{array_index}", "{{ name }}", "touch PWNED", "\ntouch PWNED\n", "a", "b", "0"),
)
SCRIPTS, STRINGS = 2, 20
"""Scripts per job, and hostile arguments per script."""

JOBS = {
    "srun": JobRequest("slurm", "x", "srun", cpus_per_device=2, gpus_per_device=1),
    "srun array": JobRequest("slurm", "x", "srun", array="0-3"),
    "srun image": JobRequest("slurm", "x", "srun", image="i.sif"),
    "slurm torchrun": JobRequest("slurm", "x", "torchrun", nodes=2),
    "pbsdsh": JobRequest("pbs", "x", "pbsdsh"),
    "pbsdsh array": JobRequest("pbs", "x", "pbsdsh", array="0-3"),
    "pbsdsh image": JobRequest("pbs", "x", "pbsdsh", image="i.sif"),
    "pbs torchrun": JobRequest("pbs", "x", "torchrun"),
    "pbs torchrun array": JobRequest("pbs", "x", "torchrun", array="0-3"),
    "pbs mpirun": JobRequest("pbs", "x", "mpirun"),
    "lsf mpirun": JobRequest("lsf", "x", "mpirun"),
    "lsf mpirun array": JobRequest("lsf", "x", "mpirun", array="1-3"),
    "lsf jsrun": JobRequest("lsf", "x", "jsrun", cpus_per_device=2),
    "lsf jsrun array": JobRequest("lsf", "x", "jsrun", array="1-3"),
    "flux": JobRequest("flux", "x", time=60),
    "openmpi": JobRequest("mpirun", "x", "openmpi", nodes=2, hosts=("n1", "n2")),
    "mpich": JobRequest("mpirun", "x", "mpich"),
    "ssh": JobRequest("ssh", "x", nodes=2, hosts=("n1", "user@n2")),
    "docker": JobRequest("docker", "x", image="i"),
    "docker on two machines": JobRequest("docker", "x", nodes=2, hosts=("n1", "n2"), image="i"),
    "apptainer on one machine by ssh": JobRequest("apptainer", "x", hosts=("n1",), image="i.sif"),
    "local": JobRequest("local", "x"),
}

RECORDER = """\
#!{python} -ISXutf8
import json, os, sys
with open(os.path.dirname(os.path.realpath(__file__)) + "/records", "a") as file:
    file.write(json.dumps([os.getcwd(), *sys.argv]) + "\\n")
"""

STAND_INS = {
    "srun": 'while case $1 in --*) true ;; *) false ;; esac; do shift; done; exec "$@"',
    "scontrol": "echo n1; echo n2",
    "jsrun": 'while case $1 in -?) true ;; *) false ;; esac; do shift 2; done; exec "$@"',
    "flux": 'shift; while case $1 in --*) true ;; *) false ;; esac; do shift; done; exec "$@"',
    "mpirun": 'until [ "$1" = /bin/bash ]; do shift; done; cd "$HOME"; exec "$@"',
    "mpiexec.hydra": 'until [ "$1" = /bin/bash ]; do shift; done; cd "$HOME"; exec "$@"',
    # A task of PBS has almost no variables.
    "pbsdsh": 'shift; cd "$HOME"; exec env -i PBS_JOBID="$PBS_JOBID" HOME="$HOME" PATH=/bin:/usr/bin "$@"',
    # sshd gives the command line to the user's shell.
    "ssh": 'until [ "$1" = -- ]; do shift; done; shift 2; cd "$HOME"; exec env -i HOME="$HOME" sh -c "$*"',
    **dict.fromkeys(
        ("docker", "apptainer"),
        'until [ "$1" = -- ]; do case $1 in --workdir=* | --pwd=*) cd -- "${1#*=}" ;; esac; shift; done\n'
        'shift 2; exec "$@"',
    ),
}


def hostile_strings(generator):
    """Yields strings without NUL, which no argument can contain."""
    while True:
        yield "".join(generator.choices(PARTS, k=generator.randrange(9)))


def as_folder_name(text, request):
    """Returns a hostile string as the name of a folder, which the job's container can mount."""
    text = text.replace("{array_index}", "{}")
    if request.image:
        text = "".join(character for character in text if character.isprintable() and character not in ":,")
    return f"{text}_" if text in ("", ".", "..") else text


@pytest.fixture
def machine(tmp_path):
    """Installs the stand-ins, and returns the variables of a job."""
    programs, home = tmp_path / "programs", tmp_path / "home"
    programs.mkdir()
    home.mkdir()
    for name, line in {**STAND_INS, "module": ":"}.items():
        write_program(programs / name, line)
    write_program(programs / "python", "").write_text(RECORDER.format(python=sys.executable))
    path = f"{programs}:/usr/bin:/bin"
    (home / ".bash_profile").write_text(f"PATH={path}\n")  # /etc/profile sets another PATH
    (tmp_path / "nodes").write_text("n1\nn2\n")
    variables = {"PATH": path, "HOME": str(home), "TMPDIR": str(tmp_path), "LC_ALL": "C.UTF-8", "SLURM_JOB_ID": "12"}
    queued = {"SLURM_JOB_NODELIST": "n[1-2]", "PBS_JOBID": "15[3].pbs1", "PBS_NODEFILE": str(tmp_path / "nodes")}
    queued["LSB_DJOB_HOSTFILE"] = str(tmp_path / "nodes")
    return variables | queued


@pytest.mark.parametrize("job", JOBS)
def test_hostile_strings_reach_the_program_unchanged(tmp_path, machine, job):
    request = JOBS[job]
    generator = random.Random(18 + 1000 * list(JOBS).index(job))
    strings = hostile_strings(generator)
    for attempt in range(SCRIPTS):
        base = tmp_path / f"attempt-{attempt}"
        names = (as_folder_name(next(strings), request) for _ in count())
        folder, root = base / next(names), f"{next(names)}/{next(names)}"
        python = base / "venv" / next(names)
        arguments = [next(strings) for _ in range(STRINGS)]
        modules = tuple(filter(str.isprintable, arguments[:5]))
        for path in (folder, folder / root, python.parent):
            path.mkdir(parents=True, exist_ok=True)
        python.symlink_to(tmp_path / "programs" / "python")
        program = ["python", "-m", "rankzero", "fit"] if request.image else [str(python), str(base / next(names))]
        complete = replace(request, root=root, modules=modules, arguments=tuple(arguments))
        check_script(complete, program, folder, machine, tmp_path)
    assert not list(tmp_path.rglob("PWNED"))


def check_script(request, program, folder, variables, base):
    """Runs the script of a job, and checks what the program got."""
    root = folder / request.root
    records = base / "programs" / "records"
    records.unlink(missing_ok=True)
    if request.array:
        variables = {**variables, "SLURM_ARRAY_TASK_ID": "3", "PBS_ARRAY_INDEX": "3", "LSB_JOBINDEX": "3"}
    script = write_script(request, program, folder)
    ran = run_script(script, base, variables)
    # Without a summary of the run, a job of PBS fails.
    is_pbs = request.scheduler == "pbs"
    without_summary = "no process began to train, or all were killed before the run could stop\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == ((1, "", without_summary) if is_pbs else (0, "", "")), script
    found = sorted(map(json.loads, records.read_text().splitlines()), key=str)
    index = "3" if request.array else "{array_index}"
    own = [f"--name=x{'-3' if request.array else ''}", f"--root={root}", f"--nodes={request.nodes}", "--devices=1"]
    own += ["--accelerator=gpu"] if request.gpus_per_device else []
    own += ["--requeue=never"] if is_pbs else []
    expected = [*own, *(argument.replace("{array_index}", index) for argument in request.arguments)]
    by_ssh = request.hosts and request.scheduler != "mpirun"
    assert len(found) == (request.nodes if by_ssh else 1)
    for node, (cwd, executable, *got) in enumerate(found):
        assert cwd == os.fspath(folder) and Path(executable).name == Path(program[0]).name
        if request.form == "torchrun":
            assert got[:2] == ["-m", "torch.distributed.run"]
            address = f"n1:{20012 if request.scheduler == 'slurm' else 20015 + (3 if request.array else 0)}"
            assert f"--rdzv-endpoint={address}" in got
            got = got[got.index("--shutdown-timeout=120") + 1 :]
        ends = [f"--node_rank={node}", "--master_addr=n1", got[-1]] if by_ssh else []
        assert got == [*program[1:], *expected, *ends]
        assert not by_ssh or got[-1].startswith("--master_port=")


def write_script(request, program, folder):
    """Writes the script of a job into the folder of its runs, and returns its path."""
    script = script_path(folder / request.root, request.name)
    script.parent.mkdir(exist_ok=True)
    script.write_text(render(request, program, folder))
    return script


def run_script(script, folder, variables):
    command = ["bash", script]
    return subprocess.run(command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.fixture
def script_of(tmp_path):
    """Returns a function that writes the script of a job whose program is a script of sh, and returns its path."""

    def write(request, program, folder=tmp_path):
        return write_script(request, [str(write_program(tmp_path / "fit", program)), "fit.py"], folder)

    return write


STOPS = "sleep 0.05; mkdir -p runs/x; echo '{}' >runs/x/summary.json"
"""Training writes a summary after the job has begun, and stops."""


@pytest.mark.parametrize("form", ["pbsdsh", "torchrun", "mpirun"])
def test_a_stopped_job_of_pbs_submits_its_script_again(tmp_path, machine, script_of, form):
    folder = tmp_path / "$(touch PWNED) 'a' \\ \n"
    folder.mkdir()
    write_program(tmp_path / "programs" / "qsub", 'pwd >"$HOME/folder"; printf %s "$*" >"$HOME/script"; echo 16.pbs1')
    summary = STOPS.format('{"status": "stopped", "another_attempt": true}')
    script = script_of(JobRequest("pbs", "x", form), summary, folder)
    root = script.parent
    (root / "x.job.log").write_text("output of the first job\n")
    ran = run_script(script, tmp_path, {**machine, "PBS_JOBID": "15.pbs1"})
    assert (ran.returncode, ran.stdout, ran.stderr) == (75, "", "")
    assert (root / ".x.job.next").read_text() == "16.pbs1\n"
    assert (tmp_path / "home" / "script").read_text() == str(script)
    assert (tmp_path / "home" / "folder").read_text() == f"{root}\n"
    assert (root / "x.job.log.15.pbs1").read_text() == "output of the first job\n"
    assert not (root / "x.job.log").exists() and not list(tmp_path.rglob("PWNED"))


AGAIN, OVER = '{"another_attempt": true}', '{"another_attempt": false}'
STOPPED = "mkdir -p runs/x; echo '{}' >runs/x/summary.json; {}exit 75"
"""A stop; the placeholder may be a signal to the script before the end."""


@pytest.mark.parametrize(
    ("summary", "signal", "code"),
    [
        (AGAIN, "", 75),
        (AGAIN, "kill -USR1 $PPID; sleep 0.1; ", 75),
        (OVER, "", 1),
        (AGAIN, "kill -TERM $PPID; sleep 0.1; ", 1),
    ],
    ids=["stopped", "stopped by a warning", "another attempt would not help", "canceled"],
)
@pytest.mark.parametrize("request_", [JobRequest("lsf", "x", "jsrun"), JobRequest("flux", "x")], ids=["lsf", "flux"])
def test_a_stopped_job_of_lsf_or_flux_is_started_again(tmp_path, machine, script_of, request_, summary, signal, code):
    flux = f'case $1 in run) {STAND_INS["flux"]} ;; esac; echo "$*" >{tmp_path}/again; echo ƒ2'
    write_program(tmp_path / "programs" / "flux", flux)
    script = script_of(request_, STOPPED.replace("{}", summary, 1).replace("{}", signal))
    ran = run_script(script, tmp_path, machine)
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "", "")
    again = request_.scheduler == "flux" and code == 75  # LSF itself requeues the job after code 75
    assert not again or (tmp_path / "again").read_text() == f"--parent batch {script}\n"
    assert not again or (script.parent / ".x.job.next").read_text() == "ƒ2\n"
    assert again or not (tmp_path / "again").exists()


@pytest.mark.parametrize("request_", [JobRequest("lsf", "x", "mpirun"), JobRequest("flux", "x")], ids=["lsf", "flux"])
def test_a_finished_or_failed_job_of_lsf_or_flux_ends_with_the_code_of_the_run(machine, tmp_path, script_of, request_):
    for code in (0, 1, 2):
        assert run_script(script_of(request_, f"exit {code}"), tmp_path, machine).returncode == code


def test_hostile_strings_reach_the_program_of_a_trainjob_unchanged(tmp_path, machine):
    arguments = tuple(islice(hostile_strings(random.Random(21)), STRINGS))
    request = JobRequest("kubernetes", "x", image="i", setup=("a='\t' ; : $a",), arguments=arguments)
    container = yaml.safe_load(render(request, ["python", "-m", "rankzero", "fit"], tmp_path))["spec"]["trainer"]
    text = container["args"][0].replace("cd -- /workspace", f"cd -- {tmp_path}", 1)
    ran = subprocess.run([*container["command"], text], env=machine, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    (found,) = map(json.loads, (tmp_path / "programs" / "records").read_text().splitlines())
    assert found[-STRINGS:] == list(arguments) and "--root=/workspace/runs" in found
    assert not list(tmp_path.rglob("PWNED"))


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("failed", 1)])
def test_an_ended_job_of_pbs_submits_nothing(tmp_path, machine, script_of, status, code):
    script = script_of(JobRequest("pbs", "x", "pbsdsh"), STOPS.format(f'{{"status": "{status}"}}'))
    ran = run_script(script, tmp_path, machine)
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "", "")
    assert not (tmp_path / "runs" / ".x.job.next").exists()


@pytest.mark.parametrize("form", ["pbsdsh", "torchrun", "mpirun"])
def test_a_job_of_pbs_ends_with_its_launcher(tmp_path, machine, form):
    script = write_script(JobRequest("pbs", "x", form), ["true", "fit.py"], tmp_path)
    for code in (0, 1, 75, 139):  # 139: a process got SIGSEGV
        for name in ("pbsdsh", "mpirun"):
            write_program(tmp_path / "programs" / name, f"exit {code}")
        assert run_script(script, tmp_path, machine).returncode == 1


def test_the_exit_code_of_a_job_on_several_hosts_is_that_of_the_failed_host(tmp_path, machine, script_of):
    fit = (
        'trap "touch stopped; exit 75" TERM\n'
        "case $* in *node_rank=1*) until [ -e begun ]; do sleep 0.02; done; exit 3 ;; esac\n"
        "touch begun; while :; do sleep 0.02; done"
    )
    script = script_of(JobRequest("ssh", "x", nodes=2, hosts=("n1", "n2")), fit)
    assert run_script(script, tmp_path, machine).returncode == 3 and (tmp_path / "stopped").exists()


@pytest.mark.parametrize("hosts", [("n1",), ("n1", "n2")])
def test_sigterm_to_a_job_on_hosts_stops_the_run_on_each(tmp_path, machine, script_of, hosts):
    fit = (
        'trap "touch stopped$6; exit 75" TERM\nset -- x x x x x $(echo "$*" | grep -o "node_rank=.")\n'
        'touch "begun$6"; while :; do sleep 0.02; done'
    )
    script = script_of(JobRequest("ssh", "x", nodes=len(hosts), hosts=hosts), fit)
    with subprocess.Popen(["bash", script], cwd=tmp_path, env=machine, stdin=subprocess.DEVNULL) as process:
        wait_until(lambda: len(list(tmp_path.glob("begun*"))) == len(hosts))
        process.terminate()
        assert process.wait() == 75
    assert len(list(tmp_path.glob("stopped*"))) == len(hosts)
