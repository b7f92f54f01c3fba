import shlex
from pathlib import Path

import pytest

from job_requests import MPIRUN, SLURM, refusal, request
from rankzero.commands.jobs.request.combined import hosts_in
from rankzero.commands.jobs.request.job_request import FORMS, JobRequest


def test_a_minimal_job_has_the_defaults_of_the_request_and_the_first_form_of_its_scheduler():
    for scheduler, form in {"slurm": "srun", "local": None, "pbs": "pbsdsh", "mpirun": "openmpi"}.items():
        assert request(f"--scheduler={scheduler}", "--name=x") == JobRequest(scheduler, "x", form)


def test_a_job_without_scheduler_or_name_is_refused():
    asked, found, instead = refusal("--name", "x")
    assert asked == "a job without --scheduler" and instead == "--scheduler slurm"
    assert all(scheduler in found for scheduler in FORMS)
    assert refusal("--scheduler", "slurm")[::2] == ("a job without --name", "--name my-run")


REFUSED = [
    ("slurm --form pbsdsh", "--form pbsdsh with --scheduler slurm", "its forms are srun, torchrun", "--form srun"),
    (
        *("pbs --form srun", "--form srun with --scheduler pbs", "its forms are pbsdsh, torchrun, mpirun"),
        "--form pbsdsh",
    ),
    ("local --form srun", "--form srun with --scheduler local", "local has only one form", "leave --form out"),
    ("local --nodes 2", "--nodes 2 with --scheduler local", "it is one machine", "--scheduler ssh --hosts n1,n2"),
    ("ssh", "1 machines (--nodes 1)", "ssh does not choose machines", "--hosts n1"),
    *(
        (
            f"{scheduler} --{flag} {value}",
            f"--{flag} with --scheduler {scheduler}",
            f"{scheduler.split()[0]} has no such option",
            instead,
        )
        for scheduler, flag, value, instead in (
            ("slurm", "hosts", "n1", "--extra"),
            ("pbs", "exclude", "n1", "--extra"),
            ("local", "partition", "gpu", "leave --partition out"),
            ("ssh", "hostfile", "f", "leave --hostfile out"),
            ("mpirun", "array", "0-3", "leave --array out"),
        )
    ),
    (
        *("apptainer --image x --memory 1G", "--memory with --scheduler apptainer", "apptainer has no such option"),
        "leave --memory out",
    ),
    *(
        (
            f"{scheduler} --image i --venv .venv",
            *("--venv with --image", "the image contains its own Python", "leave --venv out"),
        )
        for scheduler in ("slurm", "ssh", "docker")
    ),
    *(
        (scheduler, f"--scheduler {scheduler}", "the container image is missing", "--image IMAGE")
        for scheduler in ("docker", "apptainer")
    ),
    *(
        (f"{scheduler} --extra {shlex.quote(line)}", f"--extra {shlex.quote(line)}", found, "")
        for scheduler, line, found in (
            ("slurm", "#PBS -q x", "slurm ignores a line that begins with #PBS"),
            ("pbs", "#SBATCH --qos=x", "pbs ignores a line that begins with #SBATCH"),
            ("slurm", "#SBATCH --nodes=8", "the script itself sets --nodes"),
            ("slurm", "#SBATCH -a 0-3", "the script itself sets -a"),
            ("slurm", "#SBATCH -N4", "the script itself sets -N"),
            ("slurm", "#SBATCH --qos=high --nodes=4", "the script itself sets --nodes"),
            ("pbs", "#PBS -l select=4", "the script itself sets -l select"),
            ("pbs", "#PBS -Nfoo", "the script itself sets -N"),
            ("pbs", "#PBS -l walltime=1:00:00,select=4", "the script itself sets -l walltime=1:00:00,select"),
        )
    ),
]
"""Scheduler and options -> the parts of the error; the last one is the beginning of what to type."""


@pytest.mark.parametrize(("options", "asked", "found", "instead"), REFUSED, ids=[row[0] for row in REFUSED])
def test_an_option_that_does_not_fit_the_others_is_refused(options, asked, found, instead):
    error = refusal("--name", "x", "--scheduler", *shlex.split(options))
    assert error[:2] == (asked, found) and error[2].startswith(instead)


@pytest.mark.parametrize("scheduler", ["local", "ssh", "mpirun"])
def test_gpus_are_requested_from_a_queue_or_for_a_container_only(scheduler):
    tokens = ("--scheduler", scheduler, "--name", "x", "--hosts" if scheduler != "local" else "--setup", "n1")
    asked, found, _ = refusal(*tokens, "--gpus_per_device", "1")
    assert asked == f"--gpus_per_device with --scheduler {scheduler}" and "the GPUs that they find" in found
    assert request(*tokens, "--gpus_per_device", "1", "--image", "i").gpus_per_device == 1


