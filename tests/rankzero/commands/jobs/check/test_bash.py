import random
import re
import subprocess

from rankzero.commands.jobs.check.bash import changing_names, commands_of


def only(text):
    """Returns the only command of a script."""
    (command,) = commands_of(text)
    return command


def words(command):
    return [word.text for word in command.words]


def test_a_command_has_its_words_without_quotes_comments_and_redirections():
    words_of_quotes = ["python", "train.py", "--name", "a b", "c d", "e", "f g", "hij"]
    assert words(only("python train.py --name 'a b' \"c d\" $'e' f\\ g h\"i\"'j'\n")) == words_of_quotes
    assert words(only("python train.py >log 2>&1 # --epochs 3\n")) == ["python", "train.py"]
    for prefix in ("exec", "time", "nohup", "command", "exec nohup"):
        assert words(only(f"{prefix} python train.py\n")) == ["python", "train.py"]
    command = only("\n# comment\nsrun \\\n  --nodes=2 \\\n  python train.py\n")
    assert (command.line, command.text) == (3, "srun --nodes=2 python train.py")
    assert words(command) == ["srun", "--nodes=2", "python", "train.py"]


def test_commands_of_lists_pipelines_loops_and_functions_but_not_of_texts_are_found():
    text = "f() { a; }\nfor x in 1 2; do b $x; done\nif c; then d; fi\ne && g || h | i\n( j ) & k\n"
    assert [command.program for command in commands_of(text)] == list("abcdeghijk")
    assert [command.program for command in commands_of("cat <<EOF\nsrun x\nEOF\na=$(srun y)\n")] == ["cat", ""]


def test_assignments_are_found():
    plain, exported, before = commands_of("A=1\nexport B=$A C='2 3'\nD=4 python train.py\n")
    assert {name: item.text for name, item in plain.assignments.items()} == {"A": "1"} and not plain.is_export
    assert {name: item.text for name, item in exported.assignments.items()} == {"B": "$A", "C": "2 3"}
    assert exported.is_export and exported.assignments["B"].words[0].expanded == {"A"}
    assert before.assignments["D"].text == "4" and words(before) == ["python", "train.py"]


def test_what_the_script_itself_replaces_is_known():
    for word, expanded, substituted in (
        *(("$A", {"A"}, False), ('"x${A}y$B"', {"A", "B"}, False), ("${A:-$B}", {"A", "B"}, False)),
        *(("$((A + 1))", {"A"}, False), ("'$A'", set(), False), ("\\$A", set(), False)),
        *(('"$(hostname)"', set(), True), ("`hostname`", set(), True), ("'$(hostname)'", set(), False)),
    ):
        found = only(f"echo {word}\n").words[1]
        assert (found.expanded, found.substituted) == (expanded, substituted), word


def test_a_command_in_the_text_of_a_shell_or_on_another_machine_is_found():
    for shell in ("bash -c", "bash -lc", "sh -c", "/bin/bash -l -c"):
        command = only(f"srun -n 2 {shell} 'torchrun --node_rank $SLURM_NODEID \\\n  train.py'\n")
        assert words(command) == ["srun", "-n", "2", "torchrun", "--node_rank", "$SLURM_NODEID", "train.py"]
        assert command.line == 1 and command.words[5].expanded == set()
    for variable, expanded in (("$SLURM_NODEID", {"SLURM_NODEID"}), ("\\$SLURM_NODEID", set())):
        command = only(f'srun bash -c "torchrun --node_rank {variable} train.py"\n')
        assert words(command)[-2:] == ["$SLURM_NODEID", "train.py"] and command.words[3].expanded == expanded
    for start in ("ssh n2 'cd x && {}'", "ssh -p 22 me@n2 {}", "pdsh -w n[1-2] {}"):
        command = commands_of(start.format("python train.py"))[-1]
        assert command.launchers == ["ssh"] and command.script == "train.py"


def test_the_position_of_a_command_is_read():
    for text, name in (
        ("a &\n", "in_background"),
        ("f() { a; }\n", "in_function"),
        ("case x in x) a;; esac\n", "is_conditional"),
    ):
        position = commands_of(text)[0].position
        assert {field for field, value in position._asdict().items() if value} == {name}
    assert not any(commands_of("a\n")[0].position)


