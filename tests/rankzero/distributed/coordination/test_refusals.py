import json
import pickle
import socket
from dataclasses import asdict

import pytest

from rankzero.distributed.coordination.refusals import Outcomes
from rankzero.messages import CannotStart


@pytest.mark.parametrize("has_refused", [True, False])
@pytest.mark.parametrize("is_remote", [True, False])
def test_a_refusal_of_another_rank_has_its_name_and_whether_it_is_on_another_machine(has_refused, is_remote):
    host = "elsewhere" if is_remote else socket.gethostname()
    outcome = {"refused": "  a\n  b", "summary": "a"}
    outcomes = Outcomes.of([{}, outcome, outcome], f"rank {{}} on {host}".format)
    outcomes = Outcomes(**json.loads(json.dumps(asdict(outcomes))))
    refusal = outcomes.refusal(CannotStart("  a\n  b") if has_refused else None, 2)
    assert refusal.reported_elsewhere and refusal.is_remote == is_remote
    if not has_refused:
        refusal = pickle.loads(pickle.dumps(refusal))
        assert str(refusal) == f"  rank 1 on {host}:\n  a\n  b"
        assert refusal.summary == f"rank 1 on {host} cannot start: a"
