"""Flags of other trainers and the corresponding flags of Rankzero. Does not import torch."""

import re
from collections.abc import Sequence

from rankzero.messages import quoted

TRAINER_ARGUMENTS = (
    *("accelerator", "strategy", "devices", "num_nodes", "precision", "logger", "callbacks", "fast_dev_run"),
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "limit_train_batches", "limit_val_batches"),
    *("limit_test_batches", "limit_predict_batches", "overfit_batches", "val_check_interval"),
    *("check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps", "enable_checkpointing"),
    *("enable_progress_bar", "enable_model_summary", "accumulate_grad_batches", "gradient_clip_val"),
    *("gradient_clip_algorithm", "deterministic", "benchmark", "inference_mode", "use_distributed_sampler", "profiler"),
    *("detect_anomaly", "barebones", "plugins", "sync_batchnorm", "reload_dataloaders_every_n_epochs"),
    *("default_root_dir", "enable_autolog_hparams", "model_registry"),
)
"""Arguments of Lightning's Trainer; a test compares them with the Trainer's signature."""

_OTHER_NAMES = {
    "devices": "gpus num_gpus n_gpus ngpus n_gpu nproc_per_node num_devices num_processes nproc n_proc",
    "nodes": "num_nodes nnodes n_nodes num_machines",
    "node_rank": "machine_rank",
    "master_addr": "main_process_ip dist_url host",
    "master_port": "main_process_port port",
    "backend": "dist_backend",
    "epochs": "max_epochs num_epochs n_epochs num_train_epochs epoch",
    "batch_size": "bs train_batch_size per_device_train_batch_size batch",
    "global_batch_size": "effective_batch_size total_batch_size",
    "root": "log_dir logdir output_dir default_root_dir save_dir out_dir work_dir checkpoint_dir",
    "name": "exp_name experiment experiment_name run_id version",
    "seed": "random_seed manual_seed",
    "save_every": "every_n_epochs save_steps save_freq checkpoint_every",
    "keep": "save_top_k save_total_limit",
    "time_limit": "max_time timeout",
    "resume": "checkpoint_path resume_from_checkpoint resume_from ckpt checkpoint load_checkpoint",
    "checkpoint": "checkpoint_path resume_from_checkpoint resume weights ckpt load_checkpoint",
    "accelerator": "device gpu",
    "model": "arch architecture network",
    "data": "dataset datamodule",
    "data.num_workers": "num_workers workers n_workers dataloader_num_workers",
    "data.root": "data_dir data_path data_root dataroot",
    "trainer.accumulate_grad_batches": "gradient_accumulation_steps grad_accum accum_iter",
    "trainer.gradient_clip_val": "grad_clip clip_grad max_grad_norm clip_grad_norm",
    "trainer.max_steps": "steps num_steps max_iters num_iterations iterations",
    "trainer.sync_batchnorm": "sync_bn",
    "trainer.log_every_n_steps": "log_interval print_freq logging_steps log_every",
    "trainer.fast_dev_run": "dry_run debug",
}
"""Rankzero's flag or LightningCLI key -> names of the same flag in other trainers."""

_SWITCHES = {
    "fp16": "--precision 16-mixed",
    "amp": "--precision 16-mixed",
    "bf16": "--precision bf16-mixed",
    "no_cuda": "--accelerator cpu",
    "cpu": "--accelerator cpu",
    "cuda": "--accelerator gpu",
    "distributed": "--devices N",
}
"""Flag of another trainer that takes no value -> the flag and value to type."""

_LOGGERS = {"wandb": "WandbLogger", "mlflow": "MLFlowLogger", "comet": "CometLogger", "tensorboard": "true"}
_LOGGERS["csv"] = "CSVLogger --trainer.logger.save_dir runs"
"""Value of `--logger` in other trainers -> value of `--trainer.logger`."""


def equivalent_flag(name: str, value: str | None, valid_names: Sequence[str], model: str) -> str | None:
    """Returns the text to type for another trainer's flag, with the user's value; None for an unknown flag.

    Args:
        name: The flag without dashes.
        value: The value that the user gave, if any.
        valid_names: Names of the command's flags.
        model: Short name of the model in `--model`; empty for a class path.
    """
    normalized = name.lower().replace("-", "_").removeprefix("trainer_")
    value_text = f" {quoted(value)}" if value is not None else ""
    shown = value_text or " VALUE"
    if normalized in valid_names:
        return f"--{normalized}{shown}"
    if normalized == "gpu" or (normalized == "device" and value is not None):
        if match := re.fullmatch(r"(?:cuda|gpu)?:?([0-9,]+)", value or "0"):
            by_index = f"--trainer.devices [{match[1]}]"
            is_count = normalized == "device" and (value or "").isdecimal() and int(match[1]) > 1
            return f"--devices {match[1]}, or {by_index} for the GPU with that index" if is_count else by_index
        if value not in ("auto", "cpu", "cuda", "gpu", "mps"):
            return "--accelerator gpu --devices N"
    for flag, other_names in _OTHER_NAMES.items():
        if normalized in other_names.split() and ("." in flag or flag in valid_names):
            return f"--{flag}{shown}"
    if normalized in _SWITCHES:
        return _SWITCHES[normalized]
    if normalized in ("lr", "learning_rate", "base_lr"):
        if model:
            return f"--model.optimizer AdamW --model.optimizer.lr{shown}"
        return f"--model.{name}{shown}, where the model takes it, or --optimizer AdamW --optimizer.lr{value_text}"
    if normalized == "logger" and (value or "").lower() in _LOGGERS:
        return f"--trainer.logger {_LOGGERS[str(value).lower()]}"
    return f"--trainer.{normalized}{shown}" if normalized in TRAINER_ARGUMENTS else None
