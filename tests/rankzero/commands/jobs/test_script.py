"""The scripts of jobs. To record them anew, run these tests with RANKZERO_RECORD_SCRIPTS=1."""

import os
import random
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rankzero.commands.jobs.request.job_request import FORMS, JobRequest
from rankzero.commands.jobs.request.options import accepted_flags, is_queuing
from rankzero.commands.jobs.script import clock, pbs_job_name, pbs_value, render, shell_argument, slurm_value
from rankzero.messages import RequestError
from running import require

RECORDED = Path(__file__).with_name("recorded")
FOLDER = Path("/home/user/project")
PROGRAM = ["/home/user/project/.venv/bin/python", "/home/user/project/launch/fit.py"]
IMAGE_PROGRAM = ["python", "-m", "rankzero", "fit"]
ARGUMENTS = ("--model", "ResNet", "--model.hidden_sizes", "[8, 8]")

OPTIONS = {
    "root": "my runs",
    "nodes": 2,
    "devices": 4,
    "cpus_per_device": 8,
    "gpus_per_device": 1,
    "memory": "64G",
    "time": 7200,
    "partition": "gpu",
    "account": "my project",
    "constraint": "a100",
    "exclude": "n7,n8",
    "mail": "me@example.org",
    "dependency": "afterok:123",
    "modules": ("cuda/12.4", "gcc"),
    "setup": ("source settings.sh", "export NCCL_DEBUG=INFO"),
    "venv": ".venv",
    "hosts": ("n1", "user@n2"),
}
EXTRA = {"slurm": ("#SBATCH --exclusive",), "pbs": ("#PBS -r n",)}


def _cases():
    """Yields the names and requests of the recorded scripts."""
    for scheduler, forms in FORMS.items():
        for form in forms or (None,):
            start = f"{scheduler}-{form}" if form else scheduler
            accepted = accepted_flags(scheduler, has_image=scheduler in ("docker", "apptainer"))
            needed = {"ssh": {"hosts": ("n1",)}, "docker": {"image": "rankzero"}, "apptainer": {"image": "image.sif"}}
            minimal = JobRequest(scheduler, "my-run", form, **needed.get(scheduler, {}), arguments=ARGUMENTS)
            values = {name: value for name, value in OPTIONS.items() if name in accepted}
            values["extra"] = EXTRA.get(scheduler, ())
            values["nodes"] = 1 if scheduler == "local" else 2
            complete = replace(minimal, **values)
            yield f"{start}-minimal", minimal
            yield f"{start}-all", complete
            if "array" in accepted:
                sweep = (*ARGUMENTS, "--seed={array_index}", "--model.lr", "0.{array_index}")
                yield f"{start}-array", replace(complete, array="0-3", dependency=None, arguments=sweep)
            if "hostfile" in accepted:
                yield f"{start}-hostfile", replace(complete, hostfile="my hosts.txt")
            if scheduler in ("docker", "apptainer"):
                yield f"{start}-one-machine", replace(complete, hosts=(), nodes=1)
            else:
                yield f"{start}-image", replace(complete, image="image.sif", venv=None, gpus_per_device=1)


CASES = dict(_cases())
SLURM = [name for name in CASES if name.startswith("slurm")]
PBS = [name for name in CASES if name.startswith("pbs")]
WITHOUT_QUEUE = [name for name in CASES if not is_queuing(CASES[name].scheduler)]


def script(request, **options):
    return render(request, IMAGE_PROGRAM if request.image else PROGRAM, FOLDER, **options)


def text_of(name, **changes):
    return script(replace(CASES[name], **changes))


def last_command(name, **changes):
    """Returns the words of the last command of a script."""
    return shlex.split(text_of(name, **changes).replace("\\\n", "").splitlines()[-1])


def directives(text):
    """Returns the option -> value of the lines for the scheduler."""
    lines = re.findall(r"^#(?:SBATCH (--[a-z-]+)=?|PBS (-l [a-z]+=|-\w) ?)(.*)$", text, re.MULTILINE)
    return {(slurm or pbs.removeprefix("-l ").rstrip("=")): value for slurm, pbs, value in lines}


