"""Global random generators of a process: Python's, NumPy's and torch's CPU generator."""

import os
import random
from typing import Any

import numpy as np
import torch

States = tuple[Any, Any, torch.Tensor]


def global_seed() -> int | None:
    """Returns the seed of the last call of Lightning's `seed_everything`; None without a call."""
    value = os.environ.get("PL_GLOBAL_SEED")
    return int(value) if value else None


def draw_seed() -> int:
    """Draws a seed from torch's generator, as a shuffling DataLoader does."""
    return int(torch.randint(2**32, (), device="cpu"))


def seed(key: int) -> None:
    """Seeds the three generators from 64 random bits; takes 6 microseconds."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def draw() -> tuple[float, float, float]:
    """Draws one number from each generator: after the same seed the same numbers, unless something drew before."""
    return random.random(), np.random.random_sample(), torch.rand((), device="cpu").item()


def get_states() -> States:
    """Returns the states of the three generators."""
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def have_changed_since(earlier: States) -> bool:
    """Returns whether a generator has been drawn from or seeded since `get_states` returned `earlier`."""
    current = get_states()
    return _summary(current) != _summary(earlier) or not torch.equal(current[2], earlier[2])


def set_states(states: States) -> None:
    """Restores the states that `get_states` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _summary(states: States) -> tuple[Any, ...]:
    """Returns what changes in Python's and NumPy's states: a draw advances the position, a seed replaces all words."""
    (_, words, next_normal), numpy_state, _ = states
    twister = numpy_state["state"]
    numpy_summary = twister["pos"], *twister["key"][:2].tolist(), numpy_state["has_gauss"], numpy_state["gauss"]
    return words[-1], words[0], words[1], next_normal, *numpy_summary
