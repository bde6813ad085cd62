"""The process that compiles a runner's kernels (``compile_ahead``); nobody imports it.

The runner's own start (profile, graphs, warm-up) runs on a stand-in GPU, which records kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mrv1.device import kernel_path
from mrv1.kernels._base.recording import KernelRecorder
from mrv1.kernels.registry import select_ops
from mrv1.models import DecoderModel
from mrv1.models.weights import empty_weights
from mrv1.runner.compile_ahead import KernelSet, compile_from_stdin
from mrv1.runner.model_runner import ModelRunner
from mrv1.runner.stand_in_device import stand_in_gpu, stand_in_rank


def main() -> None:
    """Compile the set of kernels that comes as a pickle on stdin; report progress on stdout."""
    compile_from_stdin(record)


def record(kernels: KernelSet) -> KernelRecorder:
    """Return the kernels of a set; this process cannot use a GPU afterwards."""
    with recording(kernels.with_few_layers()) as (recorder, _):
        return recorder


@contextmanager
def recording(kernels: KernelSet) -> Iterator[tuple[KernelRecorder, ModelRunner]]:
    """Yield a set's kernels and a runner that adds those of its steps; no GPU works here later."""
    with stand_in_gpu(kernels.gpu) as (recorder, device):
        config = replace(
            kernels.config,
            device=str(device),
            compile_processes=0,
            num_kv_blocks=None,  # so that memory is measured: that launches kernels too
            kv_cache_memory_bytes=None,
            gpu_memory_utilization=1.0,
        )
        parallel = stand_in_rank(
            kernels.rank, config.tensor_parallel_size, device, has_peers=kernels.has_peers
        )
        whole = kernels.model_config
        own, vocab_rows = parallel.shard(whole), parallel.vocab_rows(whole.vocab_size)
        model = DecoderModel(
            own,
            empty_weights(own, device, kernels.dtype, vocab_rows=vocab_rows),
            select_ops(kernel_path(device)),
            parallel=parallel,
            deterministic=config.deterministic,
            rank_invariant=config.rank_invariant,
            whole_config=whole,
        )
        runner = ModelRunner(
            config, model=model, head_policy=kernels.head_policy, parallel=parallel, progress=False
        )
        yield recorder, runner
