"""Which steps to profile, and on which ranks. Does not import torch."""

import re
from dataclasses import dataclass

from rankzero.messages import RequestError


@dataclass(frozen=True)
class ProfileRequest:
    """The values of `--profile` and `--profile_ranks`.

    Args:
        steps: Number of optimizer steps to profile.
        after: Number of optimizer steps of the run after which to begin; None for the end of the warm-up.
        ranks: Ranks to profile, in ascending order.
    """

    steps: int
    after: int | None
    ranks: tuple[int, ...]

    @classmethod
    def read(cls, profile: str | None, ranks: str | None, world_size: int) -> "ProfileRequest | None":
        """Returns the request, or None if nothing is to be profiled.

        Args:
            profile: Value of `--profile`, such as `10steps@200`; None without the flag.
            ranks: Value of `--profile_ranks`, such as `0,1` or `all`; None without the flag.
            world_size: Number of processes.

        Raises:
            RequestError: The ranks do not exist, or nothing is to be profiled on them.
        """
        if profile is None:
            if ranks is None:
                return None
            found = "without --profile, no rank is profiled"
            raise RequestError(f"--profile_ranks {ranks}", found, f"--profile 10steps --profile_ranks {ranks}")
        match = re.fullmatch(r"([0-9]+)steps?(?:@([0-9]+))?", profile)
        assert match, profile
        chosen = range(world_size) if ranks == "all" else sorted({int(rank) for rank in (ranks or "0").split(",")})
        if chosen[-1] >= world_size:
            found = f"the run has {world_size} processes, ranks 0 to {world_size - 1}"
            found = found if world_size > 1 else "the run has one process, rank 0"
            existing = ",".join(str(rank) for rank in chosen if rank < world_size)
            raise RequestError(f"--profile_ranks {ranks}", found, f"--profile_ranks {existing or 'all'}")
        return cls(int(match[1]), int(match[2]) if match[2] else None, tuple(chosen))

    def __str__(self) -> str:
        """Returns the flag and its value, as the user would type them."""
        return f"--profile {self.steps}steps" + ("" if self.after is None else f"@{self.after}")
