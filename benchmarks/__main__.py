"""``python -m benchmarks``: the benchmarks' command line."""

from benchmarks.cli.app import app

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
