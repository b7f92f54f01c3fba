import random
import re
import subprocess

from rankzero.jobs.check.commands import parse


def test_words_are_those_of_bash():
    """Compares with bash itself, for words of random parts."""
    generator = random.Random(0)
    parts = ["$A", "${B}", "/", "a", ".py", "'x y'", '"$C z"', "-", "=", ":", "x"]
    parts += ["${A}_b", "[0]", "\\ ", '"\\""', "$'q'"]
    words = ["".join(generator.choices(parts, k=generator.randint(1, 6))) for _ in range(150)]
    words = [word for word in words if not re.match(r"\w+=", word)]  # an assignment
    script = "A=1 B=2 C=3\n" + "".join(f"printf '%s\\0' {word}; printf '\\1'\n" for word in words)
    printed = subprocess.run(["bash", "-f", "-c", script], capture_output=True, text=True).stdout.split("\1")[:-1]

    def value(match):
        return {"A": "1", "B": "2", "C": "3"}.get(match[1] or match[2], "")

    for word, expected in zip(words, printed, strict=True):
        (command,) = parse(f"printf {word} >log 2>&1  # a 'comment")
        found = [re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text) for text in command.words[1:]]
        assert found == expected.split("\0")[:-1], word


def test_commands_that_certainly_run_are_known():
    certain = "a; b && c | d\n! e \\\n & exec f\nX=$(y) g >z <<<w && h"
    assert [command.program for command in parse(certain) if command.is_certain] == list("abcdefgh")
    uncertain = ("if a; then b; fi", "while a; do b; done", "case $x in a) b;; esac", "f() { a; b; }", "(a; b)")
    for text in (*uncertain, "{ a; b; }", "for ((i = 0; i < 2; i++)); do a; done"):
        assert [command.program for command in parse(f"{text}\nlast") if command.is_certain] == ["last"], text
    for text in ("[ a ] && b", "command -v a && b", "a || b"):
        assert [command.is_certain for command in parse(text)] == [True, False], text
    assert [command.in_background for command in parse("cd x && a | b &\nc")] == [True, True, True, False]


def test_a_command_has_its_launchers_from_the_outermost_on():
    expected = {
        "python train.py --launcher torchrun": ([], True),
        "srun --job-name srun python -m pkg": (["srun"], True),
        "/usr/bin/srun -N2 /env/bin/torchrun train.py": (["srun", "torchrun"], True),
        "$PYTHON -u -m torch.distributed.launch train.py": (["torchrun"], True),
        "mpiexec.hydra -n 2 hostname": (["mpirun"], False),
        "jsrun -n 2 torchrun train.py": ([], False),  # a launcher that the rules do not know
        "python -m pip install x": ([], False),
    }
    for text, found in expected.items():
        (command,) = parse(text)
        assert (command.launchers, command.trains) == found, text
    (command,) = parse("srun -N2 --ntasks 4 torchrun --nnodes=2 --nproc_per_node 8 train.py --nodes 3")
    options = {"srun": ("-N", "--ntasks", "--nodes"), "torchrun": ("--nnodes", "--nproc-per-node", "--nodes")}
    found = [command.option(launcher, name) for launcher in options for name in options[launcher]]
    assert found == ["2", "4", None, "2", "8", None]
