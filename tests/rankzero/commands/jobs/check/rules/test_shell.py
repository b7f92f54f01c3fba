from job_scripts import findings, one_finding, slurm
from rankzero.commands.jobs.check.checker import check

SRUN = "srun --cpus-per-task=4 --kill-on-bad-exit=1 python train.py"
DIRECTIVE = "#SBATCH --mem=64G"
LOGIN = "source /path/to/conda/etc/profile.d/conda.sh && conda activate ddp"
GPUS = "export CUDA_VISIBLE_DEVICES=0,1"
TORCHRUN = "srun -c 4 -K torchrun --nnodes=2"
RENDEZVOUS = "  --rdzv_backend=c10d --rdzv_endpoint=n1:$P train.py"
COMMENT = "this line begins with an option: a comment in line 10 has ended the command"

CASES = {
    "sbatch refuses a script whose first line is not #!": [
        (1, slurm(SRUN).removeprefix("#!/bin/bash\n"), "#!/bin/bash"),
        slurm(SRUN),
    ],
    "lines end with CR LF": [(1, slurm(SRUN).replace("\n", "\r\n")), (9, slurm("# text\r", SRUN))],
    "the file begins with a byte order mark": [(1, "\ufeff" + slurm(SRUN))],
    "#SBATCH after the first command (line 9) is ignored": [
        (10, slurm("cd x", f"{DIRECTIVE} --constraint=a100", SRUN), "this line before line 9"),
        # directives of another script
        "#!/bin/bash\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\nEOF\n",
    ],
    "the script does not wait for this command": [
        (9, slurm(f"{SRUN} &"), "wait, after this line"),
        "nohup python train.py &\n",
    ],
    "a space follows the backslash": [(9, slurm(f"{TORCHRUN} \\ ", RENDEZVOUS))],
    "this line begins with an option: a missing backslash in line 9 has ended the command": [
        (10, slurm(TORCHRUN, RENDEZVOUS))
    ],
    COMMENT: [(11, slurm(f"{TORCHRUN} \\", line, RENDEZVOUS)) for line in ("# comment", "# --lr 1 \\")],
    "is a typographic character": [
        *(
            (9, slurm(line))
            for line in ("srun \u2013c 4 python a.py", "srun -K python a.py \u2014x", "srun \u201ca.py")
        ),
        slurm("# a \u2013 b", "echo \u201cdone\u201d \u2013 now", SRUN),
        slurm(f'{SRUN} "don\u2019t"  # it\u2019s the default'),
    ],
}

test_the_only_finding_in_a_script = one_finding(CASES)


def test_wait_belongs_after_a_loop():
    loop = ("for i in 0 1; do", "  srun -c 4 -K -N1 -w n$i python train.py &", "done")
    (found,) = [item for item in check(slurm(*loop)) if "does not wait" in item.found]
    assert (found.line, found.instead) == (10, "wait, after the loop")
    assert not [item for item in findings(slurm(*loop, "until [ -e done ]; do sleep 9; done")) if "not wait" in item[2]]
