import random

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from rankzero.sampling import generators
from running import restore_process_state

DRAWS = (
    {"python": random.random, "python, integers": lambda: random.randrange(10)}
    | {"python, shuffle": lambda: random.shuffle([1, 2, 3]), "python, normal": lambda: random.gauss(0, 1)}
    | {"python, seed": lambda: random.seed(2), "python, a whole block": lambda: random.getrandbits(32 * 624)}
    | {"numpy": np.random.rand, "numpy, integers": lambda: np.random.randint(10), "numpy, normal": np.random.randn}
    | {"numpy, seed": lambda: np.random.seed(2), "numpy, a whole block": lambda: np.random.bytes(4 * 624)}
    | {"torch": lambda: torch.rand(1), "torch, normal": lambda: torch.randn(1)}
    | {"torch, permutation": lambda: torch.randperm(3), "torch, seed": lambda: torch.manual_seed(2)}
)
"""After a whole block of 624 words, a Mersenne twister is at the same position in another block."""


@pytest.fixture(autouse=True)
def seeded():
    """Seeds all generators, which clears cached normal numbers, and restores their states afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    generators.seed(1)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw_normal():
    return np.random.randn(), random.gauss(0, 1)  # each caches a second number, which the next call returns


def draw(count=1):
    return [
        (random.random(), random.getrandbits(70), np.random.rand(), torch.rand(2).tolist(), draw_normal())
        for _ in range(count)
    ]


@pytest.mark.parametrize(("value", "seed"), [(None, None), ("", None), ("0", 0), ("7", 7), (str(2**32 - 1), 2**32 - 1)])
def test_the_global_seed_is_read_from_the_variable_that_lightning_sets(monkeypatch, value, seed):
    with restore_process_state():
        for last_seed in (3, 5):
            seed_everything(last_seed, verbose=False)
            assert generators.global_seed() == last_seed
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    if value is not None:
        monkeypatch.setenv("PL_GLOBAL_SEED", value)
    assert generators.global_seed() == seed


@pytest.mark.parametrize("key", [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_seed_has_the_same_effect_as_the_seed_function_of_each_generator(key):
    generators.seed(key)
    found = draw(2)
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.manual_seed(key)
    assert found == draw(2)


def test_get_states_does_not_change_the_generators_and_states_are_restored_in_any_order():
    expected = draw(3)
    generators.seed(1)
    states, found = [], []
    for _ in range(3):
        states.append(generators.get_states())
        assert not generators.have_changed_since(states[-1])
        found.append(draw()[0])
    assert found == expected
    for index in (2, 0, 1, 0):
        generators.set_states(states[index])
        assert draw()[0] == expected[index]


BEFORE = {
    "after a seed": lambda: None,
    "in the middle of a block": lambda: draw(2),
    "with cached normal numbers": draw_normal,
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_detected_and_can_be_undone(name, before):
    BEFORE[before]()
    state = generators.get_states()
    expected = draw(3)
    generators.set_states(state)
    DRAWS[name]()
    assert generators.have_changed_since(state)
    generators.set_states(state)
    assert not generators.have_changed_since(state) and draw(3) == expected


def test_a_draw_from_another_bit_generator_is_detected_and_can_be_undone():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        state = generators.get_states()
        assert not generators.have_changed_since(state)
        drawn = np.random.rand()
        assert generators.have_changed_since(state)
        generators.set_states(state)
        assert np.random.rand() == drawn
    finally:
        np.random.set_bit_generator(before)


def test_the_next_draw_differs_after_a_draw_from_any_generator_on_any_default_device():
    with torch.device("meta"):
        generators.seed(3)
        first = generators.draw()
        generators.seed(3)
        assert generators.draw() == first
    for draw_one in (random.random, np.random.standard_normal, lambda: torch.randn(())):
        generators.seed(3)
        draw_one()
        assert generators.draw() != first
