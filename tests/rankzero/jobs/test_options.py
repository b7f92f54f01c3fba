import re
import shlex
from dataclasses import fields

import pytest

from job_requests import MPIRUN, SLURM, refusal, request
from rankzero.jobs import options
from rankzero.jobs.job_request import job_request
from rankzero.jobs.options import FORMS, JOB_FLAGS, SUBMIT_FLAGS, JobRequest, help_text, parse
from running import REPOSITORY

DOCUMENTATION = REPOSITORY / "docs" / "jobs.md"
ACCEPTED = {
    options.memory_value: dict.fromkeys(("64G", "64gb", "64 GB", "64GiB"), "64G")
    | {"500m": "500M", "2Tb": "2T", "1KB": "1K"},
    options.one_line: ["gpu", "a b", "a&b|c", "*", "$HOME", "caf\u00e9", '"', "'", "\\", " a "],
    options.array_value: ["0", "0-3", "1,5,9", "0-10:2", "0-3,7,10-20:5", "0-99%4", "1,2%1"],
    options.host_value: ["n1", "n1.example.org", "10.0.0.1", "user@n1", "a_b-c@n-1", "_"],
    options.command_lines: ["source a.sh", "a\nb", "\texport A='b c'\n", "#SBATCH --exclusive"],
}
CONTROL = ["\x1b[31m", "\x7f", "\x85", "\u2028", "\udcff"]
CONTROL += [f"a{chr(code)}b" for code in (*range(32), *range(127, 160))]
REFUSED = {
    options.memory_value: (
        "a number with a unit",
        ["", "64", "0G", "-1G", "1.5G", "64  G", "64P", "G", "64G\n", "1234567890G", "\u0661G", "64Gi"],
    ),
    options.one_line: ("printable characters in one line", ["", " ", "a\nb", "a\r", "a\tb", "\0", *CONTROL]),
    options.array_value: (
        "a list of indices",
        ["", "a", "-1", "0-", "0,", ",0", "0--3", "0-3:0", "0:2", "0%0", "0%", "0-3%2,5", "3-0", "0 1", "0\n", "$(id)"],
    ),
    options.host_value: (
        "a list of host names",
        ["", "-n1", "-o@n1", "n1 n2", "n1,n2", "n1:22", "a@b@c", "@n1", "n1@", "n1;id", "$(id)", "n1\n", ".n1", "é"],
    ),
    options.command_lines: ("lines of text", ["", " \n", "\0", "a\0b"]),
}


@pytest.mark.parametrize("read", ACCEPTED)
def test_valid_values_are_read_and_invalid_values_are_refused(read):
    values = ACCEPTED[read] if isinstance(ACCEPTED[read], dict) else {text: text for text in ACCEPTED[read]}
    assert {text: read(text) for text in values} == values
    description, texts = REFUSED[read]
    for text in texts:
        with pytest.raises(ValueError, match=description):
            read(text)


def test_flag_names_are_unique_and_their_examples_are_valid():
    for flag in SUBMIT_FLAGS:
        assert list(parse([f"--{flag.name}", flag.example]).values) == [flag.name]
    names = [name for flag in SUBMIT_FLAGS for name in (flag.name, *flag.aliases)]
    assert len(set(names)) == len(names)


def test_the_help_lists_every_flag_and_action_in_columns():
    lines = help_text().splitlines()
    listed = [match[1] for line in lines if (match := re.match(r"  --(\w+)", line))]
    assert listed == [flag.name for flag in SUBMIT_FLAGS]
    for action in ("status", "log", "stop", "resume"):
        assert any(line.startswith(f"  {action} NAME ") for line in lines)
    assert max(map(len, lines)) <= 120
    rows = [line for line in lines if re.match(r"  (--\w+|[a-z]+ NAME)", line)]
    assert len(rows) == len(SUBMIT_FLAGS) + 4 and all(row[23:25] == "  " and row[25] != " " for row in rows)


