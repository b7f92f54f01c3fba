"""Scripts behave the same with the preloaded programs as with the real interpreter."""

import os
import signal
import subprocess

import pytest

from running import BIN, INTERPRETER_BIN, processes_in, wait_until

SCRIPTS = {
    "values": """
import os, sys, torch
print(__name__, __file__, sys.argv, os.getcwd(), os.environ["GIVEN"], os.getppid(), sys.path[0], sys.stdin.read())
print(os.sched_getaffinity(0), os.umask(0), sys.stdout.isatty(), sys.dont_write_bytecode, file=sys.stderr)
print(open(3).read(), torch.get_num_threads())
""",
    "code": "import sys; sys.exit(3)",
    "text": "raise SystemExit('why')",
    "error": "def f():\n    raise ValueError('x')\nf()",
    "interrupted": "raise KeyboardInterrupt",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "exit function": "import atexit; atexit.register(print, 'last'); print('first', end=' ')",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
    "child": """
import subprocess, sys
print(subprocess.run([sys.executable, "-c", "import sys; print(sys.argv, sys.flags.isolated)", "x"], check=True))
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_and_returns_what_it_does_with_the_real_interpreter(tmp_path, name):
    (tmp_path / "main.py").write_text(SCRIPTS[name])
    (tmp_path / "file").write_text("of file 3")
    outcomes = []
    variables = {**os.environ, "GIVEN": "ä", "OMP_NUM_THREADS": "2"}
    for folder in (BIN, INTERPRETER_BIN):
        command = ["sh", "-c", f"umask 027; exec taskset -c 0 {folder}/python main.py a 'b c' 3<file"]
        options = {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True}
        result = subprocess.run(command, input="stdin", **options)
        printed = [text.replace(str(folder), "") for text in (result.stdout, result.stderr)]
        outcomes.append((result.returncode, *printed))
    assert outcomes[0] == outcomes[1]


def test_signals_reach_the_fork_and_a_killed_program_takes_it_along(tmp_path):
    (tmp_path / "main.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'got it\\n'))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.1)"
    )
    with subprocess.Popen([BIN / "python", "main.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "got it\n"
        assert len(processes_in(tmp_path)) == 2
        process.kill()
    wait_until(lambda: not processes_in(tmp_path), "the end of the fork")


@pytest.mark.parametrize("arguments", [["-c", "{code}"], ["-X", "dev", "main.py"]])
def test_other_command_lines_run_in_the_real_interpreter(tmp_path, arguments):
    code = "import sys; print('torch' in sys.modules)"
    (tmp_path / "main.py").write_text(code)
    command = [BIN / "python", *(argument.format(code=code) for argument in arguments)]
    assert subprocess.check_output(command, cwd=tmp_path, text=True) == "False\n"
