import traceback

import psutil
import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.user_traceback import user_frames
from rankzero.distributed.stop_and_failure import error_reporter


def exception_of(work):
    try:
        work()
    except Exception as error:
        return error


def test_frames_of_libraries_are_left_out():
    def called_by_the_user():
        return psutil.Process(-1)

    error = exception_of(lambda: called_by_the_user())
    expected = traceback.format_exception(error)
    header, *frames = user_frames(error)
    assert header.startswith("Traceback (most recent call last; ") and header.count("\n") == 1
    assert all(frame in expected for frame in frames) and not any("site-packages" in frame for frame in frames)
    omitted = sum("site-packages" in frame for frame in expected)
    assert omitted and f"; {omitted} frames of" in header and len(frames) == len(expected) - 1 - omitted


def test_frames_of_the_package_are_left_out_unless_all_frames_belong_to_libraries():
    error = exception_of(lambda: error_reporter.refuse(None, Launch(launcher="slurm")))
    assert [frame for frame in user_frames(error) if frame.startswith("  File")] == [
        frame for frame in traceback.format_exception(error) if __file__ in frame
    ]
    error = exception_of(lambda: psutil.Process(-1))
    error.__traceback__ = error.__traceback__.tb_next.tb_next
    assert user_frames(error) == traceback.format_exception(error)


@pytest.mark.parametrize("kind", ["cause", "context", "suppressed"])
def test_a_cause_or_context_is_printed_before_the_error_unless_suppressed(kind):
    def fail():
        try:
            raise KeyError("sample 7")
        except KeyError as error:
            if kind == "context":
                raise RuntimeError("bad batch")  # noqa: B904
            raise RuntimeError("bad batch") from (error if kind == "cause" else None)

    error = exception_of(fail)
    printed = "".join(user_frames(error))
    assert ("KeyError: 'sample 7'" in printed) == (kind != "suppressed")
    assert printed.endswith("RuntimeError: bad batch\n")
    assert printed == "".join(traceback.format_exception(error))
