import random
import re
from pathlib import Path
from textwrap import indent

from job_requests import CASES, script
from rankzero.jobs.check.checker import check, read_script, report
from running import REPOSITORY, refusal_of

SCRIPTS = Path(__file__).with_name("scripts")
TUTORIALS = {
    "pbs_torchrun_nodeid": [(11, "torchrun starts on the first machine only, in a job of 2 chunks")],
    "slurm_hostname": [],
    "slurm_scontrol": [],
    "mpirun": [],
    "launch_pair": [(2, "node rank 0 waits for node rank 1, whose command starts after this one has ended")],
    "slurm_python": [
        (8, "#SBATCH after the first command (line 7) is ignored"),
        (9, "one process starts on the first machine only, in a job of 2 nodes"),
    ],
}
"""Script in the style of public tutorials -> line and text of each finding."""


def test_only_what_is_wrong_is_found_in_scripts_of_tutorials_and_of_submit():
    assert {path.stem for path in SCRIPTS.glob("*.sh")} == {*TUTORIALS}
    for name, expected in TUTORIALS.items():
        assert [finding[:2] for finding in check(read_script(str(SCRIPTS / f"{name}.sh")))] == expected
    for name, request in CASES.items():
        assert check(script(request)) == [], name


NOTHING = "neither #SBATCH, #PBS nor a command that trains was found"
PYTHON = "#!/usr/bin/env python3"
REFUSED = {
    b"": NOTHING,
    b"#BSUB -n 4\njsrun ./a.out\n": NOTHING,
    b"\0": "not a job script: it contains a NUL byte",
    b"#" * 100_001: "not a job script: it contains a NUL byte or more than 100,000 bytes",
    b"$(" * 3_000 + b")" * 3_000: "bash finds an error",
    f"{PYTHON}\nimport torch\n".encode(): f"only scripts of bash or sh can be checked, not {PYTHON}",
    b"if true; then\n": "bash finds an error: line 2: syntax error: unexpected end of file",
}
"""Content of a file -> beginning of the reason why it cannot be checked."""


def test_a_file_that_cannot_be_checked_is_refused_and_extended_patterns_and_a_comment_in_latin_1_are_read(tmp_path):
    path = tmp_path / "job.sh"
    error = refusal_of(read_script, str(path))
    assert (error.asked, error.found) == (f"--check {path}", "cannot read this file: No such file or directory")
    for content, found in REFUSED.items():
        path.write_bytes(content)
        error = refusal_of(read_script, str(path))
        assert error.asked == f"--check {path}" and error.found.startswith(found), content[:80]
    for content in (b"shopt -s extglob\nrm -f tmp/!(keep)\npython train.py\n", b"# f\xfcr\npython train.py\n"):
        path.write_bytes(content)
        assert check(read_script(str(path))) == []


def test_the_report_has_no_control_characters_and_is_shown_in_the_documentation():
    lines = "mpirun -np 1 -x WORLD_SIZE=2 python a.py\nsrun torchrun --nnodes=2 --rdzv-endpoint='::1:\x1b' a.py"
    text = report("x", check(lines))
    assert text.count("\n") == 3 and "\x1b" not in text
    text = (REPOSITORY / "docs/jobs.md").read_text()
    documented = re.search(r"^`job.sh`:\n\n```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    assert indent(report("job.sh", check(documented)), " " * 4) in text


def test_no_text_fails_the_check():
    generator = random.Random(0)
    texts = [*(path.read_text() for path in SCRIPTS.glob("*.sh")), *map(script, CASES.values())]
    for _ in range(100):
        text = generator.choice(texts)
        for _ in range(generator.randint(1, 8)):
            at = generator.randrange(len(text))
            new = generator.choice(["'", '"', "$(", "`", "\\\n", "{", "=", "#SBATCH --", "#PBS -l ", "\x00", "é", ""])
            text = text[:at] + new + text[at + generator.randint(0, 30) :]
        assert all(1 <= line <= len(text.split("\n")) for line, _, _ in check(text))
