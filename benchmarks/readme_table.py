"""Write the measured figures into README.md from the results files; never by hand.

python benchmarks/readme_table.py           rewrite the table in README.md
python benchmarks/readme_table.py --check   exit 1 if README.md is not what the files say
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
README = REPO / "README.md"
RESULTS = REPO / "benchmarks" / "results"
BEGIN, END = "<!-- results:generate -->", "<!-- /results:generate -->"
NONE_YET = "Nothing has been measured yet."


def load_results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the results of ``mrv1 bench generate`` in a folder, by file name."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("generate*.json"))]


def generate_table(results: list[dict[str, Any]]) -> str:
    """Return the Markdown for all results: a table each, its conditions below."""
    return "\n\n".join(_one(result) for result in results) or NONE_YET


def _one(result: dict[str, Any]) -> str:
    lines = [
        "| batch | tokens/s | ms per decode step | floor, ms | share of floor | prefill, ms |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for entry in result["results"]:
        cells = [
            f"{entry['batch']}",
            f"{entry['tokens_per_s']:,.0f}",
            f"{entry['decode_step_ms']:.2f}",
            _optional(entry["floor_ms"], "{:.2f}"),
            _optional(entry["share_of_floor"], "{:.0%}"),
            f"{entry['prefill_ms']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _conditions(result)])


def _conditions(result: dict[str, Any]) -> str:
    conditions, versions = result["conditions"], result["versions"]
    bandwidth = result["copy_bandwidth_bytes_per_s"]
    parts = [
        f"{result['shape']} shape, {result['weights']} weights, {result['dtype']}, "
        f"{result['path']} path on one {result['device']['name']}",
        f"{conditions['prompt_tokens']} prompt + {conditions['output_tokens']} output tokens, "
        f"{conditions['sampling']}",
        f"medians of {conditions['repeats']} runs after a warm-up",
        f"torch {versions['torch']}, triton {versions['triton']}",
        f"clocks {conditions['clocks']}",
    ]
    if bandwidth is not None:
        parts.append(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    return f"{'; '.join(parts)} (commit {result['commit'][:12]}, {result['date']})."


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def with_table(readme: str, table: str) -> str:
    """Return the README's text with what stands between the markers replaced.

    Raises:
        ValueError: the markers are not there exactly once, in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"README.md: expected {BEGIN} and then {END}, each once")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Rewrite README.md, or with ``--check`` only say whether it would change."""
    current = README.read_text("utf-8")
    wanted = with_table(current, generate_table(load_results()))
    if arguments == ["--check"]:
        return int(current != wanted)
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
