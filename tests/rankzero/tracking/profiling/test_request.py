import pytest

from rankzero.messages import RequestError
from rankzero.tracking.profiling.request import ProfileRequest


@pytest.mark.parametrize(
    ("profile", "ranks", "request_"),
    [
        ("10steps", None, ProfileRequest(10, None, (0,))),
        ("1step@200", "2,0,2", ProfileRequest(1, 200, (0, 2))),
        ("010steps@0", "all", ProfileRequest(10, 0, (0, 1, 2))),
    ],
)
def test_steps_and_ranks_are_read(profile, ranks, request_):
    assert ProfileRequest.read(profile, ranks, 3) == request_


def test_nothing_is_requested_by_default():
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


@pytest.mark.parametrize("profile", ["10steps", "10steps@200"])
def test_a_request_is_spelled_as_the_user_types_it(profile):
    assert str(ProfileRequest.read(profile, None, 1)) == f"--profile {profile}"
