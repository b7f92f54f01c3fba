import pytest
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher

from rankzero.training.lightning_inside import fallback_reason, has_stock_optimizer_step, needs_transfer
from stock import Net, train


@pytest.mark.parametrize(("precision", "is_fast"), [("32-true", True), ("bf16-mixed", True), ("64-true", False)])
def test_only_steps_of_known_precision_are_fast_and_only_others_require_the_transfer(precision, is_fast):
    trainer = train(True, Net(), max_epochs=1, limit_train_batches=1, limit_val_batches=0, precision=precision)[1]
    assert fallback_reason(trainer, _PrefetchDataFetcher()) is None
    assert has_stock_optimizer_step(trainer) == is_fast
    assert needs_transfer(trainer) != is_fast


def test_weight_averaging_without_backward_passes_is_left_to_lightning():
    trainer = train(True, Net(), max_epochs=1, limit_train_batches=1, limit_val_batches=0)[1]
    trainer.fit_loop._skip_backward = True
    assert fallback_reason(trainer, _PrefetchDataFetcher()).endswith("updates batch norm without backward passes")
