"""Runs Python scripts without importing torch, Lightning and Rankzero each time.

`programs` writes the programs `python` and `torchrun` into a folder and starts a process that has imported everything.
Each program asks this process for a fork, which takes over the program's arguments, variables, working directory, open
files, limits and network namespace. The program forwards signals to the fork and ends as the fork ends; if the program
is killed, so is the fork. Launchers, Rankzero and tests can therefore use these programs as they use the real ones.

The programs run the real interpreter where a fork would behave differently: for `-c` and other options, under strace,
as another user, in another cgroup, for benchmarks, or with other values of variables that are read during imports.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]

MODULES = (
    *("rankzero.cli.lightning_cli", "rankzero.commands.prediction", "rankzero.preflight.all_checks"),
    *("rankzero.trainer", "rankzero.training.fit_loop"),
    *("torch.distributed.run", "torch.utils.tensorboard", "tensorboard.compat.proto", "torchvision"),
)

AT_IMPORT = ("OMP_", "MKL_", "PYTHON", "LD_PRELOAD", "LC_", "LANG", "ATEN_", "ONEDNN_", "DNNL_", "TORCH_", "MALLOC_")
"""Beginnings of the names of variables that Python or libraries read when they start or are imported."""

TAKEN_OVER = (
    *("OMP_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONSAFEPATH", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "LC_CTYPE",  # Python sets it, to the UTF-8 that it already uses
)
"""Exceptions, which a fork takes over."""

PROGRAM = """\
#!{python} -IS
import sys
sys.path[:0] = [{folder!r}]
from {module} import run
run({socket!r}, {python!r}, {name!r})
"""

FORWARDED = tuple(getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "CONT"))
LIMITS = (
    *(resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_FSIZE),
    *(resource.RLIMIT_AS, resource.RLIMIT_STACK),
)


@contextlib.contextmanager
def programs(folder: Path) -> Iterator[Path]:
    """Writes the programs and starts the process that they ask for forks; yields the folder with the programs."""
    real, address = Path(sys.executable).parent, folder / "socket"
    target = folder / "bin"
    target.mkdir(parents=True)
    for program in real.iterdir():
        (target / program.name).symlink_to(program)
    for name in ("python", "torchrun"):
        (target / name).unlink()
        module = {"folder": str(Path(__file__).parent), "module": Path(__file__).stem}
        text = PROGRAM.format(python=sys.executable, socket=str(address), name=name, **module)
        (target / name).write_text(text)
        (target / name).chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, __file__, str(address), str(target / "python")]
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, start_new_session=True) as server:
        try:
            yield target
        finally:
            server.kill()


# ---- the programs: only the standard library ----


def run(address: str, python: str, name: str) -> NoReturn:
    """Runs this command line in a fork of the process at the address, or else in the real interpreter."""
    arguments = sys.argv[1:] if name == "python" else ["-m", "torch.distributed.run", *sys.argv[1:]]
    with contextlib.suppress(OSError):
        connection = _request(address, arguments)
        if connection is not None:
            _follow(connection)
    os.execv(python, [python, *arguments])


def _request(address: str, arguments: list[str]) -> socket.socket | None:
    """Sends the request for a fork; returns None if only the real interpreter can run the command line."""
    script = arguments[1:] if arguments[:1] == ["-u"] else arguments
    if not script or not (script[0].endswith(".py") or script[:2] == ["-m", "torch.distributed.run"]):
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    expected = json.loads(_read_line(connection))
    differs = any(expected["variables"].get(name) != value for name, value in _read_at_import().items())
    if differs or expected["surroundings"] != _surroundings():
        return None
    if "/launch/" in script[0] and not script[0].startswith(expected["repository"]):  # of a copy of Rankzero
        return None
    if os.path.basename(os.path.dirname(script[0])) == "benchmarks":  # noqa: PTH119, PTH120
        return None  # benchmarks measure the start too
    files = [int(entry) for entry in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{entry}")]
    files.remove(connection.fileno())
    request = {
        "arguments": script,
        "is_unbuffered": script is not arguments or bool(os.environ.get("PYTHONUNBUFFERED")),
        "variables": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "parent": os.getppid(),
        "files": files,
        "cpus": sorted(os.sched_getaffinity(0)),
        "limits": [resource.getrlimit(limit) for limit in LIMITS],
        "mask": os.umask(0),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until they can be forwarded
    text = json.dumps(request).encode(errors="surrogateescape")
    socket.send_fds(connection, [len(text).to_bytes(8, "little")], files)
    connection.sendall(text)
    return connection


def _follow(connection: socket.socket) -> NoReturn:
    """Forwards signals to the fork, and ends as it does."""
    pid = int(_read_line(connection))
    if os.environ.get("RANKZERO_LOCAL") == str(os.getppid()):  # as the local process does, see `die_with_parent`
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    line = _read_line(connection)
    code = int(line) if line else 1
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _surroundings() -> list[str]:
    """Returns what a fork cannot take over: user, process namespace, cgroup; and whether a debugger is attached."""
    with open("/proc/self/status") as status, open("/proc/self/cgroup") as cgroup:  # noqa: PTH123
        tracer = next(line for line in status if line.startswith("TracerPid"))
        return [str(os.getuid()), str(os.getgid()), os.readlink("/proc/self/ns/pid"), cgroup.read(), tracer]  # noqa: PTH115


def _read_at_import() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(AT_IMPORT) and not name.startswith(TAKEN_OVER)
    }


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (byte := connection.recv(1)):
        line += byte
    return line


# ---- the process that has imported everything ----


class Server:
    """Forks this process on request at a Unix socket; forks start `python` as their interpreter."""

    def __init__(self, address: str, python: str) -> None:
        self.python = python
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)  # closed when the test run ends
        greeting = {"surroundings": _surroundings(), "variables": _read_at_import(), "repository": str(REPOSITORY)}
        self.greeting = json.dumps(greeting).encode() + b"\n"

    def serve(self) -> dict[str, Any] | None:
        """Serves requests; returns in each fork with its request, and None at the end of the test run."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj == 0:
                    return None
                if key.fileobj is self.listener:
                    request = self._accept()
                    if request is not None:
                        return request
                else:
                    self._end(*key.data)

    def _accept(self) -> dict[str, Any] | None:
        """Forks for the next connection; returns the request in the fork only."""
        connection, _ = self.listener.accept()
        with contextlib.suppress(OSError):  # the program was killed, as below
            connection.sendall(self.greeting)
        header, files, *_ = socket.recv_fds(connection, 8, 250)
        size, text = int.from_bytes(header, "little"), b""
        while len(text) < size and (part := connection.recv(size - len(text))):
            text += part
        if not text or len(text) < size:  # the program runs the real interpreter, or was killed
            connection.close()
            return None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # in the fork until `become`, so that none is lost
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % pid)
            for file in (connection, os.pidfd_open(pid)):
                self.selector.register(file, selectors.EVENT_READ, (pid, connection))
            for file in files:
                os.close(file)
            return None
        request: dict[str, Any] = json.loads(text.decode(errors="surrogateescape"))
        request["program"] = int.from_bytes(credentials[:4], "little")
        request["files"] = dict(zip(request["files"], files, strict=True))
        for key in self.selector.get_map().values():  # `become` closes the files, which these objects must not do later
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.detach()
        connection.detach()
        self.selector.close()
        return request

    def _end(self, pid: int, connection: socket.socket) -> None:
        """Ends a fork whose program was killed, or tells the program how its fork has ended."""
        if connection.fileno() < 0:
            return
        for key in [key for key in self.selector.get_map().values() if key.data and key.data[0] == pid]:
            self.selector.unregister(key.fileobj)
            if key.fileobj is not connection:
                os.close(key.fd)
        finished, status = os.waitpid(pid, os.WNOHANG)
        if not finished:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        else:
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        connection.close()


