"""Signal handlers belong to the whole process, so each test runs in a separate process."""

import subprocess
import sys

import pytest

SETUP = """
import os, signal, subprocess, sys, threading, time
from rankzero.distributed.process.stop_signals import SIGNALS, STOP_SIGNALS
from rankzero.distributed.timers import TIMERS
before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
SIGNALS.install()
"""


def run(code):
    return subprocess.run([sys.executable, "-c", SETUP + code], capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_a_signal_requests_a_stop_without_ending_the_process(name):
    result = run(f"""
received = threading.Event()
SIGNALS.subscribe(lambda signum: (print(signum.name, flush=True), received.set()))
os.kill(os.getpid(), signal.{name})
received.wait(10)
print(SIGNALS.received)
""")
    assert (result.returncode, result.stdout.split()) == (0, [name, name]), result.stderr


PROGRAMS = {
    "a signal is read while the main thread is blocked outside Python": ("""
import ctypes
SIGNALS.subscribe(lambda signum: os._exit(7))
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
mutex = (ctypes.c_long * 8)()
for _ in range(2):  # the second waits without Python's lock, as a collective does, and no signal ends that
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
""", 7, ""),
    "a subscriber receives earlier signals": ("""
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.3)
SIGNALS.subscribe(lambda signum: print(signum.name))
""", 0, "SIGUSR1\n"),
    "one Ctrl-C may arrive twice": ("""
for _ in range(2): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1)
print("goes on")
""", 0, "goes on\n"),
    "a second Ctrl-C exits at once": ("""
TIMERS.same_press = 0.2
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.4)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(20)
""", 130, ""),
    "forked processes restore the previous handlers": ("""
import multiprocessing
def handlers(queue):
    queue.put([signal.getsignal(signum) == before[signum] for signum in STOP_SIGNALS])
queue = multiprocessing.get_context("fork").Queue()
multiprocessing.get_context("fork").Process(target=handlers, args=(queue,)).start()
print(all(queue.get(timeout=10)))
print(SIGNALS.received)
""", 0, "True\nNone\n"),
    "waiting for other ranks ends soon after a signal": ("""
TIMERS.stop_grace = 0.2
SIGNALS.check_stop_request()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.5)
SIGNALS.check_stop_request()
""", 75, ""),
}  # fmt: skip


@pytest.mark.parametrize(("code", "exit_code", "printed"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_handles_its_signals(code, exit_code, printed):
    result = run(code)
    assert (result.returncode, result.stdout) == (exit_code, printed), result.stderr
