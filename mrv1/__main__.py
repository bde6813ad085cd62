"""``python -m mrv1``: the command line, also where the package is not installed."""

from mrv1.cli import app

if __name__ == "__main__":
    app(prog_name="mrv1")
