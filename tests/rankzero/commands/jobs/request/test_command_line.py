import shlex

import pytest

from job_requests import MPIRUN, SLURM, refusal, request
from rankzero.commands.jobs.request.combined import job_request
from rankzero.commands.jobs.request.command_line import SWITCHES, parse
from rankzero.commands.jobs.request.job_request import JobRequest
from rankzero.commands.jobs.request.options import SUBMIT_FLAGS


def test_values_are_read_with_a_space_an_equals_sign_or_an_alias():
    job = request(*SLURM, "--nodes", "2", "--time=1:30:00", "--memory", "64gb", "--dependency=a=b")
    assert job == JobRequest("slurm", "x", "srun", nodes=2, time=5400, memory="64G", dependency="a=b")
    job = request("--scheduler", "pbs", "--run_name", "x", "--queue", "long")
    assert job == JobRequest("pbs", "x", "pbsdsh", partition="long")
    assert request(*SLURM, "--setup", "-v").setup == ("-v",)
    assert request(*SLURM, "--setup=--v").setup == ("--v",)
    assert refusal(*SLURM, "--setup", "--v")[1] == "it has no value"
    for tokens in (("--nodes",), ("--nodes", "--devices", "2"), ("--nodes", "--", "3"), ("--site",)):
        assert refusal(*SLURM, *tokens) == (tokens[0], "it has no value", f"{tokens[0]}=VALUE")


def test_list_flags_can_be_repeated():
    job = request(*SLURM, "--setup", "a, b", "--modules", "m1, m2", "--setup", "c", "--modules=m3", "--extra", "#X, Y")
    assert (job.setup, job.modules, job.extra) == (("a, b", "c"), ("m1", "m2", "m3"), ("#X, Y",))
    assert request(*MPIRUN, "--hosts", "n1, u@n2", "--hosts=n3").hosts == ("n1", "u@n2", "n3")
    assert request(*SLURM, "--nodes", "2", "--nodes", "3").nodes == 3  # no list: the last value


def test_everything_after_two_dashes_is_an_argument_of_fit_and_switches_take_no_value():
    line = parse([*SLURM, "--nodes", "2", "--", "--nodes", "3", "--", "-x", "a b", ""])
    assert line.values["nodes"] == 2
    assert job_request(line).arguments == ("--nodes", "3", "--", "-x", "a b", "")
    assert parse([*SLURM]).arguments is None and parse([*SLURM, "--"]).arguments == []
    line = parse(["my-run", "--follow", "--dry_run", "other", "-h"])
    assert list(line.positional) == ["my-run", "other"] and line.switches == {"follow", "dry_run", "help"}
    assert not line.values and line.site is None
    for token in ("--dry_run=yes", "--follow=no"):
        assert refusal(*SLURM, token)[1] == "this flag has no value"


@pytest.mark.parametrize(
    ("tokens", "found", "instead"),
    [
        (("--nodes", "0"), "'0' is not a whole number >= 1", "--nodes 2"),
        (("--nodes", "-1"), "'-1' is not a whole number >= 1", "--nodes 2"),
        (("--gpus_per_device", "2"), "each process has one GPU", "--devices 2 --gpus_per_device 1"),
        (("--time", "soon"), "'soon' is not a time", "--time 02:00:00"),
        (("--memory", "64"), "'64' is not a number with a unit", "--memory 64G"),
        (("--name", "../x"), "folder name", "--name my-run"),
        (("--scheduler", "slrum"), "not one of slurm, pbs", "--scheduler slurm"),
        (("--form", "srnu"), "not one of srun", "--form srun"),
        (("--modules", "a,,b"), "'a,,b' is not text of printable characters", "--modules cuda/12.4"),
        (("--root", ""), "'' is not a path", "--root runs"),
        (("--extra=--exclusive",), "a whole line of the script", "--extra '#SBATCH --qos=high'"),
        (("--extra=-x n7",), "a whole line of the script", "--extra '#SBATCH --qos=high'"),
        (("--gpus_per_device", "off"), "whole number", "--gpus_per_device 1"),
    ],
)
def test_an_invalid_value_is_refused_with_a_valid_example(tokens, found, instead):
    asked = refusal(*SLURM, *tokens)
    assert found in asked[1] and asked[2] == instead


