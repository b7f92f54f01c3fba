"""Tutorials in tests/public/tutorials: the script with stock Lightning, and with one changed line on one and two ranks.

Hydra is not required: its containers are stood in for by UserList and UserDict.
"""

from pathlib import Path

import pytest
import torch

from stock import differences
from system.forks import fit_on_ranks, outputs

TUTORIALS = {path.stem: path for path in (Path(__file__).parent.parent / "public/tutorials").glob("*.py")}
STOCK, OURS = "from lightning.pytorch import Trainer\n", "from rankzero import Trainer\n"
DEPENDS_ON_RANKS = {"lr_find"}
"""Tutorials that use the losses of a single rank."""


def result_of(folder, name, world, *changes):
    """Runs a tutorial with changed lines in a folder of its own, and returns what it has saved."""
    text = TUTORIALS[name].read_text()
    for before, after in changes:
        assert text.count(before) == 1
        text = text.replace(before, after)
    folder.mkdir()
    (folder / f"{name}.py").write_text(text)
    fit_on_ranks(folder=folder, world=world, script=str(folder / f"{name}.py"))
    assert not any("Traceback" in printed for printed in outputs(folder, world))
    return torch.load(folder / "result.pt", weights_only=False)


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_has_the_results_of_lightning_with_one_changed_line(tmp_path, name):
    expected = result_of(tmp_path / "stock", name, 1)
    assert not differences(expected, result_of(tmp_path / "one", name, 1, (STOCK, OURS)))
    if name == "notebook":  # has one process
        return
    found = result_of(tmp_path / "two", name, 2, (STOCK, OURS), ("BATCH = 8\n", "BATCH = 4\n"))
    if name in DEPENDS_ON_RANKS:
        assert found.keys() == expected.keys() and all(value.isfinite().all() for value in found["weights"].values())
    else:
        assert not differences(expected, found, 1e-5)
