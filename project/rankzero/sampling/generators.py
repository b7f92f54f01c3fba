"""The random generators that a whole process shares: Python's, NumPy's and torch's, on the CPU."""

import ctypes
import os
import random
from typing import Any

import numpy as np
import torch

State = tuple[Any, Any, torch.Tensor]

_WORDS = 4 * 625
"""Bytes of a Mersenne twister in NumPy: 624 words, and which of them is the next."""


def global_seed() -> int:
    """The seed that Lightning's `seed_everything` was called with last; 0 where it was not."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)


def seed(key: int) -> None:
    """Seeds them from 64 random bits; 6 microseconds."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def look() -> State:
    """Their states; 8 microseconds, where `numpy.random.get_state` alone takes 25."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if isinstance(bits, np.random.MT19937):
        return random.getstate(), ctypes.string_at(bits.ctypes.state_address, _WORDS), torch.get_rng_state()
    return random.getstate(), bits.state, torch.get_rng_state()


def drawn_since(before: State) -> bool:
    """Whether one of them has been drawn from, or seeded, since that look."""
    now = look()
    words, words_before = now[0][1], before[0][1]
    python = words[0] != words_before[0] or words[-1] != words_before[-1]
    numpy = now[1] != before[1] if isinstance(now[1], bytes) else repr(now[1]) != repr(before[1])
    return python or numpy or not torch.equal(now[2], before[2])


def put_back(state: State) -> None:
    """Makes them go on from where they were at that look."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    random.setstate(state[0])
    if isinstance(state[1], bytes):
        ctypes.memmove(bits.ctypes.state_address, state[1], _WORDS)
    else:
        bits.state = state[1]
    torch.set_rng_state(state[2])
