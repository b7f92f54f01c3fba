import pytest
import torch
import torch.distributed as dist

from rankzero.preflight import message_passing
from rankzero.preflight.check import FAIL, OK
from rankzero.preflight.message_passing import check_message_passing


def exchange(coordinator, corrupts=False):
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        if corrupts and coordinator.launch.rank == 2:
            patch.setattr(message_passing, "_message", lambda number, device: torch.zeros(message_passing.VALUES))
        check = check_message_passing(coordinator, "gloo", dist.group.WORLD, torch.device("cpu"), lines.append)
    return check, lines


def test_every_rank_receives_data_and_each_receipt_is_printed_once(on_ranks):
    results = on_ranks(exchange, 3)
    for check, _ in results:
        assert check.status == OK and not check.blocks and len(check.values["round_trips"]) == 2
    assert [line.split(" on ")[0] for line in results[0][1]] == ["rank 1", "rank 2"]
    assert not any(lines for _, lines in results[1:])


def test_a_rank_that_receives_wrong_data_is_named(on_ranks):
    for check, _ in on_ranks(exchange, 3, True):
        assert check.status == FAIL and check.blocks
        (line,) = check.details
        assert line.startswith("ranks 0, 2 (") and "differs" in line, check
