"""Merged outputs of `predict_step`: the rows do not depend on the batch size or the number of ranks."""

import csv
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rankzero.commands.prediction_files import PartWriter, as_plain, merge
from rankzero.sampling.batch_sampler import EvaluationBatchSampler
from running import refusal_of

COUNT = 11


def write_and_merge(tmp_path, output_of, batch_size=4, world=1, count=COUNT):
    """Writes and merges the outputs of all ranks; `output_of` maps the sample indices of a batch to its output."""
    for rank in range(world):
        writer, batches = PartWriter(tmp_path / "parts", rank), EvaluationBatchSampler(count, batch_size, rank, world)
        for batch in range(len(batches)):
            if samples := batches.samples(batch):
                writer.add(samples, output_of(torch.tensor(samples)))
        writer.flush()
    assert merge(tmp_path / "parts", tmp_path / "predictions.pt") == count
    assert not list((tmp_path / "parts").glob("*"))
    return torch.load(tmp_path / "predictions.pt", weights_only=True)


def read_table(tmp_path):
    with (tmp_path / "predictions.csv").open() as file:
        return list(csv.reader(file))


@pytest.mark.parametrize(("batch_size", "world"), [(1, 1), (4, 1), (100, 1), (1, 2), (4, 3), (2, 5), (3, 20)])
def test_rows_are_in_the_order_of_the_samples(tmp_path, batch_size, world):
    def output_of(numbers):
        return {
            "scores": torch.stack([numbers * 1.0, numbers**2], 1),
            "pair": (numbers, numbers.numpy() * 2),
            "list": [numbers, numbers + 1.5],
            "texts": [f"sample {number}" for number in numbers],
            "ragged": [torch.full((int(number) % 3,), int(number)) for number in numbers],
            "none": None,
        }

    found = write_and_merge(tmp_path, output_of, batch_size, world)
    numbers = torch.arange(COUNT)
    assert torch.equal(found["scores"], torch.stack([numbers * 1.0, numbers**2], 1))
    assert type(found["pair"]) is tuple
    assert torch.equal(found["pair"][0], numbers) and torch.equal(found["pair"][1], numbers * 2)
    assert found["texts"] == [f"sample {number}" for number in range(COUNT)]
    assert [row.tolist() for row in found["ragged"]] == [[number] * (number % 3) for number in range(COUNT)]
    assert found["none"] is None
    assert len(found["list"]) == 2 and torch.equal(found["list"][1], numbers + 1.5)


def test_large_outputs_are_merged_from_several_parts_in_a_mapped_file(tmp_path, monkeypatch):
    monkeypatch.setattr("rankzero.commands.prediction_files.PART_BYTES", 64)
    found = write_and_merge(tmp_path, lambda numbers: numbers[:, None] + torch.zeros(50), 3, 2)
    assert torch.equal(found, torch.arange(COUNT)[:, None] + torch.zeros(50))


def test_numeric_outputs_are_also_written_as_csv_which_other_outputs_remove(tmp_path):
    write_and_merge(tmp_path, lambda numbers: {"class": numbers, "p": torch.stack([numbers, -numbers], 1) / 2}, 2, 3)
    rows = read_table(tmp_path)
    assert rows[0] == ["sample", "class", "p.0", "p.1"]
    assert rows[1:] == [[str(i), str(i), str(i / 2), str(-i / 2)] for i in range(COUNT)]
    write_and_merge(tmp_path, lambda numbers: numbers)
    assert read_table(tmp_path)[0] == ["sample", "prediction"]
    write_and_merge(tmp_path, lambda numbers: numbers.view(-1, 1, 1))
    assert not (tmp_path / "predictions.csv").exists()


def test_rows_of_different_shapes_become_a_list_and_no_rows_become_none(tmp_path):
    found = write_and_merge(tmp_path, lambda numbers: torch.zeros(len(numbers), int(numbers.max())))
    assert isinstance(found, list) and [len(row) for row in found] == [3] * 4 + [7] * 4 + [10] * 3
    assert write_and_merge(tmp_path, lambda numbers: numbers, count=0) is None
    assert write_and_merge(tmp_path, lambda numbers: None) is None


@pytest.mark.parametrize("output", [torch.tensor(1.0), 3.0, "text", torch.zeros(2, 2), {"a": torch.tensor(1)}])
def test_an_output_without_a_row_for_each_sample_is_refused(tmp_path, output):
    assert "does not have one row per sample" in refusal_of(write_and_merge, tmp_path, lambda numbers: output).found


def test_outputs_are_converted_to_plain_values_or_refused():
    @dataclass
    class Out:
        logits: torch.Tensor
        names: list

    found = as_plain(Out(torch.ones(2, requires_grad=True) * 2, [np.float32(1.5), namedtuple("Pair", "a b")(1, "x")]))
    assert torch.equal(found["logits"], torch.full((2,), 2.0)) and not found["logits"].requires_grad
    assert found["names"] == [1.5, {"a": 1, "b": "x"}] and type(found["names"][0]) is float
    assert as_plain(torch.zeros(1000, 10)[:, 0]).untyped_storage().nbytes() == 4000  # without the rest of the tensor
    error = refusal_of(as_plain, {"model": torch.nn.Linear(1, 1)})
    assert error.found.startswith("it returned a torch.nn.modules.linear.Linear")