@pytest.mark.parametrize("name", CASES)
def test_the_script_equals_the_recorded_one(name):
    file = RECORDED / f"{name}.sh"
    text = script(CASES[name])
    if os.environ.get("RANKZERO_RECORD_SCRIPTS") == "1":
        RECORDED.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_each_recorded_script_belongs_to_a_case():
    assert sorted(path.name for path in RECORDED.iterdir()) == sorted(f"{name}.sh" for name in CASES)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(("-all", "-image", "-one-machine"))])
def test_each_accepted_option_changes_the_script(name):
    """`venv` changes the path of Python, which `submit` passes to `render`."""
    job = CASES[name]
    flags = set(accepted_flags(job.scheduler, job.image is not None))
    flags -= {"scheduler", "name", "form", "venv", "array", "image", "hosts", "hostfile", "nodes"}
    for flag in flags - (set() if is_queuing(job.scheduler) else {"extra"}):
        without = replace(job, **{flag: getattr(JobRequest("slurm", ""), flag)})
        assert script(without) != script(job), flag


@pytest.mark.parametrize("scheduler", FORMS)
def test_bash_accepts_the_syntax_of_each_script(scheduler):
    for name in CASES:
        if CASES[name].scheduler == scheduler:
            checked = subprocess.run(["bash", "-n"], input=script(CASES[name]), capture_output=True, text=True)
            assert (checked.returncode, checked.stderr) == (0, ""), name


