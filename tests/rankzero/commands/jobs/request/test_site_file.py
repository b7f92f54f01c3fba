import shlex
from pathlib import Path

import pytest

from job_requests import MPIRUN, SLURM, refusal, request
from rankzero.commands.jobs.request.command_line import parse
from rankzero.commands.jobs.request.job_request import JobRequest
from rankzero.commands.jobs.request.options import SUBMIT_FLAGS
from rankzero.commands.jobs.request.site_file import read_site


@pytest.fixture
def site(tmp_path):
    """Returns a function that writes a site file, and returns the flag for it."""

    def write(text):
        (tmp_path / "site.yaml").write_text(text)
        return f"--site={tmp_path / 'site.yaml'}"

    return write


def test_a_site_file_sets_values_that_the_command_line_overrides(site):
    text = "scheduler: slurm\nqueue: gpu\nnodes: 2\ntime: 90min\nmemory: 64gb\nname: other\n"
    expected = JobRequest("slurm", "x", "srun", nodes=2, time=5400, memory="64G", partition="gpu")
    assert request(site(text), "--name", "x") == expected
    option = site("scheduler: pbs\npartition: gpu\nnodes: 2\nform: mpirun\n")
    job = request(*SLURM, option, "--nodes", "4", "--queue", "cpu", "--form", "torchrun")
    assert job == JobRequest("slurm", "x", "torchrun", nodes=4, partition="cpu")


def test_lists_of_a_site_file_come_before_those_of_the_command_line_but_hosts_are_replaced(site):
    option = site("setup: [a, b]\nmodules: m1, m2\nextra: '#SBATCH --exclusive'\n")
    job = request(*SLURM, option, "--setup", "c", "--modules", "m3", "--extra", "#SBATCH --x")
    assert job.setup == ("a", "b", "c") and job.modules == ("m1", "m2", "m3")
    assert job.extra == ("#SBATCH --exclusive", "#SBATCH --x")
    assert request(*SLURM, option).setup == ("a", "b")
    option = site("hosts: [n1, n2]\n")
    assert request(*MPIRUN, option).hosts == ("n1", "n2")
    assert request(*MPIRUN, option, "--hosts", "n3").hosts == ("n3",)


def test_keys_of_a_site_file_that_the_scheduler_does_not_accept_are_ignored(site):
    option = site("partition: gpu\nhosts: n1\nmodules: m1\nform: srun\nmemory: 1G\n")
    assert request("--scheduler", "local", "--name", "x", option) == JobRequest("local", "x", modules=("m1",))
    expected = JobRequest("pbs", "x", "pbsdsh", partition="gpu", modules=("m1",), memory="1G")
    assert request("--scheduler", "pbs", "--name", "x", option) == expected


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("time", "1:30:00", 5400),
        ("time", "'30:00'", 1800),
        ("time", "30:00", 1800),
        ("time", "90", 5400),
        ("time", "1-00:00:00", 86400),
        ("account", "0123", "0123"),
        ("partition", "no", "no"),
    ],
)
def test_a_value_in_a_site_file_means_the_same_as_on_the_command_line(site, name, text, value):
    assert getattr(request(*SLURM, site(f"{name}: {text}\n")), name) == value
    assert getattr(request(*SLURM, f"--{name}", text.strip("'")), name) == value


def test_an_unknown_key_or_an_invalid_value_of_a_site_file_is_refused_as_yaml(site, tmp_path):
    file = tmp_path / "site.yaml"
    asked, found, instead = refusal(*SLURM, site("partitn: gpu\n"))
    assert asked == f"{file}: partitn" and instead == "partition: ..."
    assert found.startswith("there is no such key; the keys are scheduler, form, name, ")
    expected = (f"{file}: nodes: two", "'two' is not a whole number >= 1", "nodes: 2")
    assert refusal(*SLURM, site("nodes: two\n")) == expected
    for text, key in {"7: gpu\n": "7", "hosts: [n1, 'n 2']\n": "hosts: n 2"}.items():
        assert refusal(*SLURM, site(text))[0] == f"{file}: {key}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *((text, "not YAML: ") for text in ("a: [", "a: b: c", "\x01")),
        *((text, "not a YAML mapping") for text in ("- a", "text", "3")),
        *((text, "the value is not text") for text in ("partition: [a, b]", "modules: {a: b}", "modules: [[a]]")),
        *(
            (text, "the value is empty; a value that begins with # needs quotes")
            for text in ("partition:", "extra:\n  - #SBATCH --exclusive", "modules: []\nsetup: ['']")
        ),
    ],
)
def test_a_wrong_site_file_is_refused(site, text, found):
    assert refusal(*SLURM, site(text))[1].startswith(found)


def test_paths_in_a_site_file_may_begin_with_the_home_folder_or_a_variable(site, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    job = request(*SLURM, site("root: $SCRATCH/runs\nvenv: ~/venv\naccount: $SCRATCH\n"))
    assert (job.root, job.venv, job.account) == ("/scratch/me/runs", str(Path.home() / "venv"), "$SCRATCH")
    assert refusal(*SLURM, site("root: $SCRATCHH/runs\n"))[1] == "a variable in this path is not set"
    found = refusal(*SLURM, site("root: ~no-such-user/runs\n"))[1]
    assert found == "'~no-such-user/runs' is not a path in the home folder of a user"


def test_a_site_file_that_cannot_be_read_is_refused(tmp_path):
    file = tmp_path / "site.yaml"
    expected = (f"--site {file}", "cannot read this file: No such file or directory", "--site FILE")
    assert refusal(*SLURM, "--site", str(file)) == expected
    file.write_bytes(b"\xff\xfe\xff")
    assert refusal(*SLURM, "--site", str(file))[1].startswith("cannot read this file: ")


def test_the_users_own_site_file_is_read_unless_another_one_is_given(tmp_path, monkeypatch, site):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert request(*SLURM) == request(*SLURM, site("# nothing\n")) == JobRequest("slurm", "x", "srun")
    (tmp_path / "rankzero").mkdir()
    (tmp_path / "rankzero" / "site.yaml").write_text("account: mine\n")
    assert request(*SLURM) == JobRequest("slurm", "x", "srun", account="mine")
    assert request(*SLURM, site("partition: gpu\n")) == JobRequest("slurm", "x", "srun", partition="gpu")


def test_each_flag_can_be_a_key_of_a_site_file(site, tmp_path):
    site("".join(f"{flag.name}: '{shlex.split(flag.example)[0]}'\n" for flag in SUBMIT_FLAGS))
    line = parse([token for flag in SUBMIT_FLAGS for token in (f"--{flag.name}", shlex.split(flag.example)[0])])
    assert read_site(tmp_path / "site.yaml") == line.values
