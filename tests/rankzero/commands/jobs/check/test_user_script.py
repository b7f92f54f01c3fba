from rankzero.commands.jobs.check.directives import read_directives
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


def words(text):
    """Returns the words of the last command of a script."""
    return [word.text for word in UserScript(text).commands[-1].words]


def test_a_variable_with_several_words_is_split():
    for assignments in (
        *('A="a b"', "A=(a b)", "A=(a)\nA+=(b)", 'A="a"\nA+=" b"', 'A=(a)\nA=("${A[@]}" b)', 'A=a\nA="$A b"'),
        *('B=b\nA="a $B"', "export A='a b'", 'A=""\nA+="a b"'),
    ):
        assert words(f"{assignments}\necho $A\n") == ["echo", "a", "b"]


def test_a_value_that_depends_on_the_run_is_unknown():
    for assignments in (
        *('if true; then A="a b"; fi', 'A="c d"\nif true; then A="a b"; fi', 'for i in 1; do A="a b"; done'),
        *('true && A="a b"', 'f() { A="a b"; }', 'A+="a b"'),
        'A="a b" env',  # holds for this program only
    ):
        assert words(f"{assignments}\necho $A\n") == ["echo", "$A"]


def test_elements_of_an_array_and_command_substitutions_are_words():
    assert words('A=(--x "a b" $B)\necho "${A[@]}"\n') == ["echo", "--x", "a b", "$B"]
    script = UserScript('A="--x $(hostname -f):1 y"\nsrun $A\n')
    assert [word.text for word in script.commands[-1].words] == ["srun", "--x", "$(hostname -f):1", "y"]
    assert [word.substituted for word in script.commands[-1].words] == [False, False, True, False]


def test_options_of_sbatch():
    for line, found in (
        *((f"#SBATCH {option}", [("nodes", "2")]) for option in ("--nodes=2", "--nodes 2 # two")),
        ("#SBATCH -N2 -n 4", [("nodes", "2"), ("ntasks", "4")]),
        ("#SBATCH --requeue --time=1:00", [("requeue", ""), ("time", "1:00")]),
        *(("#SBATCH --tasks-per-node=4", [("ntasks-per-node", "4")]), ("#SBATCH --comment='a b", [("comment", "'a")])),
        ("#SBATCH --job-name='a b'", [("job-name", "a b")]),
        *((line, []) for line in ("# SBATCH --nodes=2", "##SBATCH --nodes=2", " #SBATCH --nodes=2", "#SBATCH")),
    ):
        directives = read_directives(["#!/bin/bash", line], "slurm")
        assert [(item.name, item.value) for item in directives][: len(found) or None] == found
        assert {item.line for item in directives} <= {2}


def test_options_of_qsub():
    select, chunks = "select=2:ncpus=8:mpiprocs=2+1:ncpus=1", "2:ncpus=8:mpiprocs=2+1:ncpus=1"
    several = {"select": "2:ncpus=8", "place": "scatter:excl", "walltime": "1:00:00"}
    for line, found in {
        "-N ddp": {"N": "ddp"},
        f"-l {select}": {"select": chunks},
        "-l select=2:ncpus=8,place=scatter:excl,walltime=1:00:00": several,
        "-l nodes=2:ppn=4": {"nodes": "2:ppn=4"},
        "-V -j oe": {"V": "", "j": "oe"},
    }.items():
        assert [(item.name, item.value) for item in read_directives([f"#PBS {line}"], "pbs")] == list(found.items())