@pytest.mark.parametrize("flag", ["root", "venv", "hostfile", "image"])
def test_a_path_that_the_shell_has_not_expanded_is_refused(flag):
    scheduler = MPIRUN if flag == "hostfile" else SLURM
    asked, found, typed = refusal(*scheduler, f"--{flag}=~/my runs")
    assert (asked, found) == (f"--{flag} ~/my runs", "the shell has not expanded ~")
    assert typed == f"--{flag} {shlex.quote(str(Path.home() / 'my runs'))}"


def test_the_number_of_nodes_is_the_number_of_hosts_unless_fewer_are_requested():
    ssh = ("--scheduler", "ssh", "--name", "x")
    job = request(*ssh, "--hosts", "n1,n2,n3")
    assert (job.nodes, job.hosts) == (3, ("n1", "n2", "n3"))
    job = request(*ssh, "--hosts", "n1,n2,n3", "--nodes", "2")
    assert (job.nodes, job.hosts) == (2, ("n1", "n2"))


@pytest.mark.parametrize("scheduler", ["ssh", "mpirun", "docker", "apptainer"])
def test_too_few_hosts_are_refused(scheduler):
    image = () if scheduler in ("ssh", "mpirun") else ("--image", "i")
    tokens = ("--scheduler", scheduler, "--name", "x", "--nodes", "3", *image)
    asked, found, instead = refusal(*tokens, "--hosts", "n1,n2")
    assert (asked, found) == ("3 machines (--nodes 3)", "--hosts lists 2: n1, n2") and instead == "--hosts n1,n2,n3"
    assert refusal(*tokens)[1] == f"{scheduler} does not choose machines"


def test_one_machine_without_a_list_of_hosts_is_this_one():
    for scheduler in ("mpirun", "docker", "apptainer", "local"):
        image = ("--image", "i") if scheduler in ("docker", "apptainer") else ()
        job = request("--scheduler", scheduler, "--name", "x", "--devices", "2", *image)
        assert (job.nodes, job.hosts) == (1, ())


def test_a_hostfile_lists_machines_in_order_and_once(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two machines\nn2 slots=4\n\n  n1:4  # fast\nn2 slots=2\n#n3\n")
    assert hosts_in(file) == ("n2", "n1")
    job = request(*MPIRUN, "--hostfile", str(file))
    assert (job.nodes, job.hosts, job.hostfile) == (2, ("n2", "n1"), str(file))
    assert request(*MPIRUN, "--hostfile", str(file), "--nodes", "1").hosts == ("n2",)
    assert refusal(*MPIRUN, "--hostfile", str(file), "--nodes", "3")[1] == "--hostfile lists 2: n2, n1"


def test_a_wrong_hostfile_is_refused(tmp_path):
    file = tmp_path / "hosts"
    assert refusal(*MPIRUN, "--hostfile", str(file)) == (
        f"--hostfile {file}",
        "cannot read this file: No such file or directory",
        "--hosts n1,n2",
    )
    assert refusal(*MPIRUN, "--hostfile", str(tmp_path))[1] == "cannot read this file: Is a directory"
    file.write_bytes(b"\xff\xfe")
    assert refusal(*MPIRUN, "--hostfile", str(file))[1] == "cannot read this file: not a text file"
    for content in ("n1\n$(touch PWNED)\n", "-x\n", "a b;c\nn1/x\n"):
        file.write_text(content)
        assert refusal(*MPIRUN, "--hostfile", str(file))[1] == "a line does not begin with a host name"
    file.write_text("# nothing\n\n")
    assert refusal(*MPIRUN, "--hostfile", str(file))[1] == "it names no machine"
    file.write_text("n1\n")
    found = refusal(*MPIRUN, "--hosts", "n1", "--hostfile", str(file))
    assert found[:2] == ("--hosts and --hostfile", "both list machines")


@pytest.mark.parametrize(
    ("tokens", "instead"),
    [
        (("--array", "1,5,9"), "--array 0-3"),
        (("--array", "3"), "--array 0-3"),
        (("--constraint", "a100"), "--constraint gpu_type=a100"),
    ],
)
def test_values_that_pbs_does_not_accept_are_refused(tokens, instead):
    assert refusal("--scheduler", "pbs", "--name", "x", *tokens)[2] == instead
    assert request(*SLURM, *tokens)
