"""``mrv1 doctor``: one screen on versions, GPUs and the implementation of each part of a step."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from mrv1.cli.console import show, show_table
from mrv1.cli.facts import Facts, collect
from mrv1.cli.report import mib


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """Show versions, GPUs and the implementation of each part of a step; warn of problems.

    The warnings name unsupported versions, GPUs that cannot run the kernels and wrong MRV1_*
    variables. The exit code is 0, also with warnings.
    """
    facts = collect()
    if as_json:
        show(json.dumps(facts, indent=2))
        return
    show_table(_table(facts))
    for warning in facts["warnings"]:
        show_table(Text(f"warning: {warning}", style="yellow"))
    if not facts["warnings"]:
        show("no warnings")


def _table(facts: Facts) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(facts):
        table.add_row(name, Text(text))
    return table


def _rows(facts: Facts) -> list[tuple[str, str]]:
    """Return the rows of the table: name and text."""
    versions = [f"{name} {version or '-'}" for name, version in facts["versions"].items()]
    rows = [("versions", ", ".join(versions[:2])), ("", ", ".join(versions[2:]))]
    rows.append(("FlashInfer", facts["flashinfer"]))
    rows += [
        (
            f"GPU {gpu['index']}",
            f"{gpu['name']}, compute capability {gpu['capability']}, "
            f"{gpu['memory_bytes'] / 2**30:.1f} GiB, {gpu['num_sms']} SMs",
        )
        for gpu in facts["gpus"]
    ] or [("GPU", "none")]
    rows.append(("CUDA", f"torch built for {facts['cuda'] or 'CPU only'}"))
    if facts["driver"]:
        rows.append(("driver", facts["driver"]))
    rows.append(("device auto", f"{facts['device'] or 'refused'}: {facts['path']}"))
    rows += [(f"  {part}", what) for part, what in facts["used_for"].items()]
    rows.append(("CPU threads", facts["cpu_threads"]))
    embedded = facts["embedded_model"]
    size = mib(embedded["weights_bytes"]) if embedded["present"] else "no weights"
    rows.append(("model 'tiny'", f"{size}, {embedded['path']}"))
    rows += [(name, value) for name, value in facts["environment"].items()]
    return rows