def become(request: dict[str, Any], python: str, path: list[str]) -> None:
    """Gives this fork the surroundings of the program that asked for it."""
    os.setsid()
    _enter_namespaces(request["program"])
    first = 1 + max(int(file) for file in os.listdir("/proc/self/fd"))
    for target, source in request["files"].items():
        os.dup2(source, first + target)
    os.closerange(0, first)
    for target in request["files"]:
        os.dup2(first + target, target)
        os.close(first + target)
    for limit, value in zip(LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, value)
    os.sched_setaffinity(0, request["cpus"])
    os.umask(request["mask"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.chdir(request["folder"])
    sys.modules["rankzero.distributed.process.spawn"].START_FOLDER = Path.cwd()
    os.environ.clear()
    os.environ.update(request["variables"])
    python_path = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    sys.path[:] = [*python_path, *path]
    sys.executable = python
    _open_streams(request["is_unbuffered"])
    own, real_getppid = os.getpid(), os.getppid
    # A process that this fork starts, such as a loader process, has this fork as its parent.
    os.getppid = lambda: request["parent"] if os.getpid() == own else real_getppid()
    import numpy.random
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(request["cpus"]))))
    numpy.random.seed()  # as unpredictable as in a new process


def _enter_namespaces(program: int) -> None:
    for name in ("net", "uts", "mnt"):
        if os.readlink(f"/proc/{program}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):  # noqa: PTH115
            namespace = os.open(f"/proc/{program}/ns/{name}", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the {name} namespace")
            os.close(namespace)


def _open_streams(is_unbuffered: bool) -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            errors = "backslashreplace" if name == "stderr" else "strict"
            stream = open(number, "w" if number else "r", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        except OSError:  # closed
            stream = None
        else:
            is_line_buffered = is_unbuffered or name == "stderr" or os.isatty(number)
            stream.reconfigure(line_buffering=is_line_buffered, write_through=is_unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def execute(arguments: list[str]) -> int:
    """Runs a script, or torchrun, as the interpreter does; returns the exit code."""
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, os.getcwd())  # noqa: PTH109
            sys.modules.pop(arguments[1], None)  # otherwise, runpy warns
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            _let_stop_signals_through(arguments[0])
            if not os.environ.get("PYTHONSAFEPATH"):
                sys.path.insert(0, os.path.dirname(os.path.realpath(arguments[0])))  # noqa: PTH120
            main_module = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
            main_module.__file__ = os.path.abspath(arguments[0])  # noqa: PTH100
            exec(compile(Path(arguments[0]).read_bytes(), main_module.__file__, "exec"), main_module.__dict__)
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _let_stop_signals_through(script: str) -> None:
    """Unblocks the stop signals that a test has blocked, which is a command's first action after its imports."""
    from rankzero.distributed.process.stop_signals import SIGNALS, STOP_SIGNALS

    if signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOP_SIGNALS):
        if Path(script).parent.name == "launch":
            SIGNALS.install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _exit(code: int) -> NoReturn:
    """Ends as the interpreter does, but without deleting thousands of modules one by one, which takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # closed
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def main() -> None:
    """Imports everything, serves requests, and runs the script of a request in each fork."""
    sys.path = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]
    path = list(sys.path)
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "project")]
    server = Server(*sys.argv[1:])  # programs that are started from now on wait for the imports
    for module in MODULES:
        __import__(module)
    sys.path[:] = path
    gc.collect()
    gc.freeze()  # pages that a collection does not touch stay shared
    request = server.serve()
    if request is not None:
        become(request, server.python, path)
        _exit(execute(request["arguments"]))
    os._exit(0)


if __name__ == "__main__":
    main()
