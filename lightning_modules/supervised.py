"""What every model here shares: the step, the loss, the metrics, the optimiser and its schedule."""

from typing import Any, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torchmetrics import MeanAbsoluteError, MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_modules.schedule import Cosine, Schedule


class Supervised(LightningModule):
    """Learns to classify (cross-entropy) or, without classes, to regress (mean squared error).

    Validation and test metrics are sums and counts over all ranks, so that they do not depend on how many there are.

    Args:
        network: From a batch of inputs to logits of shape `(batch, num_classes)`, or to targets of shape
            `(batch, out_features)`.
        num_classes: Classes; None for a regression.
        optimizer: From the parameters to an optimiser, such as SGD, AdamW or any class path.
        schedule: From the optimiser to its schedule: Constant, Cosine, OneCycle, or any class path. Ours step once an
            optimiser step, torch's own once an epoch.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int | None = None,
        optimizer: OptimizerCallable = lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=5e-4),
        schedule: LRSchedulerCallable = lambda o: Cosine(o),
    ) -> None:
        super().__init__()
        if num_classes is not None and num_classes < 2:
            raise ValueError(f"num_classes is {num_classes}; to classify there have to be 2 or more")
        self.network = network
        self.num_classes = num_classes
        self.make_optimizer = optimizer
        self.make_schedule = schedule
        # NaN stays NaN: by default torchmetrics leaves it out of the mean, and "disable" (1.9) leaves the weights out.
        self.losses = nn.ModuleDict({split: MeanMetric(nan_strategy=float("nan")) for split in ("val", "test")})
        self.scores = nn.ModuleDict({split: self._score() for split in ("val", "test")})

    def _score(self) -> Metric:
        if self.num_classes is None:
            return MeanAbsoluteError()
        return MulticlassAccuracy(self.num_classes, average="micro")

    def forward(self, inputs: Tensor) -> Tensor:
        """Runs the network."""
        output: Tensor = self.network(inputs)
        return output

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch.

        Args:
            outputs: Logits of shape `(batch, num_classes)`, or predictions of shape `(batch, out_features)`.
            targets: Classes of shape `(batch,)`, or targets of shape `(batch, out_features)`.
        """
        return F.mse_loss(outputs, targets) if self.num_classes is None else F.cross_entropy(outputs, targets)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = self.loss(self(inputs), targets)
        self.log("train/loss", loss, prog_bar=True, batch_size=inputs.shape[0])
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", *batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", *batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the network's outputs: logits, or predictions, one row a sample."""
        outputs: Tensor = self(batch[0])
        return outputs

    def _evaluate(self, split: str, inputs: Tensor, targets: Tensor) -> None:
        outputs = self(inputs)
        loss, score = cast(MeanMetric, self.losses[split]), cast(Metric, self.scores[split])
        loss.update(self.loss(outputs, targets), weight=len(inputs))
        score.update(outputs, targets)
        name = "mae" if self.num_classes is None else "accuracy"
        self.log(f"{split}/loss", loss, prog_bar=True, batch_size=len(inputs))
        self.log(f"{split}/{name}", score, prog_bar=True, batch_size=len(inputs))

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        schedule = self.make_schedule(optimizer)
        if isinstance(schedule, ReduceLROnPlateau):
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": schedule.monitor}}
        if not isinstance(schedule, Schedule):
            return {"optimizer": optimizer, "lr_scheduler": schedule}
        total_steps = self.trainer.estimated_stepping_batches
        if total_steps != float("inf"):
            schedule.plan(int(total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def required(name: str, value: int | None, model: str, meaning: str) -> int:
    """Returns an argument that the data usually gives, or says how to give it.

    Raises:
        ValueError: Neither the data nor the command line says.
    """
    if value is None:
        raise ValueError(
            f"{model} has to know {name} ({meaning}), and the data does not say. Type another --model or --data, "
            f"or --model.{name} N, or give the data module an attribute {name}"
        )
    if value < 1:
        raise ValueError(f"{model}: {name} is {value}; it has to be 1 or more")
    return value
