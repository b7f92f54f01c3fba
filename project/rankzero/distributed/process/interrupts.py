"""Makes Ctrl-C end one of Rankzero's commands without a traceback while its modules are imported.

Importing this module installs the handler.
"""

import os
import signal
import sys
from types import FrameType

_LAUNCH = os.path.abspath(f"{__file__}/../../../../../launch")  # noqa: PTH100 - importing pathlib takes longer


def restore() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt, which a command catches after it has been imported."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    if sys.argv[0] == "-m":  # while Python imports the package to run
        return "rankzero" in sys.orig_argv
    folder, name = os.path.split(os.path.abspath(sys.argv[0]))  # noqa: PTH100
    return name == "rankzero" or folder == _LAUNCH


def _exit(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _exit)
