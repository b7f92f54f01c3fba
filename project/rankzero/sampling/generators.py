"""Global random generators of a process: Python's, NumPy's and torch's CPU generator."""

import os
import random
from typing import Any

import numpy as np
import torch

State = tuple[Any, Any, torch.Tensor]


def global_seed() -> int:
    """Returns the seed of the last call of Lightning's `seed_everything`; 0 without a call."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)


def seed(key: int) -> None:
    """Seeds the three generators from 64 random bits; takes 6 microseconds."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def draw() -> tuple[float, float, float]:
    """Draws one number from each generator: after the same seed the same numbers, unless something drew before."""
    return random.random(), np.random.random_sample(), torch.rand((), device="cpu").item()


def look() -> State:
    """Returns the states of the three generators."""
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def drawn_since(before: State) -> bool:
    """Returns whether a generator has been drawn from or seeded since `look` returned `before`."""
    now = look()
    same = _of_python(now) == _of_python(before) and _of_numpy(now) == _of_numpy(before)
    return not (same and torch.equal(now[2], before[2]))


def put_back(state: State) -> None:
    """Restores the states that `look` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def _of_python(state: State) -> tuple[Any, ...]:
    """Returns the parts of Python's state that change: a draw advances the position, a new seed replaces all words."""
    _, words, next_normal = state[0]
    return words[-1], words[0], words[1], next_normal


def _of_numpy(state: State) -> Any:
    """Returns the parts of NumPy's state that change; a program may have replaced NumPy's generator by another kind."""
    of_numpy = state[1]
    if of_numpy["bit_generator"] != "MT19937":
        return repr(of_numpy)
    twister = of_numpy["state"]
    return twister["pos"], twister["key"][0], twister["key"][1], of_numpy["has_gauss"], of_numpy["gauss"]