@pytest.mark.parametrize(
    ("tokens", "instead"),
    [
        *(("--ndoes 2", "--nodes 2"), ("--ndoes=2", "--nodes 2"), ("-nodes 2", "--nodes 2"), ("-p x", "--partition x")),
        *(("--cpus-per-device 4", "--cpus_per_device 4"), ("--dry-run", "--dry_run"), ("-q long", "--partition long")),
        *(("--ntasks-per-node 4", "--devices 4"), ("--ntasks-per-node=4", "--devices 4"), ("--nnodes 2", "--nodes 2")),
        *(("--nproc_per_node 4", "--devices 4"), ("--cpus-per-task 8", "--cpus_per_device 8"), ("-A p", "--account p")),
        *(("-c 8", "--cpus_per_device 8"), ("--mem 64G", "--memory 64G"), ("--mem=64G", "--memory 64G")),
        *(("-t 60", "--time 60"), ("--walltime 01:00:00", "--time 01:00:00"), ("-J my-run", "--name my-run")),
        *(("--job-name my-run", "--name my-run"), ("--host n1,n2", "--hosts n1,n2"), ("--mem --nodes", "--memory")),
        ("--exclusive --nodes 2", "--extra '#SBATCH --exclusive'"),
        ("--qos=high --partition pbs", "--extra '#SBATCH --qos=high'"),
        *(("--container 'a b'", "--image 'a b'"), ("-d afterok:1", "--dependency afterok:1")),
        ("--qqqqq 2", "python launch/submit.py --help"),
    ],
)
def test_an_unknown_flag_gives_the_flag_to_type_and_lists_all(tokens, instead):
    words = shlex.split(tokens)
    asked, found, typed = refusal(*SLURM, *words)
    assert asked.startswith(words[0].partition("=")[0]) and typed == instead
    assert found.startswith("there is no flag of that name; the flags are --scheduler, ")
    for name in (*(flag.name for flag in SUBMIT_FLAGS), "site", *SWITCHES):
        assert f"--{name}" in found.replace(",", " ").split()


def test_a_flag_of_fit_before_two_dashes_is_named_as_such():
    for tokens in ("--model ResNet", "--epochs=3", "--trainer.max_epochs 3", "--batch_size 8"):
        _, found, typed = refusal(*SLURM, *tokens.split())
        assert found.startswith("a flag of fit.py comes after --; the flags are --scheduler, ")
        assert typed == f"-- {tokens.replace('=', ' ')}"


def test_a_number_of_gpus_is_answered_with_a_number_of_processes_and_shown_once():
    for tokens, count in (("--gpus 4", "4"), ("--gres=gpu:8", "8"), ("--gpus-per-node a100:2", "2"), ("--gpus", "N")):
        assert refusal(*SLURM, *tokens.split())[2] == f"--devices {count} --gpus_per_device 1"
    assert refusal(*SLURM, "--gpus-per-task", "1")[2] == "--gpus_per_device 1"
    assert refusal(*SLURM, "--gpus_per_device=2")[0] == "--gpus_per_device 2"
    for tokens in ("--dry-run", "--name a --bogus", "my-run -f"):  # unknown flags at the end
        assert refusal(*tokens.split())[0].startswith("-")


def test_each_flag_sets_its_field():
    excluded = ("hosts", "hostfile", "venv")
    tokens = [f"--{flag.name}={shlex.split(flag.example)[0]}" for flag in SUBMIT_FLAGS if flag.name not in excluded]
    expected = {"nodes": 2, "devices": 4, "cpus_per_device": 8, "gpus_per_device": 1, "memory": "64G", "time": 7200}
    expected |= {"partition": "gpu", "account": "my-project", "constraint": "gpu_type=a100", "exclude": "n7"}
    expected |= {"mail": "me@example.org", "array": "0-3", "dependency": "afterok:123", "modules": ("cuda/12.4",)}
    expected |= {"setup": ("source",), "image": "rankzero.sif", "extra": ("#SBATCH --qos=high",)}
    arguments = ("--model", "MLP")
    job = request(*tokens, "--", *arguments)
    assert job == JobRequest("slurm", "my-run", "torchrun", arguments=arguments, **expected)
