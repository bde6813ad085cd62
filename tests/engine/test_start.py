"""The start of an engine: progress bars where a person sees them."""

from __future__ import annotations

import sys

import pytest

from mrv1 import LLM, SamplingParams


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_progress_bar_of_generate_is_for_a_terminal_on_stderr(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with LLM("tiny", device="cpu", num_kv_blocks=16) as llm:
        capsys.readouterr()
        llm.generate([[5], [6]], SamplingParams(max_tokens=2), use_tqdm=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("generate" in captured.err) == is_terminal
