import pytest

from job_scripts import findings, only, slurm
from rankzero.commands.jobs.check.checker import check

SRUN = "srun --cpus-per-task=4 --kill-on-bad-exit=1 python train.py"


def test_the_form_of_a_file_that_sbatch_does_not_read_as_meant():
    text = slurm(SRUN).removeprefix("#!/bin/bash\n")
    only(text, 1, "wrong", "sbatch refuses a script whose first line is not #!", "#!/bin/bash")
    only(slurm(SRUN).replace("\n", "\r\n"), 1, "wrong", "lines end with CR LF")
    only(slurm("# text\r", SRUN), 9, "wrong", "lines end with CR LF")
    only("\ufeff" + slurm(SRUN), 1, "wrong", "the file begins with a byte order mark")
    text = slurm("cd x", "#SBATCH --mem=64G --constraint=a100", SRUN)
    found = "#SBATCH after the first command (line 9) is ignored"
    only(text, 10, "wrong", found, "this line before line 9")


@pytest.mark.parametrize("line", ["# SBATCH --mem=64G", " #SBATCH --mem=64G", "#sbatch --mem=64G"])
def test_a_comment_that_looks_like_a_directive(line):
    assert only(slurm(line, SRUN), 9, "risky", "a directive is a line that begins with #SBATCH") == "#SBATCH --mem=64G"


@pytest.mark.parametrize("last", ["echo done", "exit 0", "date\ncp -r runs /archive"])
def test_an_exit_code_is_lost_if_other_commands_follow(last):
    only(slurm(SRUN, last), 9, "risky", f"the job ends with the exit code of line {10 + last.count(chr(10))}")


def test_the_exit_code_of_a_pipeline_is_that_of_its_last_command():
    assert only(slurm(f"{SRUN} | tee log"), 9, "risky", "with the exit code of its last command").startswith(
        "set -o pipefail"
    )
    assert findings(slurm("set -o pipefail", f"{SRUN} 2>&1 | tee log")) == []
    assert findings(slurm(f"{SRUN} | tee log", "exit ${PIPESTATUS[0]}")) == []


def test_a_script_has_to_wait_for_commands_in_the_background():
    assert only(slurm(f"{SRUN} &"), 9, "wrong", "the script does not wait for this command") == "wait, after this line"


def test_a_batch_script_neither_loads_conda_nor_chooses_its_gpus():
    conda = "source /path/to/conda/etc/profile.d/conda.sh && conda activate ddp"
    only(slurm("conda activate ddp", SRUN), 9, "risky", "`conda activate` fails in a batch script", conda)
    gpus = "export CUDA_VISIBLE_DEVICES=0,1"
    only(slurm(gpus, SRUN), 9, "risky", "replaces the GPUs that the scheduler has chosen")
    assert findings(f"{gpus}\npython train.py\n") == []


@pytest.mark.parametrize("lines", [(f"{SRUN} &", "wait"), (f"{SRUN} &", f"{SRUN} &", "wait")])
def test_a_bare_wait_loses_the_exit_codes(lines):
    only(slurm(*lines), 8 + len(lines), "risky", "wait without arguments returns 0")


def test_a_space_after_the_backslash_ends_the_command():
    text = slurm("srun -c 4 -K torchrun --nnodes=2 \\ ", "  --rdzv_backend=c10d --rdzv_endpoint=n1:$P train.py")
    only(text, 9, "wrong", "a space follows the backslash")


@pytest.mark.parametrize(
    ("middle", "line", "reason"),
    [
        ((), 10, "a missing backslash in line 9"),
        (("# comment",), 11, "a comment in line 10"),
        (("# --lr 1 \\",), 11, "a comment in line 10"),
    ],
)
def test_a_line_that_begins_with_an_option_is_wrong(middle, line, reason):
    end = " \\" if middle else ""
    options = "  --rdzv_backend=c10d --rdzv_endpoint=n1:1 train.py"
    text = slurm(f"srun -c 4 -K torchrun --nnodes=2{end}", *middle, options)
    assert [item for item in findings(text) if reason in item[2]] == [
        (line, "wrong", f"this line begins with an option: {reason} has ended the command")
    ]
    assert not any("without an address" in item[2] for item in findings(text))


