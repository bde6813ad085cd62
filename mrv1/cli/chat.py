"""``mrv1 chat``: a conversation with a model in the terminal."""

from __future__ import annotations

import io
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from mrv1.cli.console import FAILURE, say, show
from mrv1.cli.generate import (
    Engine,
    Lora,
    adapter_of,
    check_sampling,
    loaded,
    sampling_options,
    with_defaults,
)
from mrv1.cli.options import command
from mrv1.cli.report import figures
from mrv1.engine import LLM, LoRARequest, RequestOutput
from mrv1.engine.chat import ChatOptions
from mrv1.errors import ConfigError, Mrv1Error, RequestError
from mrv1.sampler import SamplingParams

HELP = """\
/reset        forget the conversation, but not the system message
/system TEXT  set the system message; without TEXT: remove it
/stats        tokens, tokens/s and time to first token of the last answer
/exit         end, as Ctrl-D does
A line that ends with a backslash continues on the next line. A space before / makes it a message.
Ctrl-C stops an answer."""

PROMPT, CONTINUED = "> ", ". "

MAX_TOKENS = 1024
"""``max_tokens`` of an answer if neither an option nor the model says otherwise."""
Sampling = Annotated[dict[str, Any], sampling_options(MAX_TOKENS, " in an answer")]


@dataclass(slots=True)
class Session:
    """One conversation and its options."""

    llm: LLM
    params: SamplingParams
    options: ChatOptions = field(default_factory=ChatOptions)
    lora: LoRARequest | None = None
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    """The messages after the system message."""
    last: str | None = None
    """The figures of the last answer."""

    def set_system(self, text: str | None) -> None:
        """Set the system message; RequestError: the template has no place, the former stays."""
        former, self.system = self.system, text
        try:
            self.llm.chat_prompt(
                [*self._messages(), {"role": "user", "content": "Hello"}], **self.options
            )
        except RequestError:
            self.system = former
            raise

    def answer(self, text: str) -> None:
        """Write the answer to a message to stdout as it comes.

        Ctrl-C ends it, and the conversation has what was written, but no message that failed or
        was stopped before a text came. Mrv1Error: the message was refused, or the request failed.
        """
        self.turns.append({"role": "user", "content": text})
        written = ""
        output: RequestOutput | None = None
        try:
            with (
                _interruptible() as interrupts,
                closing(
                    self.llm.stream_chat(
                        self._messages(), self.params, lora_request=self.lora, **self.options
                    )
                ) as stream,
            ):
                for output in stream:
                    new = output.outputs[0].text[len(written) :]
                    written += new
                    show(new, newline=False)
                    if interrupts:
                        break
        except KeyboardInterrupt:  # a second Ctrl-C, before the next token came
            pass
        finally:
            if written or (output is not None and output.finished):
                show("")
                self.turns.append({"role": "assistant", "content": written})
            else:
                self.turns.pop()
            if output is not None:
                self.last = _figures(output)
        if output is None or not output.finished:
            say("[stopped]")
        elif output.outputs[0].finish_reason == "length":
            say(f"[cut after {len(output.outputs[0].token_ids)} tokens]")

    def _messages(self) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]


def _figures(output: RequestOutput) -> str | None:
    """Return what ``/stats`` tells of an answer."""
    metrics = output.metrics
    if metrics is None:
        return None
    started, first = metrics.arrival_time, metrics.first_token_time
    ended = time.perf_counter() if metrics.finish_time is None else metrics.finish_time
    parts = figures(
        len(output.outputs[0].token_ids),
        ended - started,
        [] if first is None else [first - started],
        f" after a prompt of {len(output.prompt_token_ids)} tokens",
    )
    return " | ".join(parts)


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Collect Ctrl-C in a list; a second raises. A step goes on: the prefix cache stays valid."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        signals.append(number)
        if len(signals) > 1:
            raise KeyboardInterrupt

    former = signal.signal(signal.SIGINT, note)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, former)


def _entered(stdin_is_terminal: bool) -> Iterator[str]:
    """Yield messages, joined where lines end with a backslash; two Ctrl-C in a row end them."""
    parts: list[str] = []
    interrupted = False
    while True:
        try:
            line = _read_line(CONTINUED if parts else PROMPT, stdin_is_terminal)
        except KeyboardInterrupt:
            if not stdin_is_terminal or interrupted:
                raise
            interrupted = True
            parts.clear()
            say("\nCtrl-C again or Ctrl-D ends")
            continue
        interrupted = False
        if line is not None and line.endswith("\\"):
            parts.append(line[:-1])
            continue
        if line is not None:
            parts.append(line)
        message = "\n".join(parts)
        parts.clear()
        if message.strip():
            yield message
        if line is None:
            return


def _read_line(prompt: str, stdin_is_terminal: bool) -> str | None:
    """Return the next line of stdin; None = there is none."""
    if stdin_is_terminal:
        try:
            return input(prompt)
        except EOFError:
            say("")
            return None
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


@command
def chat(
    sampling: Sampling,
    engine: Engine,
    model: Annotated[
        str,
        typer.Option(
            help="Model that was trained for chat: checkpoint directory, GGUF file, Hugging Face "
            "id, or 'smollm2' (make chat-model installs it)."
        ),
    ] = "smollm2",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="File with a chat template to use instead of the checkpoint's own.",
        ),
    ] = None,
    sanitize_control_tokens: Annotated[
        bool,
        typer.Option(
            "--sanitize-control-tokens/--no-sanitize-control-tokens",
            help="Encode control tokens in messages as ordinary text, so that only the template "
            "writes them; without effect before transformers 5.20.",
        ),
    ] = True,
    lora: Lora = None,
) -> None:
    """Talk with a model. /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends.

    If stdin is not a terminal, each of its lines is a message. Only the answers go to stdout. Exit
    code 1: a message of stdin failed; 2: an argument, the model or the device cannot be used.
    """
    check_sampling(sampling)
    template = None if chat_template is None else _read_template(chat_template)
    if sys.stdin is None:  # the shell closed it
        raise ConfigError("stdin: expected an open file, got a closed one")
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        with suppress(ImportError):  # a Python without readline: no history
            import readline  # noqa: F401
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # fails one message, not the program
    adapter = adapter_of(lora, engine)
    with loaded(model, engine, adapter) as llm:
        params = SamplingParams(**with_defaults(llm, sampling, max_tokens=MAX_TOKENS))
        session = Session(
            llm,
            params,
            ChatOptions(chat_template=template, sanitize_control_tokens=sanitize_control_tokens),
            adapter,
        )
        session.set_system(system)
        if on_terminal:
            say("/help lists the commands")
        num_failed = 0
        for message in _entered(on_terminal):
            try:
                if not message.startswith("/"):
                    session.answer(message)
                elif not _obey(session, *message[1:].partition(" ")[::2]):
                    break
            except Mrv1Error as error:
                say(f"error: {error}")
                num_failed += 1
    if num_failed and not on_terminal:
        raise typer.Exit(FAILURE)


def _obey(session: Session, name: str, rest: str) -> bool:
    """Run a command; return whether the chat goes on; RequestError: unknown, or refused."""
    match name.strip():
        case "exit":
            return False
        case "reset":
            session.turns.clear()
        case "system":
            session.set_system(rest.strip() or None)
        case "stats":
            say(session.last or "no answer yet")
        case "help":
            say(HELP)
        case _:
            raise RequestError(f"expected a command that /help lists, got /{name}")
    return True


def _read_template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: cannot read {str(path)!r}: {error}") from error
