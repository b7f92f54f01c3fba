import traceback

import numpy as np
import psutil
import pytest
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.user_traceback import is_defect, user_frames
from rankzero.distributed.stop_and_failure import error_reporter
from rankzero.sampling.loader import read_ahead
from rankzero.sampling.plan import SamplingPlan


class Failing(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise KeyError("sample")

    __getitems__ = __getitem__


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


def test_frames_of_the_package_are_left_out_unless_it_raised_the_error_or_no_others_remain():
    error = exception_of(lambda: list(read_ahead(Failing(), iter([np.arange(2)]), 0)))
    assert [frame for frame in user_frames(error) if frame.startswith("  File")] == [
        frame for frame in traceback.format_exception(error) if __file__ in frame
    ]
    assert not is_defect(error)
    error = exception_of(lambda: error_reporter.refuse(None, Launch(launcher="slurm")))
    assert user_frames(error) == traceback.format_exception(error) and is_defect(error)
    assert not is_defect(KeyboardInterrupt().with_traceback(error.__traceback__))
    error = exception_of(lambda: psutil.Process(-1))
    error.__traceback__ = error.__traceback__.tb_next.tb_next
    assert user_frames(error) == traceback.format_exception(error)


def test_the_traceback_of_a_loader_process_is_trimmed():
    try:
        list(SamplingPlan().wrap(DataLoader(Failing()), training=True))
    except KeyError:  # as a loader process does
        original = ExceptionWrapper(where="in DataLoader worker process 0")
    assert "/rankzero/sampling/" in original.exc_msg
    error = exception_of(original.reraise)
    error.__traceback__ = error.__traceback__.tb_next  # without the frame of this file
    printed = "".join(user_frames(error))
    assert "in DataLoader worker process 0" in printed and 'raise KeyError("sample")' in printed
    assert "site-packages" not in printed and "/rankzero/sampling/" not in printed


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
