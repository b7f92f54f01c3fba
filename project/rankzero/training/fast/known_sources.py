"""Digests of the sources that the fast path was compared with; printed by `replaced.py`."""

KNOWN_SOURCES: dict[str, dict[str, tuple[str, ...]]] = {
    "lightning.fabric.plugins.precision.precision.Precision": {
        "backward": ("4a75b68b79a81b76",),
        "convert_input": ("650642d86ad0dc56",),
        "optimizer_step": ("235daa70d6bab5c0",),
    },
    "lightning.pytorch.core.hooks": {
        "move_data_to_device": ("1be48e12a97a1b1c",),
    },
    "lightning.pytorch.core.module.LightningModule": {
        "_apply_batch_transfer_handler": ("6920f8d6e65ba320",),
        "_call_batch_hook": ("3d8cf158f89f07c1",),
        "_on_before_batch_transfer": ("70c36c246c08516b",),
        "backward": ("ad3f2b3ee8bde5bf",),
        "configure_gradient_clipping": ("d793635231aa0ca2",),
        "log": ("0ea3662a9d359963",),
        "lr_scheduler_step": ("48f48b8772b7ceee",),
        "on_after_batch_transfer": ("9d3a1606d03de2cb",),
        "on_before_batch_transfer": ("4857d99d43f66e2c",),
        "optimizer_step": ("ec763e77fb742b99",),
        "optimizer_zero_grad": ("1dd31acba8ff56bf",),
        "transfer_batch_to_device": ("c452d39fc607e01d",),
    },
    "lightning.pytorch.core.optimizer.LightningOptimizer": {
        "step": ("2a5021c5235e1eec",),
    },
    "lightning.pytorch.loops.evaluation_loop._EvaluationLoop": {
        "run": ("0084b5276402421b",),
    },
    "lightning.pytorch.loops.fetchers._DataFetcher": {
        "__next__": ("cc02c8894e53ca49",),
    },
    "lightning.pytorch.loops.fetchers._PrefetchDataFetcher": {
        "__next__": ("0552b7edd8b7a5ec",),
    },
    "lightning.pytorch.loops.fit_loop._FitLoop": {
        "advance": ("57013b50b1a50780",),
        "on_advance_end": ("261910f9deb10929",),
        "on_advance_start": ("8d81d891827f470a",),
        "on_run_start": ("3f33773eb07b8bd8",),
        "reset": ("a71b54f82c19ef3e",),
        "run": ("67e16429c6e86d02",),
    },
    "lightning.pytorch.loops.optimization.automatic.Closure": {
        "__call__": ("4b86f1eb9431a040",),
        "closure": (
            "a2a02ac1bc9e0f19",
            "692746408eaff5dc",
        ),
    },
    "lightning.pytorch.loops.optimization.automatic.ClosureResult": {
        "asdict": ("298603fcea43c3d1",),
        "from_training_step_output": ("9561ec6c386e85c7",),
    },
    "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization": {
        "_make_backward_fn": ("234fbba91da93dd6",),
        "_make_closure": ("0f6956451b1e7f45",),
        "_make_step_fn": ("2cf94b104c1ab27c",),
        "_make_zero_grad_fn": ("efe17d4f6b29a40b",),
        "_on_before_zero_grad": ("1999b90e6f14b4b2",),
        "_optimizer_step": ("c0503ce795b681c5",),
        "_optimizer_zero_grad": ("841962881340b2f3",),
        "_training_step": ("f6535070ea14db20",),
        "run": ("617eb8769edc95c1",),
    },
    "lightning.pytorch.loops.optimization.closure.AbstractClosure": {
        "consume_result": ("412756c636b6efc4",),
    },
    "lightning.pytorch.loops.progress._BatchProgress": {
        "increment_ready": ("15841f6c50618dd3",),
        "reset_on_run": ("39ce31bd744817bb",),
    },
    "lightning.pytorch.loops.progress._OptimizerProgress": {
        "reset_on_run": ("e501029622c3fc68",),
    },
    "lightning.pytorch.loops.progress._Progress": {
        "increment_completed": ("3601bf7879010c60",),
        "increment_processed": ("45384934ea2504c4",),
        "increment_ready": ("15841f6c50618dd3",),
        "increment_started": ("571b27a50727dce5",),
    },
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": {
        "_accumulated_batches_reached": ("0352e076886b23c9",),
        "_build_kwargs": ("d3f0ba98526c9e5b",),
        "_is_training_done": ("9864188b1dc77038",),
        "_num_ready_batches_reached": ("093024c783d9476e",),
        "_save_loggers_on_train_batch_end": ("d65ae2fd7565e695",),
        "_should_accumulate": ("22a1c8e06310d5cf",),
        "_should_check_val_epoch": ("2e00997b96707847",),
        "_should_check_val_fx": ("18881b69db8dbac4",),
        "_update_learning_rates": ("aea4757f853467e9",),
        "advance": ("c2037463f3a5ae22",),
        "done": ("232a455e16c36f36",),
        "on_advance_end": ("5b4416a032615dce",),
        "on_run_start": ("828e1d7a9bd93042",),
        "reset": ("9dd65563ec5afae2",),
        "run": ("e30ceb816306167b",),
        "update_lr_schedulers": ("cff0b10cc618b564",),
    },
    "lightning.pytorch.loops.utilities": {
        "_block_parallel_sync_behavior": ("7c6b739062657e1a",),
    },
    "lightning.pytorch.plugins.precision.amp.MixedPrecision": {
        "clip_gradients": ("3c5ee96d3d62bb47",),
        "forward_context": ("644381a3afa7ad85",),
        "optimizer_step": ("b86dc8566eeb1966",),
        "pre_backward": ("9c5c948430a7e71a",),
    },
    "lightning.pytorch.plugins.precision.precision.Precision": {
        "_after_closure": ("bdb143fc33003d9f",),
        "_clip_gradients": ("f39fb4128376d22e",),
        "_wrap_closure": ("ab088ce5987e514c",),
        "backward": ("7ec7834208facc75",),
        "convert_input": ("650642d86ad0dc56",),
        "forward_context": ("a7c5f6433e7cf56b",),
        "optimizer_step": ("663849d6ea33516b",),
        "post_backward": ("0e01b5796bee93c4",),
        "pre_backward": ("0275bf41bb28a894",),
        "train_step_context": ("b15f3d45eb3e8f90",),
    },
    "lightning.pytorch.profilers.base.PassThroughProfiler": {
        "start": ("03b49a0a6b2337ec",),
        "stop": ("d9be64f05195b10f",),
    },
    "lightning.pytorch.profilers.profiler.Profiler": {
        "profile": ("88a9b7987e8a7d8a",),
    },
    "lightning.pytorch.strategies.ddp.DDPStrategy": {
        "pre_backward": ("3545cf6faf4cb564",),
        "reduce": ("c3fcf4cd902afb0f",),
    },
    "lightning.pytorch.strategies.parallel.ParallelStrategy": {
        "reduce_boolean_decision": ("e3ec7946aa581224",),
    },
    "lightning.pytorch.strategies.single_device.SingleDeviceStrategy": {
        "reduce": ("f33d98c9a5ca1e7e",),
    },
    "lightning.pytorch.strategies.strategy.Strategy": {
        "backward": ("6b55841ad48d34a9",),
        "batch_to_device": ("30693d43d225e8f5",),
        "optimizer_step": ("95427fc2a9890ac5",),
        "post_backward": ("4c70110edb5a2d5c",),
        "post_training_step": ("56f500d1548a12f8",),
        "pre_backward": ("67f00eb3be4d077a",),
        "training_step": ("8bdb61013f3713d7",),
    },
    "lightning.pytorch.trainer.call": {
        "_call_callback_hooks": ("c0549cbe70004b83",),
        "_call_lightning_module_hook": ("5f052a5d2b396ae7",),
        "_call_strategy_hook": ("c84b702bec9f50e4",),
    },
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector": {
        "callback_metrics": ("5dfd9bfd1c1bd928",),
        "epoch_end_reached": ("9454197064b18430",),
        "log_metrics": ("bed5127ddfe81334",),
        "metrics": ("2476d55c3f4af66e",),
        "on_batch_end": ("f6183279bb6ed56d",),
        "on_batch_start": ("54f490612ab34059",),
        "on_epoch_end": ("24968aac0b7b2eba",),
        "should_reset_tensors": ("0cc96f5039cd7b83",),
        "should_update_logs": ("23ad375edf8d4d32",),
        "update_train_epoch_metrics": ("0bb0998504aa02ba",),
        "update_train_step_metrics": ("a199ceb87ef65799",),
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result._Metadata": {
        "forked": ("797c5158e762333f",),
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result._ResultCollection": {
        "_extract_batch_size": ("f83ccd3c301b2c8b",),
        "_get_cache": ("d5e4849fe94e0b07",),
        "log": ("bea8a83eed46ba94",),
        "metrics": ("3ef1a9b453a5ee10",),
        "update_metrics": ("64a74ee51f75b6d6",),
        "valid_items": ("b5db46a064b2b356",),
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result._ResultMetric": {
        "compute": ("9ac048967d6e3bd3",),
        "forward": ("68acc0aa76100d69",),
        "reset": ("4a4e4bb09623048d",),
        "update": ("41123590811dc526",),
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result._Sync": {
        "_generate_sync_fn": ("f8805043b9855d44",),
    },
    "lightning.pytorch.trainer.trainer.Trainer": {
        "callback_metrics": ("b116687c0329cacf",),
        "global_step": ("e598332538017235",),
    },
    "lightning.pytorch.utilities.combined_loader.CombinedLoader": {
        "__next__": ("636bfd1ee184af66",),
    },
    "lightning.pytorch.utilities.combined_loader._MaxSizeCycle": {
        "__next__": ("ce23fce77002b72d",),
    },
    "torch.Tensor": {
        "backward": (
            "ec47ffa275ec33bc",
            "3114d1a49b83f72d",
        ),
    },
    "torch.autograd": {
        "backward": (
            "e4a82fcfc8e6205c",
            "79be6aa6480d1c26",
            "2cab1d3c591c5f22",
            "6e4a9f0162bb3776",
        ),
    },
    "torch.autograd.graph": {
        "_engine_run_backward": (
            "12bcf2230c00890f",
            "d473c74cc90baccd",
            "f531b01054cb1412",
        ),
    },
    "torch.optim.optimizer.Optimizer": {
        "profile_hook_step": (
            "585d40cc1583d3be",
            "991f03ae7c9c6720",
        ),
        "zero_grad": ("a7f5aeaf877627d0",),
    },
}