@pytest.mark.system
def test_shellcheck_has_no_complaint():
    require("shellcheck")
    files = sorted(map(str, RECORDED.iterdir()))
    # SC1091: the user's `source settings.sh` does not exist here
    checked = subprocess.run(["shellcheck", "--exclude=SC1091", *files], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_scripts_have_no_trailing_spaces_and_no_text_of_the_template():
    for text in map(script, CASES.values()):
        assert text.startswith("#!/bin/bash\n") and text.endswith("\n") and not text.endswith("\n\n")
        assert not re.search(r"[ \t]$|\n\n\n|\{\{|\{%|None|True", text, re.MULTILINE)
        assert "{array_index}" not in text


def test_the_processes_of_slurm_get_the_requested_cores():
    for form, cores in (("srun", 8), ("torchrun", 32)):
        text = text_of(f"slurm-{form}-all")
        assert directives(text)["--cpus-per-task"] == str(cores)
        assert f" --cpus-per-task={cores} " in re.search(r"^exec srun .*$", text, re.MULTILINE)[0]
        assert "export OMP_NUM_THREADS=8\n" in text
        minimal = text_of(f"slurm-{form}-minimal")
        assert "--cpus-per-task=" not in minimal and "OMP_NUM_THREADS" not in minimal


def test_slurm_ends_the_job_when_a_process_fails_and_appends_to_the_log():
    for text in map(text_of, SLURM):
        found = directives(text)
        assert found["--wait-all-nodes"] == "1" and found["--open-mode"] == "append" and found["--requeue"] == ""
        assert re.search(r"^exec srun .*--kill-on-bad-exit=1 ", text, re.MULTILINE)


def test_slurm_expedites_a_requeue_only_if_it_can():
    expedited = script(CASES["slurm-srun-minimal"], expedite=True)
    assert "#SBATCH --requeue=expedite\n" in expedited
    assert expedited.replace("=expedite", "") == text_of("slurm-srun-minimal")


@pytest.mark.parametrize(("time", "warning"), [(None, 120), (86400, 120), (480, 120), (476, 119), (60, 15), (1, 0)])
def test_slurm_signals_the_job_before_its_time_limit(time, warning):
    assert directives(text_of("slurm-srun-minimal", time=time))["--signal"] == f"USR1@{warning}"


def test_a_process_of_slurm_sees_all_gpus_of_its_machine():
    text = text_of("slurm-srun-all")
    assert directives(text)["--gpus-per-node"] == "4" and " --gpu-bind=none " in text
    assert "gpu" not in text_of("slurm-srun-minimal")
    assert "gpu-bind" not in text_of("slurm-torchrun-all")  # torchrun's one task sees them anyway


def test_pbs_puts_each_chunk_on_its_own_machine_and_runs_bash():
    for name in PBS:
        found, request = directives(text_of(name)), CASES[name]
        assert found["place"] == "scatter" and found["-S"] == "/bin/bash" and found["-j"] == "oe"
        processes = 1 if request.form == "torchrun" else request.devices
        assert found["select"].startswith(f"{request.nodes}:ncpus=") and f":mpiprocs={processes}" in found["select"]


def test_pbs_gets_the_resources_of_a_chunk():
    assert directives(text_of("pbs-pbsdsh-all"))["select"] == "2:ncpus=32:mpiprocs=4:ngpus=4:mem=64gb:a100"
    assert directives(text_of("pbs-torchrun-minimal"))["select"] == "1:ncpus=1:mpiprocs=1"
    assert directives(text_of("pbs-pbsdsh-all"))["walltime"] == "02:00:00"


def test_without_a_queue_the_run_ends_itself_at_the_time_limit():
    for name in WITHOUT_QUEUE:
        assert text_of(name, time=5400).count(" --time_limit=5400s ") == 1
        assert "--time_limit" not in text_of(name, time=None)


def test_with_a_queue_the_time_limit_is_the_schedulers():
    for name in SLURM + PBS:
        text = text_of(name, time=5400)
        assert "01:30:00" in directives(text).values() and "--time_limit" not in text


@pytest.mark.parametrize("name", [name for name in SLURM + PBS if name.endswith("-array")])
def test_each_member_of_an_array_has_its_own_name_and_arguments(name):
    text = text_of(name)
    assert '--name=my-run-"$array_index" ' in text and '--seed="$array_index" ' in text and '0."$array_index"' in text
    assert len(re.findall(r"^array_index=\$", text, re.MULTILINE)) == 1


def test_the_placeholder_of_an_array_is_literal_without_an_array():
    text = text_of("slurm-srun-minimal", arguments=("--seed={array_index}",))
    assert "'--seed={array_index}'" in text and "array_index=" not in text


@pytest.mark.parametrize(
    ("root", "log"),
    [
        ("runs", "/home/user/project/runs/my-run.job.log"),
        ("/a b", '"/a b/my-run.job.log"'),
        ("/100%j", "/100%%j/my-run.job.log"),
        ("/a:b", "/a:b/my-run.job.log"),
        ("/a\\b", r'"/a\\\\b/my-run.job.log"'),  # twice: in the quotes, and in a file name of sbatch
        ("/a\nb", "my-run.job.log"),
        ("/a\x1bb", "my-run.job.log"),
    ],
)
def test_slurm_writes_the_log_to_the_folder_of_the_runs(root, log):
    text = text_of("slurm-srun-minimal", root=root)
    assert directives(text)["--output"] == log
    assert directives(text_of("slurm-srun-minimal", root=root, array="0-3"))["--output"] == log.replace(
        "job.log", "job-%a.log"
    )


@pytest.mark.parametrize(
    ("root", "log"),
    [
        ("runs", "/home/user/project/runs/my-run.job.log"),
        ("/a b'c", "'/a b'\"'\"'c/my-run.job.log'"),
        ("/100%j", "/100%j/my-run.job.log"),
        ("/a\nb", "my-run.job.log"),
        ("/a:b", "my-run.job.log"),
    ],
)
def test_pbs_writes_the_log_to_the_folder_of_the_runs(root, log):
    assert directives(text_of("pbs-pbsdsh-minimal", root=root))["-o"] == log


def test_pbs_writes_one_log_per_member_of_an_array():
    found = directives(text_of("pbs-pbsdsh-array", root="/r"))
    assert shlex.split(found["-o"]) == ["/r/my-run.job-^array_index^.log"] and found["-J"] == "0-3"


@pytest.mark.parametrize("root", ["/a:b", "/a,b", "/a\nb", "runs:1"])
def test_a_folder_that_a_container_cannot_mount_is_refused(root):
    for name in [name for name in CASES if CASES[name].image]:
        with pytest.raises(RequestError, match="colon, a comma or a control character"):
            text_of(name, root=root)


def test_a_container_mounts_the_folder_and_the_runs():
    lines = text_of("docker-one-machine", root="/r").splitlines()
    docker = shlex.split(lines[-3].removesuffix("\\"))
    assert {"--volume=/home/user/project:/home/user/project", "--volume=/r:/r"} < set(docker)
    assert {"--gpus=4", "--memory=64g", "--cpus=32", "--env=OMP_NUM_THREADS=8"} < set(docker)
    assert "--user=$(id -u):$(id -g)" in docker  # or the files of the run would belong to root
    assert docker[docker.index("--") :] == ["--", "rankzero"]
    assert lines[-2].split()[:-1] == IMAGE_PROGRAM
    words = shlex.split(text_of("apptainer-one-machine", root="/r").splitlines()[-3].removesuffix("\\"))
    assert words == [
        *("exec", "apptainer", "exec", "--nv", "--bind=/home/user/project", "--bind=/r", "--pwd=/home/user/project"),
        *("--", "image.sif"),
    ]


def test_rank_zero_is_on_the_first_host():
    for name in WITHOUT_QUEUE:
        text, request = text_of(name), CASES[name]
        addresses = re.findall(r"(?:master_addr=|MASTER_ADDR[= ])(\S+)", text)
        assert addresses == (["n1"] if request.nodes > 1 or request.scheduler == "ssh" else [])
        ports = [int(port) for port in re.findall(r"(?:master_port=|MASTER_PORT[= ])(\S+)", text)]
        assert len(ports) == len(addresses) and all(20000 <= port < 32000 for port in ports)


def test_runs_of_different_names_use_different_ports():
    texts = [script(replace(CASES["ssh-all"], name=f"run-{index}")) for index in range(20)]
    assert len({re.search(r"--master_port=(\d+)", text)[1] for text in texts}) > 15


def test_clock_is_hours_minutes_and_seconds():
    assert [clock(seconds) for seconds in (1, 60, 3661, 360000)] == ["00:00:01", "00:01:00", "01:01:01", "100:00:00"]


def test_a_name_of_a_pbs_job_has_no_other_characters():
    assert pbs_job_name("a+b=c@d.e-f_9") == "a_b_c_d.e-f_9"


def test_an_argument_is_quoted_around_the_index_of_an_array():
    assert shell_argument("a {array_index}b", True) == "'a '\"$array_index\"b"
    assert shell_argument("{array_index}{array_index}", True) == '"$array_index""$array_index"'
    assert shell_argument("", True) == "''"
    assert shell_argument("{array_index}") == "'{array_index}'"


def read_by_sbatch(text):
    """Reads the value of an option as sbatch does: it removes double quotes, and backslashes before a quote or one."""
    if not text.startswith('"'):
        return text
    assert re.fullmatch(r'"([^"\\]|\\["\\])*"', text)
    return re.sub(r'\\(["\\])', r"\1", text[1:-1])


def test_random_values_reach_the_scheduler_unchanged():
    generator = random.Random(18)
    characters = [chr(code) for code in range(32, 127)] + list("'\"\\ $`%&;|#!~*") * 4 + list("é漢🙂")
    for _ in range(1000):
        value = "".join(generator.choices(characters, k=generator.randrange(1, 30)))
        assert shlex.split(pbs_value(value)) == [value]
        assert read_by_sbatch(slurm_value(value)) == value
        assert "\n" not in pbs_value(value) + slurm_value(value)


def test_a_plain_value_is_not_quoted():
    for value in ("gpu", "afterok:1,2", "a&b|c", "me@example.org", "~/x*"):
        assert slurm_value(value) == pbs_value(value) == value
