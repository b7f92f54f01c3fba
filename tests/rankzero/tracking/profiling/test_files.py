from itertools import pairwise

import torch

from rankzero.distributed.monitoring.activity import BACKWARD, CHECKPOINT, DATA, END, FORWARD, HOOK, Activity
from rankzero.tracking.profiling.files import OPERATORS, track_of, write_table
from rankzero.tracking.profiling.recording import Part, Recording


def test_the_track_has_a_range_for_each_step_that_contains_its_parts():
    times = (6, DATA, 1_000_000, 2_000_000), (6, FORWARD, 2_000_000, 5_000_500), (7, DATA, 6_000_000, 7_000_000)
    parts = [Part(*arguments) for arguments in times]
    events = [event for event in track_of(parts, 1_000_000) if event["ph"] == "X"]
    sixth = [("step 6", 0, 4000.498), (DATA, 0, 999.996), (FORWARD, 1000, 3000.496)]
    seventh = [("step 7", 5000, 999.998), (DATA, 5000, 999.996)]
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [*sixth, *seventh]


def recorded(steps):
    activity = Activity()
    recording = Recording(activity, "cpu")
    recording.begin()
    activity.listen(recording.enter)
    for step in range(steps):
        activity.begin_batch(step)
        for phase in (FORWARD, BACKWARD, HOOK, CHECKPOINT):
            activity.enter(phase)
            torch.ones(3) @ torch.ones(3)
    activity.enter(END)
    recording.end()
    return recording


def test_the_parts_of_a_recording_follow_one_another():
    recording = recorded(2)
    parts = list(recording.parts)
    phases = (DATA, FORWARD, BACKWARD, HOOK, CHECKPOINT)
    assert [(part.step, part.phase) for part in parts] == [(step, phase) for step in (1, 2) for phase in phases]
    assert all(part.end == following.begin for part, following in pairwise(parts))
    assert recording.steps == [1, 2]


def test_the_table_of_a_gpu_has_a_second_section(tmp_path):
    """The section is written without CUDA times: no test of this project has run on CUDA."""
    recording = recorded(1)
    recording.has_cuda = True
    write_table(tmp_path / "rank-000.txt", recording, "the title")
    text = (tmp_path / "rank-000.txt").read_text()
    assert text.startswith("the title\n\nMean time of each part")
    assert f"The {OPERATORS} operators with the most self CPU time:\n---" in text
    assert f"The {OPERATORS} operators with the most self CUDA time:\n---" in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]
