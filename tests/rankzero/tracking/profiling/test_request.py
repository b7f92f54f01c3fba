import pytest

from rankzero.messages import RequestError
from rankzero.tracking.profiling.request import ProfileRequest


@pytest.mark.parametrize(
    ("profile", "ranks", "request_", "spelling"),
    [
        ("10steps", None, ProfileRequest(10, None, (0,)), "10steps"),
        ("1step@200", "2,0,2", ProfileRequest(1, 200, (0, 2)), "1steps@200"),
        ("010steps@0", "all", ProfileRequest(10, 0, (0, 1, 2)), "10steps@0"),
        ("10steps@200", None, ProfileRequest(10, 200, (0,)), "10steps@200"),
    ],
)
def test_steps_and_ranks_are_read_and_spelled_as_the_user_types_them(profile, ranks, request_, spelling):
    assert ProfileRequest.read(profile, ranks, 3) == request_
    assert str(request_) == f"--profile {spelling}"
    assert ProfileRequest.read(None, None, 3) is None


@pytest.mark.parametrize(
    ("profile", "ranks", "world", "found", "instead"),
    [
        (None, "1", 2, "without --profile", "--profile 10steps --profile_ranks 1"),
        ("10steps", "0,2,3", 3, "the run has 3 processes, ranks 0 to 2", "--profile_ranks 0,2"),
        ("10steps", "1", 1, "the run has one process, rank 0", "--profile_ranks all"),
    ],
)
def test_ranks_that_cannot_be_profiled_are_refused(profile, ranks, world, found, instead):
    with pytest.raises(RequestError) as refusal:
        ProfileRequest.read(profile, ranks, world)
    assert refusal.value.asked == f"--profile_ranks {ranks}"
    assert found in refusal.value.found and refusal.value.instead == instead