@pytest.mark.parametrize("command", ["srun \u2013c 4 python a.py", "srun -K python a.py \u2014x", "srun \u201ca.py"])
def test_a_character_of_a_word_processor_is_wrong(command):
    only(slurm(command), 9, "wrong", "is a typographic character")


def test_wait_belongs_after_a_loop():
    loop = ("for i in 0 1; do", "  srun -c 4 -K -N1 -w n$i python train.py &", "done")
    (found,) = [item for item in check(slurm(*loop)) if "does not wait" in item.found]
    assert (found.line, found.instead) == (10, "wait, after the loop")
    assert not [item for item in findings(slurm(*loop, "until [ -e done ]; do sleep 9; done")) if "not wait" in item[2]]


def test_a_name_in_a_comment_changes_nothing():
    only(slurm("# pipefail PIPESTATUS $?", "srun -c 4 -K python train.py | tee log"), 10, "risky", "its last command")


CORRECT = {
    "a correct batch script": [slurm(SRUN)],
    "comments that are no directives": [
        slurm(line, SRUN) for line in ("##SBATCH --mem=64G", "# SBATCH options follow", "cd x  # SBATCH --mem=64G")
    ],
    "an exit code that the script handles": [
        slurm("set -e", SRUN, "echo done"),
        slurm("set -euo pipefail", SRUN, "echo done"),
        slurm(SRUN, "code=$?", "echo done", "exit $code"),
        slurm(SRUN, "exit $code"),
        slurm(SRUN, 'echo "exit code $?"', "exit 0"),
        slurm(f"{SRUN} || exit 1", "echo done"),
        slurm(f"if {SRUN}; then echo done; fi"),
        slurm(f"{SRUN} && echo done"),
        slurm(SRUN, SRUN),
        slurm("train() {", SRUN, "}", "train", "exit $?"),
        slurm(f"{SRUN} &", "wait $!"),
        slurm(SRUN, "if [[ $? == 124 ]]; then sbatch $0; fi"),
        slurm("python monitor.py &", SRUN),
    ],
    "conda that is loaded before it is used": [
        slurm("conda activate ddp", SRUN).replace("#!/bin/bash", "#!/bin/bash -l"),
        slurm("source ~/conda/etc/profile.d/conda.sh", "conda activate ddp", SRUN),
        slurm('eval "$(conda shell.bash hook)"', "conda activate ddp", SRUN),
        slurm("source ~/.bashrc", "conda activate ddp", SRUN),
        slurm("source /opt/conda/bin/activate", "conda activate ddp", SRUN),
        slurm("ml Anaconda3", "conda activate ddp", SRUN),
        slurm("module load conda", "conda activate ddp", SRUN),
    ],
    "a launcher that the rules do not know": [
        slurm('run() { srun -c 4 -K "$@"; }', f"{launcher} python train.py", "exit $?")
        for launcher in ("ibrun", "horovodrun -np 8", "jsrun -n 8", "run")
    ],
    "typographic characters in texts": [
        slurm("# a \u2013 b", "echo \u201cdone\u201d \u2013 now", SRUN),
        slurm(f'{SRUN} "don\u2019t"  # it\u2019s the default'),
    ],
    "a command that a script without a scheduler leaves running": ["nohup python train.py &\n"],
    "two runs that share the GPUs of one job": [
        slurm(*(f"CUDA_VISIBLE_DEVICES={i} python {i}.py &" for i in range(2)), "wait $!", nodes=1)
    ],
    "a pattern of case": [slurm("case $1 in", "  --nodes) N=$2 ;;", "  -h) usage ;;", "esac", "set -e", SRUN)],
    "all GPUs of an exclusive job": [slurm("export CUDA_VISIBLE_DEVICES=0,1", SRUN, exclusive="")],
    "directives in a here-document, which are those of another script": [
        "#!/bin/bash\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\nEOF\n"
    ],
}


@pytest.mark.parametrize("name", CORRECT)
def test_no_finding(name):
    assert [findings(text) for text in CORRECT[name]] == [[]] * len(CORRECT[name])
