"""``mrv1 compile``: fill Triton's cache with the kernels of a model, with or without a GPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mrv1.cli.console import counting_bar, say, second_interrupt_ends
from mrv1.cli.options import MODEL_HELP, FieldsOf, command
from mrv1.config import EngineConfig

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@command
@second_interrupt_ends()
def compile_command(
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    engine: Annotated[
        dict[str, Any], FieldsOf(cls=EngineConfig, panel="Engine", without=("seed", "device"))
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="GPU to compile for: sm_80, sm_86, sm_89, sm_90, sm_100 or sm_120. Default: the "
            "GPU of this machine, which is needed for nothing else."
        ),
    ] = None,
) -> None:
    """Compile the kernels of a model ahead of its first start, for a container image.

    They go to Triton's cache (TRITON_CACHE_DIR), where a start with the same options finds them,
    together with the C modules that launch them, for which a C compiler is needed.
    Only the model's configuration is read, and no GPU is used.
    """
    from mrv1.runner.compile_ahead import KernelSet, compile_kernels, is_compiled, left_out

    kernels = KernelSet.of(EngineConfig(model=model, **engine), target)
    missing = [each for each in kernels.of_ranks() if not is_compiled(each)]
    if not missing:
        say("nothing to do: the kernels are in Triton's cache")
        return
    for of_rank in missing:  # a kernel of more ranks than one is found in the cache
        with counting_bar(transient=True) as bar:
            task = bar.add_task("compile kernels", total=None)
            show = partial(_show, bar, task)
            count = compile_kernels(of_rank, show)
        rank = f" for rank {of_rank.rank}" if len(missing) > 1 else ""
        say(f"{count} kernels compiled for {kernels.gpu.name}{rank}")
    if note := left_out():
        say(note)


def _show(bar: Progress, task: TaskID, done: int, total: int) -> None:
    bar.update(task, completed=done, total=total)
