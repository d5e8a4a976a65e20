"""The parts that core's worker is put together from, for workers written elsewhere. Importing this module imports torch."""

from octavo.core.engine.resolve import Resolved, resolve
from octavo.core.worker.caches import GroupCaches
from octavo.core.worker.input_batch import InputBatch, StepLayout
from octavo.core.worker.memory import activation_bytes, cache_allowance_bytes, kv_specs, settle_blocks
from octavo.core.worker.model_runner import ModelRunner, RunnerLimits
from octavo.core.worker.worker import load_ops, make_worker

__all__ = [
    "GroupCaches",
    "InputBatch",
    "ModelRunner",
    "Resolved",
    "RunnerLimits",
    "StepLayout",
    "activation_bytes",
    "cache_allowance_bytes",
    "kv_specs",
    "load_ops",
    "make_worker",
    "resolve",
    "settle_blocks",
]
