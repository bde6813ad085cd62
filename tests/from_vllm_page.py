"""The tables of ``docs/from-vllm.md``: ``python -m tests.from_vllm_page`` writes them again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from mrv1 import from_vllm
from mrv1.from_vllm import Row

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from-vllm.md"
TABLES: dict[str, Mapping[str, Row]] = {
    "Options of `LLM`": from_vllm.OPTIONS,
    "Methods": from_vllm.METHODS,
    "Arguments of `generate` and `chat`": from_vllm.ARGUMENTS,
    "Keys of a prompt": from_vllm.PROMPT,
    "Fields of outputs": from_vllm.OUTPUT,
    "`SamplingParams`": from_vllm.PARAMS,
    "`StructuredOutputsParams`": from_vllm.FORM,
    "`LoRARequest`": from_vllm.ADAPTER,
}


def table(rows: Mapping[str, Row]) -> str:
    """Return rows as a table, vLLM's names of one row side by side."""
    lines = ["| in vLLM | here | |", "|---|---|---|"]
    for _, group in groupby(rows.items(), key=lambda item: id(item[1])):
        names, found = zip(*group, strict=True)
        row = found[0]
        here = f"`{row.to}`" if row.kind == "other" else row.kind
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {here} | {row.note} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """Return the page with its tables made from the rows."""
    for heading, rows in TABLES.items():
        page = re.sub(
            rf"(?<=^## {re.escape(heading)}\n\n)(?:\|.*\n)*",
            lambda _, rows=rows: table(rows) + "\n",
            page,
            flags=re.MULTILINE,
        )
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
