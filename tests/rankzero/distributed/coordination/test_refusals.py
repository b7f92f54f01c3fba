import json
import pickle
import socket
from dataclasses import asdict

import pytest

from rankzero.distributed.coordination.refusals import Outcomes
from rankzero.messages import CannotStart


def refused(*texts):
    return Outcomes.of([{"refused": text, "summary": text.strip()} if text else {} for text in texts], "rank {}".format)


def test_the_lowest_rank_of_each_different_refusal_and_of_failures_is_known():
    outcomes = refused("a", "", "b", "a", "b")
    assert outcomes.refusals == {"a": (0, "rank 0", "a"), "b": (2, "rank 2", "b")}
    assert not outcomes.all_refuse and outcomes.failed_name == "" and refused("a", "a").all_refuse
    outcomes = Outcomes.of([{}, {"failed": "KeyError(1)"}, {"failed": "KeyError(2)"}], "rank {}".format)
    assert (outcomes.failed_name, outcomes.failure, outcomes.refusals) == ("rank 1", "KeyError(1)", {})


@pytest.mark.parametrize("has_refused", [True, False])
@pytest.mark.parametrize("is_remote", [True, False])
def test_a_refusal_of_another_rank_has_its_name_and_whether_it_is_on_another_machine(has_refused, is_remote):
    host = "elsewhere" if is_remote else socket.gethostname()
    outcome = {"refused": "  a\n  b", "summary": "a"}
    outcomes = Outcomes.of([{}, outcome, outcome], f"rank {{}} on {host}".format)
    outcomes = Outcomes(**json.loads(json.dumps(asdict(outcomes))))
    own_error = CannotStart("  a\n  b") if has_refused else None
    refusal = outcomes.refusal(own_error, 2)
    assert refusal.reported_elsewhere and refusal.is_remote == is_remote
    if not has_refused:
        refusal = pickle.loads(pickle.dumps(refusal))
        assert str(refusal) == f"  rank 1 on {host}:\n  a\n  b"
        assert refusal.summary == f"rank 1 on {host} cannot start: a"
