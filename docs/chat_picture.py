"""Draws docs/chat.svg, a moving picture of ``mrv1 chat``, from a run of it: ``make chat-picture``.

The program runs in a terminal of its own; what it prints is drawn when it was printed. Only waits
are shortened, and the progress of loading is left out.
"""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

COMMAND = ("chat", "--temperature", "0")
QUESTIONS = ("What is the capital of France?", "And of Japan?")
COLUMNS, LINE, CHARACTER = 84, 19, 8.4  # characters; pixels of a line and of a character
LONGEST_WAIT, PAUSE, KEY = 1.2, 0.8, 0.05  # seconds: of the program, before typing, for a key
END = 4.0  # seconds that the last picture stays
PATIENCE = 300.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
Piece = tuple[float, str]  # seconds, text


def recorded(command: Sequence[str], questions: Sequence[str]) -> list[Piece]:
    """Run a program that asks with "> "; return what it printed when, and what was typed."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "dumb"}
        os.execv(sys.executable, [sys.executable, "-m", "mrv1", *command])
    left, text, pieces = [*questions], "", list[Piece]()
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                printed = os.read(terminal, 65536).decode("utf-8", "replace")
            except OSError:  # its end
                break
            pieces.append((time.monotonic(), printed))
            text += printed
        elif text.endswith("\n> "):
            typed = left.pop(0) if left else "/exit"
            os.write(terminal, f"{typed}\n".encode())
            text += typed
    os.waitpid(child, 0)
    return pieces


def timed(pieces: Sequence[Piece], questions: Sequence[str]) -> Iterator[Piece]:
    """Yield pieces at the times of the picture, with the questions typed key by key."""
    now, last = 0.0, None
    for key in "$ mrv1 " + " ".join(COMMAND):
        yield now, key
        now += KEY
    yield now, "\n"
    for moment, printed in pieces:
        text = ESCAPES.sub("", printed.replace("\r\n", "\n"))
        text = "".join(line.rpartition("\r")[2] for line in text.splitlines(keepends=True))
        if not text.strip() or text.startswith("Loading"):
            continue
        now += LONGEST_WAIT if last is None else min(moment - last, LONGEST_WAIT)
        last = moment
        if text.strip() in (*questions, "/exit"):  # the terminal's echo of what was typed
            now += PAUSE
            for key in text.rstrip("\n"):
                yield now, key
                now += KEY
            text = "\n"
        yield now, text


def picture(pieces: Sequence[Piece]) -> str:
    """Return pieces as an SVG whose texts appear at their times, again and again."""
    end = pieces[-1][0] + END
    column, row, texts = 0, 0, []
    for moment, text in pieces:
        for part in re.findall(r"\n|[^\n]+", text):
            while part:
                if part == "\n" or column == COLUMNS:
                    column, row = 0, row + 1
                if part == "\n":
                    break
                shown, part = part[: COLUMNS - column], part[COLUMNS - column :]
                x, y = 16 + column * CHARACTER, 48 + row * LINE
                column += len(shown)
                texts.append(
                    f'<text x="{x:.1f}" y="{y}">{escape(shown)}<set attributeName="visibility" '
                    f'to="hidden" begin="again.begin" end="again.begin+{moment:.2f}s"/></text>'
                )
    width, height = round(32 + COLUMNS * CHARACTER), 48 + (row + 1) * LINE
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" fill="#e6e6e6" '
        f'xml:space="preserve">',
        "<title>mrv1 chat in a terminal</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#1e1e28"/>',
        *(f'<circle cx="{20 + 18 * i}" cy="18" r="5" fill="{color}"/>'
          for i, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))),
        f'<rect width="0" height="0"><animate id="again" attributeName="x" to="0" '
        f'begin="0s;again.end" dur="{end:.2f}s"/></rect>',
        *texts,
        "</svg>\n",
    ])  # fmt: skip


if __name__ == "__main__":
    drawn = picture([*timed(recorded(COMMAND, QUESTIONS), QUESTIONS)])
    (Path(__file__).parent / "chat.svg").write_text(drawn, "utf-8")