def test_words_are_those_of_bash():
    """Compares with bash itself, for words of random parts."""
    generator = random.Random(0)
    parts = ("$A", "${B}", "/", "a", ".py", "'x y'", '"$C z"', "-", "=", ":", "x", "${A}_b", "[0]")
    words = ["".join(generator.choices(parts, k=generator.randint(1, 6))) for _ in range(150)]
    words = [word for word in words if not re.match(r"[\w]+=", word)]  # an assignment
    script = "A=1 B=2 C=3\n" + "".join(f"printf '%s\\0' {word}; printf '\\1'\n" for word in words)
    printed = subprocess.run(["bash", "-f", "-c", script], capture_output=True, text=True).stdout.split("\1")[:-1]

    def value(match):
        return {"A": "1", "B": "2", "C": "3"}.get(match[1] or match[2], "")

    for word, expected in zip(words, printed, strict=True):
        found = [item.text for item in commands_of(f"printf {word}")[0].words[1:]]
        assert [re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text) for text in found] == expected.split("\0")[:-1], word


def test_names_that_change_are_found():
    for text, names in {
        "for i in 1 2; do a=$i; done": {"i", "a"},
        "while read -r host; do ((n++)); done <f": {"host", "n"},
        "read -r a b <f; let c+=1; mapfile -t d": {"a", "b", "c", "d"},
        "x=$((y += 2)); z=$((y + 1))": {"y"},
        "a=1; b=$a": set(),
    }.items():
        assert names <= changing_names(text) and not {"z", "x"} & changing_names(text)


def command(text):
    return commands_of(text)[0]


def test_the_launchers_are_found_from_the_outermost_on():
    expected = {
        **dict.fromkeys(("python train.py", "python train.py --launcher torchrun"), ()),
        **dict.fromkeys(("srun python train.py", "srun --job-name srun python train.py"), ("srun",)),
        "/usr/bin/srun --nodes=2 /env/bin/torchrun train.py": ("srun", "torchrun"),
        "python -m torch.distributed.run train.py": ("torchrun",),
        "python -u -m torch.distributed.launch train.py": ("torchrun",),
        "mpiexec.hydra -n 2 python train.py": ("mpirun",),
        "pbsdsh -- /env/bin/torchrun train.py": ("pbsdsh", "torchrun"),
    }
    assert {text: tuple(command(text).launchers) for text in expected} == expected


def test_whether_a_command_trains():
    training = (
        *("python train.py", "/env/bin/python3.11 -u train.py", "python -m rankzero fit", "$PYTHON train.py"),
        *("${PYTHON_EXE} -u train.py", "torchrun train.py", "srun ./run.sh", "srun bash run.sh"),
        "accelerate launch train.py",
    )
    other = (
        *("bash run.sh", "srun hostname", "python -m pip install x", "python -m venv env", "python -c 'import torch'"),
        *("pip install -r x.py", "cp train.py x", "A=1"),
    )
    expected = dict.fromkeys(training, True) | dict.fromkeys(other, False)
    assert {text: command(text).trains for text in expected} == expected


def test_long_and_short_options_belong_to_their_launcher():
    found = command("srun -N2 --ntasks 4 torchrun --nnodes=2 --nproc_per_node 8 train.py --nodes 3 --x=1")
    assert found.option("srun", "--nodes", "-N").text == "2"
    assert found.option("srun", "--ntasks", "-n").text == "4"
    assert found.option("srun", "--nnodes") is None
    assert found.option("torchrun", "--nproc-per-node").text == "8"
    assert found.option("torchrun", "--nodes") is None
    assert found.option("script", "--nodes").text == "3"
    assert found.option("mpirun", "-np") is None
    for value in ("-c8", "-c 8"):
        assert command(f"srun {value} python train.py").option("srun", "--cpus-per-task", "-c").text == "8"
    assert command("mpirun -np 8 python train.py").option("mpirun", "-n", "-np").text == "8"
