import pytest
import torch
import torch.distributed as dist

from rankzero.preflight import message_passing
from rankzero.preflight.check import FAIL, OK
from rankzero.preflight.message_passing import check_message_passing


def exchange(coordinator):
    """Exchanges messages, of which rank 2 sends right and then wrong ones; returns the checks and the printed lines."""
    results = []
    for corrupts in (False, coordinator.launch.rank == 2):
        lines = []
        with pytest.MonkeyPatch.context() as patch:
            if corrupts:
                patch.setattr(message_passing, "_message", lambda number, device: torch.zeros(message_passing.VALUES))
            check = check_message_passing(coordinator, "gloo", dist.group.WORLD, torch.device("cpu"), lines.append)
        results.append((check, lines))
    return results


def test_every_rank_receives_data_each_receipt_is_printed_once_and_one_that_receives_wrong_data_is_named(on_ranks):
    for rank, ((right, lines), (wrong, _)) in enumerate(on_ranks(exchange, 3)):
        assert right.status == OK and not right.blocks and len(right.values["round_trips"]) == 2
        assert [line.split(" on ")[0] for line in lines] == (["rank 1", "rank 2"] if rank == 0 else [])
        assert wrong.status == FAIL and wrong.blocks
        (line,) = wrong.details
        assert line.startswith("ranks 0, 2 (") and "differs" in line, wrong
