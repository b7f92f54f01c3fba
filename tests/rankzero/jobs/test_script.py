"""The scripts of jobs. To record them anew, run these tests with RANKZERO_RECORD_SCRIPTS=1."""

import os
import random
import re
import subprocess
from dataclasses import replace
from difflib import unified_diff
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from job_requests import CASES, script
from rankzero.jobs.options import QUEUING, JobRequest, accepted_flags
from rankzero.jobs.script import clock, hours_and_minutes, pbs_job_name, shell_argument, slurm_value
from rankzero.messages import RequestError
from running import require

RECORDED = Path(__file__).with_name("recorded")
RECORDED_CASES = [name for name in CASES if name.endswith("-all")]


def text_of(name, **changes):
    return script(replace(CASES[name], **changes))


def directives(text):
    """Returns the option -> value of the lines for the scheduler."""
    lines = re.findall(r"^#(?:SBATCH (--[a-z-]+)=?|PBS (-l [a-z]+=|-\w) ?)(.*)$", text, re.MULTILINE)
    return {(slurm or pbs.removeprefix("-l ").rstrip("=")): value for slurm, pbs, value in lines}


@cache
def text_lines(name):
    return script(CASES[name]).splitlines()


def difference(base, name):
    """Returns the lines of a script that differ from those of another one."""
    lines = unified_diff(text_lines(base), text_lines(name), n=0, lineterm="")
    return "\n".join([f"--- {base}", *list(lines)[2:], ""])


def recorded_form(name):
    """Returns a script, or its difference from the most similar one of the cases before it if that is shorter."""
    earlier = takewhile(lambda case: case != name, RECORDED_CASES)
    return min((script(CASES[name]), *(difference(base, name) for base in earlier)), key=lambda text: text.count("\n"))


@pytest.mark.parametrize("name", RECORDED_CASES)
def test_the_script_equals_the_recorded_one(name):
    text = recorded_form(name)
    suffix = "diff" if text.startswith("--- ") else "yaml" if name.startswith("kubernetes") else "sh"
    file = RECORDED / f"{name}.{suffix}"
    if os.environ.get("RANKZERO_RECORD_SCRIPTS") == "1":
        RECORDED.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()
    assert sorted(path.stem for path in RECORDED.iterdir()) == sorted(RECORDED_CASES)


@pytest.mark.parametrize("name", [*(name for name in CASES if name.endswith("-all")), "local-image", "ssh-image"])
def test_each_accepted_option_changes_the_script(name):
    """`venv` changes the path of Python, which `submit` passes to `render`."""
    job = CASES[name]
    flags = set(accepted_flags(job.scheduler, job.image is not None))
    flags -= {"scheduler", "name", "form", "venv", "array", "image", "hosts", "hostfile", "nodes"}
    for flag in flags - (set() if job.scheduler in QUEUING else {"extra"}):
        assert script(replace(job, **{flag: getattr(JobRequest("slurm", ""), flag)})) != script(job), flag


@pytest.mark.system
def test_shellcheck_has_no_complaint(tmp_path):
    require("shellcheck")
    for name, request in CASES.items():
        text = script(request)
        if request.scheduler == "kubernetes":
            text = "#!/bin/bash\n" + yaml.safe_load(text)["spec"]["trainer"]["args"][0]
        (tmp_path / f"{name}.sh").write_text(text)
    files = sorted(map(str, tmp_path.iterdir()))
    # SC1091: the user's `source settings.sh` does not exist here
    checked = subprocess.run(["shellcheck", "--exclude=SC1091", *files], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_runs_of_different_names_use_different_ports():
    texts = [script(replace(CASES["ssh-all"], name=f"run-{index}")) for index in range(20)]
    assert len({re.search(r"--master_port=(\d+)", text)[1] for text in texts}) > 15


def test_slurm_signals_the_job_before_its_time_limit():
    for time, warning in ((None, 120), (86400, 120), (2400, 120), (2380, 119), (180, 9), (1, 0)):
        assert directives(text_of("slurm-srun-minimal", time=time))["--signal"] == f"USR1@{warning}"


@pytest.mark.parametrize(
    ("root", "slurm", "pbs"),
    [
        ("runs", "/home/user/project/runs/my-run.job.log", "/home/user/project/runs/my-run.job.log"),
        ("/a b", '"/a b/my-run.job.log"', "'/a b/my-run.job.log'"),
        ("/a b'c", '"/a b\'c/my-run.job.log"', "'/a b'\"'\"'c/my-run.job.log'"),
        ("/100%j", "/100%%j/my-run.job.log", "/100%j/my-run.job.log"),
        ("/a:b", "/a:b/my-run.job.log", "my-run.job.log"),
        ("/a\\b", r'"/a\\\\b/my-run.job.log"', "'/a\\b/my-run.job.log'"),  # twice for sbatch: quotes, and file name
        ("/a\nb", "my-run.job.log", "my-run.job.log"),
        ("/a\x1bb", "my-run.job.log", "my-run.job.log"),
    ],
)
def test_the_log_is_written_to_the_folder_of_the_runs(root, slurm, pbs):
    assert directives(text_of("slurm-srun-minimal", root=root))["--output"] == slurm
    members = directives(text_of("slurm-srun-minimal", root=root, array="0-3"))["--output"]
    assert members == slurm.replace("job.log", "job-%a.log")
    assert directives(text_of("pbs-pbsdsh-minimal", root=root))["-o"] == pbs


def test_a_container_mounts_the_folder_of_the_runs_or_a_folder_that_it_cannot_mount_is_refused():
    assert " --volume=/r:/r " in text_of("docker-one-machine", root="/r")
    assert " --bind=/r " in text_of("apptainer-one-machine", root="/r")
    for name in [name for name in CASES if CASES[name].image and CASES[name].scheduler != "kubernetes"]:
        for root in ("/a:b", "/a,b", "/a\nb", "runs:1"):
            with pytest.raises(RequestError, match="colon, a comma or a control character"):
                text_of(name, root=root)


def test_values_have_the_form_that_a_scheduler_accepts():
    assert [clock(seconds) for seconds in (1, 60, 3661, 360000)] == ["00:00:01", "00:01:00", "01:01:01", "100:00:00"]
    assert [hours_and_minutes(seconds) for seconds in (1, 60, 3661, 360000)] == ["0:01", "0:01", "1:02", "100:00"]
    assert pbs_job_name("a+b=c@d.e-f_9") == "a_b_c_d.e-f_9"
    for value in ("gpu", "afterok:1,2", "a&b|c", "me@example.org", "~/x*"):
        assert slurm_value(value) == value
    assert shell_argument("a {array_index}b", True) == "'a '\"$array_index\"b"
    assert shell_argument("{array_index}{array_index}", True) == '"$array_index""$array_index"'
    assert shell_argument("", True) == "''"
    text = text_of("slurm-srun-minimal", arguments=("--seed={array_index}",))  # without an array
    assert "'--seed={array_index}'" in text and "array_index=" not in text


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
        assert read_by_sbatch(slurm_value(value)) == value
        assert "\n" not in slurm_value(value)
