from rankzero.commands.jobs.check.user_script import UserScript
from rankzero.commands.jobs.check.values import MAX_CHARACTERS


def test_the_scheduler_is_that_of_the_first_directive_and_a_directive_after_the_first_command_does_not_count():
    expected = {
        "#!/bin/bash\n#SBATCH -N 2\n": "slurm",
        "#PBS -N x\n#SBATCH -N 2\n": "pbs",
        "# SBATCH -N 2\n": "",
        "": "",
    }
    assert {text: UserScript(text).scheduler for text in expected} == expected
    script = UserScript("#!/bin/bash\n#SBATCH -N 2\n\n# text\n#SBATCH -N 3\ncd x\n#SBATCH -N 4\n")
    assert script.directive("nodes").value == "3" and script.first_command == 6
    assert [item.value for item in script.all_directives] == ["2", "3", "4"]


def test_python_without_a_launcher_does_not_train_beside_commands_with_one():
    for second, lines in (("srun python train.py", [2]), ("python train.py", [1, 2])):
        script = UserScript(f"python prepare.py\n{second}\n")
        assert [command.line for command in script.training] == lines


def test_variables_of_the_script_are_replaced_by_their_last_value_and_finitely_often():
    script = UserScript("A=1\nB=x$A\nA=2\nC=9 env\necho $B ${C} ${A}\n")
    command = script.commands[-1]
    assert script.resolved("$B-${A}-$C-$D", command) == "x1-2-$C-$D"
    assert command.values["A"].line == 3 and "C" not in command.values
    script = UserScript("PATH=$PATH:/x\necho $PATH\n")
    assert script.resolved("$PATH", script.commands[-1]) == "$PATH:/x"
    script = UserScript("A=x\n" + 'A="$A $A"\n' * 40 + "echo $A\n")
    assert len(script.resolved("$A", script.commands[-1])) <= MAX_CHARACTERS


def test_numbers_are_known_if_the_script_tells_them():
    script = UserScript("#SBATCH --nodes=2\nN=3\necho\n")
    expected = {"4": 4, "$N": 3, "$SLURM_NNODES": 2, "${SLURM_JOB_NUM_NODES}": 2, "$UNKNOWN": None, "2-4": None}
    assert {text: script.count(text, script.commands[-1]) for text in expected} == expected


def test_a_command_in_a_variable_is_read():
    for lines in (
        'CMD="torchrun --nnodes=2 train.py"\nsrun $CMD',
        'L="torchrun --nnodes=2"\nCMD="$L train.py"\nsrun bash -c "$CMD"',
        'ARGS=(\n  --nnodes=2  # machines\n)\nsrun torchrun "${ARGS[@]}" train.py',
    ):
        (command,) = UserScript(lines).training
        assert command.launchers == ["srun", "torchrun"] and command.option("torchrun", "--nnodes").text == "2"
        assert command.script == "train.py"
    (command,) = UserScript("N=2\nsrun torchrun --nnodes $N train.py").training  # of one word, which stays a variable
    assert command.option("torchrun", "--nnodes").text == "$N"
