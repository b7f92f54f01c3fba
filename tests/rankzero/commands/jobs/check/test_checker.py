import random
import re
from pathlib import Path
from textwrap import indent

import pytest

from job_requests import CASES, script
from rankzero.commands.jobs.check.checker import check, read_script, report
from running import REPOSITORY, refusal_of

SCRIPTS = Path(__file__).with_name("scripts")
TUTORIALS = {
    "pbs_torchrun_nodeid": [
        (11, "$PBS_NODEID does not exist"),
        (11, "torchrun starts on the first machine only, in a job of 2 chunks"),
    ],
    "slurm_hostname": [],
    "slurm_scontrol": [],
    "mpirun": [],
    "launch_pair": [(2, "node rank 0 waits for node rank 1")],
    "slurm_python": [
        (8, "#SBATCH after the first command (line 7) is ignored"),
        (9, "one process starts, on the first node, in a job of 2 nodes with 4 tasks each"),
    ],
}
"""Script in the style of public tutorials -> line and beginning of each finding."""


@pytest.mark.parametrize("name", sorted(TUTORIALS | {path.stem: [] for path in SCRIPTS.glob("*.sh")}))
def test_the_findings_in_a_script_of_a_tutorial(name):
    findings = check(read_script(str(SCRIPTS / f"{name}.sh")))
    expected = TUTORIALS[name]
    assert len(findings) == len(expected), findings
    for line, beginning in expected:
        assert any(item.line == line and item.found.startswith(beginning) for item in findings), (line, beginning)


@pytest.mark.parametrize("name", CASES)
def test_a_script_that_submit_writes_is_not_wrong(name, tmp_path):
    (tmp_path / "job.sh").write_text(script(CASES[name]))
    assert check(read_script(str(tmp_path / "job.sh"))) == []


NOTHING = "neither #SBATCH, #PBS nor a command that trains was found"
PYTHON = "#!/usr/bin/env python3"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\xff\xfe", NOTHING),
        (b"", NOTHING),
        (b"#BSUB -n 4\njsrun ./a.out\n", NOTHING),
        (b"\0", "not a job script: it contains a NUL byte"),
        (b"#" * 100_001, "not a job script: it has more than 100,000 characters"),
        (b"srun python train.py " + b"${A:-" * 5_000 + b"}" * 5_000, "its commands are nested too deeply"),
        (b"$(" * 3_000 + b")" * 3_000, "bash finds an error"),
        (f"{PYTHON}\nimport torch\n".encode(), f"only scripts of bash or sh can be checked, not {PYTHON}"),
        (b"#!/bin/zsh\n", "only scripts of bash or sh can be checked, not #!/bin/zsh"),
        (b"if true; then\n", "bash finds an error: line 2: syntax error: unexpected end of file"),
    ],
)
def test_a_file_that_cannot_be_checked_is_refused(tmp_path, content, found):
    path = tmp_path / "job.sh"
    error = refusal_of(read_script, str(path))
    assert (error.asked, error.found) == (f"--check {path}", "cannot read this file: No such file or directory")
    assert "Is a directory" in refusal_of(read_script, str(tmp_path)).found
    path.write_bytes(content)
    error = refusal_of(read_script, str(path))
    assert error.asked == f"--check {path}" and error.found.startswith(found)


def test_the_report_has_no_control_characters_and_is_shown_in_the_documentation():
    text = report("x", check("srun torchrun --nnodes='\x1b[31m\u202e2' train.py\n"))
    assert "\x1b" not in text and "\u202e" not in text and "?[31m?2" in text
    text = (REPOSITORY / "docs/jobs.md").read_text()
    script = re.search(r"^`job.sh`:\n\n```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    assert indent(report("job.sh", check(script)), " " * 4) in text


def test_extended_patterns_and_a_comment_in_latin_1_are_read(tmp_path):
    for content in (b"shopt -s extglob\nrm -f tmp/!(keep)\npython train.py\n", b"# f\xfcr\npython train.py\n"):
        (tmp_path / "job.sh").write_bytes(content)
        assert check(read_script(str(tmp_path / "job.sh"))) == []


def test_no_text_fails_the_check():
    generator = random.Random(0)
    texts = [*(path.read_text() for path in SCRIPTS.glob("*.sh")), *map(script, CASES.values())]
    for _ in range(100):
        text = generator.choice(texts)
        for _ in range(generator.randint(1, 8)):
            at = generator.randrange(len(text))
            new = generator.choice(["'", '"', "$(", "`", "\\\n", "{", "=", "#SBATCH --", "#PBS -l ", "\x00", "é", ""])
            text = text[:at] + new + text[at + generator.randint(0, 30) :]
        assert all(1 <= item.line <= len(text.split("\n")) for item in check(text))