def test_the_documentation_lists_every_flag_of_a_job_once_in_the_order_of_the_help():
    _, _, section = DOCUMENTATION.read_text().partition("## Options\n")
    rows = [line.split("|")[1] for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `--")]
    aliases = {"partition": ["queue"]}  # the others are spellings such as `run-name`
    expected = [[flag.name, *aliases.get(flag.name, [])] for flag in JOB_FLAGS]
    assert [re.findall(r"--(\w+)", row) for row in rows] == expected


FIELDS = {field.name: field for field in fields(JobRequest)}
STATED = {flag.name: match[1] for flag in JOB_FLAGS if (match := re.search(r"\[([^]]*)\]$", flag.help))}
"""Flag -> the default that its help states in brackets."""


def test_the_fields_of_a_request_are_the_flags_of_submit_whose_help_states_the_default():
    assert sorted(FIELDS) == sorted([*(flag.name for flag in JOB_FLAGS), "arguments"])
    forms = "; ".join(f"{scheduler}: {forms[0]}" for scheduler, forms in FORMS.items() if forms)
    for name, stated in STATED.items():
        default = forms if name == "form" else FIELDS[name].default
        assert stated in ("the scheduler's default", "that of submit") if default is None else stated == str(default)


def test_values_are_read_with_a_space_an_equals_sign_or_an_alias_and_list_flags_can_be_repeated():
    job = request(*SLURM, "--nodes", "2", "--time=1:30:00", "--memory", "64gb", "--dependency=a=b")
    assert job == JobRequest("slurm", "x", "srun", nodes=2, time=5400, memory="64G", dependency="a=b")
    job = request("--scheduler", "pbs", "--run_name", "x", "--queue", "long")
    assert job == JobRequest("pbs", "x", "pbsdsh", partition="long")
    assert request(*SLURM, "--setup", "-v").setup == ("-v",)
    assert request(*SLURM, "--setup=--v").setup == ("--v",)
    job = request(*SLURM, "--setup", "a, b", "--modules", "m1, m2", "--setup", "c", "--modules=m3", "--extra", "#X, Y")
    assert (job.setup, job.modules, job.extra) == (("a, b", "c"), ("m1", "m2", "m3"), ("#X, Y",))
    assert request(*MPIRUN, "--hosts", "n1, u@n2", "--hosts=n3").hosts == ("n1", "u@n2", "n3")


def test_everything_after_two_dashes_is_an_argument_of_fit_and_switches_take_no_value():
    line = parse([*SLURM, "--nodes", "2", "--", "--nodes", "3", "--", "-x", "a b", ""])
    assert line.values["nodes"] == 2
    assert job_request(line).arguments == ("--nodes", "3", "--", "-x", "a b", "")
    assert parse([*SLURM]).rest is None and parse([*SLURM, "--"]).rest == []
    line = parse(["my-run", "--follow", "--dry_run", "other", "-h"])
    assert list(line.positional) == ["my-run", "other"]
    assert line.values == dict.fromkeys(("follow", "dry_run", "help"), True)


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
    for name in (flag.name for flag in SUBMIT_FLAGS):
        assert f"--{name}" in found.replace(",", " ").split()


def test_a_flag_of_fit_before_two_dashes_is_named_as_such_and_a_number_of_gpus_becomes_a_number_of_processes():
    for tokens in ("--model ResNet", "--epochs=3", "--trainer.max_epochs 3", "--batch_size 8"):
        _, found, typed = refusal(*SLURM, *tokens.split())
        assert found.startswith("a flag of fit.py comes after --; the flags are --scheduler, ")
        assert typed == f"-- {tokens.replace('=', ' ')}"
    for tokens, count in (("--gpus 4", "4"), ("--gres=gpu:8", "8"), ("--gpus-per-node a100:2", "2"), ("--gpus", "N")):
        assert refusal(*SLURM, *tokens.split())[2] == f"--devices {count} --gpus_per_device 1"
    assert refusal(*SLURM, "--gpus-per-task", "1")[2] == "--gpus_per_device 1"
    assert refusal(*SLURM, "--gpus_per_device=2")[0] == "--gpus_per_device 2"
    assert refusal("--scheduler", "lsf", "--qos=high")[2] == "--extra '#BSUB OPTION'"
    for tokens in ("--dry-run", "--name a --bogus", "my-run -f"):  # unknown flags at the end
        assert refusal(*tokens.split())[0].startswith("-")


def test_each_flag_sets_its_field():
    excluded = ("hosts", "hostfile", "venv", "volume")
    tokens = [f"--{flag.name}={shlex.split(flag.example)[0]}" for flag in JOB_FLAGS if flag.name not in excluded]
    line = parse([*tokens, "--", "--model", "MLP"])
    assert len(line.values) == len(tokens)
    assert job_request(line) == JobRequest(**line.values, arguments=("--model", "MLP"))
