"""Profiles of two ranks, written while both train in Rankzero's loop."""

import gzip
import json

import pytest
import torch

from running import weights
from system.forks import fit_on_ranks, outputs

pytestmark = pytest.mark.xdist_group("profiling")

ARGUMENTS = ("--model", "MLP", "--data", "Toy", "--epochs", "1", "--trainer.limit_train_batches", "12")


@pytest.fixture(scope="module")
def unprofiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unprofiled")
    fit_on_ranks(*ARGUMENTS, "--name", "x", folder=folder, world=2)
    return weights(folder / "runs/x")


@pytest.mark.parametrize(("chosen", "ranks"), [("1", [1]), ("all", [0, 1])])
def test_the_chosen_ranks_are_profiled_and_learn_the_same(chosen, ranks, unprofiled, tmp_path):
    profile = ("--profile", "3steps", "--profile_ranks", chosen)
    fit_on_ranks(*ARGUMENTS, "--name", "x", *profile, folder=tmp_path, world=2)
    folder = tmp_path / "runs/x/profile/attempt-0001"
    assert sorted(path.name for path in folder.iterdir()) == [
        name for rank in ranks for name in (f"rank-{rank:03d}.json.gz", f"rank-{rank:03d}.txt")
    ]
    for rank in ranks:
        content = json.loads(gzip.decompress((folder / f"rank-{rank:03d}.json.gz").read_bytes()))
        names = [event["name"] for event in content["traceEvents"]]
        assert [name for name in names if name.startswith("step ")] == ["step 6", "step 7", "step 8"]
        assert content["distributedInfo"]["rank"] == rank
        assert any("all_reduce" in name or "allreduce" in name for name in names)
    printed = outputs(tmp_path, 2)
    assert [output.count("profiled steps 6 to 8") for output in printed] == [int(rank == ranks[0]) for rank in (0, 1)]
    assert ("rank-000.txt, and those of 1 more rank\n" in printed[0]) == (len(ranks) == 2)
    assert not any("slower training loop" in output for output in printed)
    learned = weights(tmp_path / "runs/x")
    assert all(torch.equal(value, learned[name]) for name, value in unprofiled.items())
