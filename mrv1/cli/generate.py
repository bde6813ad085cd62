"""``mrv1 generate``: one prompt, or a JSONL file of prompts. The help needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from mrv1.cli.console import (
    FAILURE,
    STANDARD,
    say,
    second_interrupt_ends,
    show,
    writing,
    writing_stdout,
)
from mrv1.cli.options import MODEL_HELP, FieldsOf, command
from mrv1.config import EngineConfig
from mrv1.errors import ConfigError, Mrv1Error
from mrv1.sampler import SamplingParams
from mrv1.sampler.params import OF_CHECKPOINT

if TYPE_CHECKING:
    from mrv1.engine import LLM, LoRARequest

MAX_TOKENS = 128
"""``max_tokens`` if neither an option nor the model says otherwise; vLLM's 16 is short to read."""


def sampling_options(max_tokens: int, of_what: str = "") -> FieldsOf:
    """Return options whose effect printed text shows; --input lines may give the other fields."""
    return FieldsOf(
        cls=SamplingParams,
        panel="Sampling",
        defaults={"max_tokens": max_tokens},
        brief=("max_tokens", "temperature", "top_p", "seed"),
        of_model=tuple(OF_CHECKPOINT.values()),
        help={"max_tokens": f"Generate at most this many tokens{of_what}."},
        without=(
            "n", "logprobs", "logprob_token_ids", "prompt_logprobs", "detokenize",
            "logit_bias", "stop_token_sequences", "bad_words_token_ids", "structured_output",
            "structured_outputs",
        ),
    )  # fmt: skip


Sampling = Annotated[dict[str, Any], sampling_options(MAX_TOKENS)]
Engine = Annotated[
    dict[str, Any],
    FieldsOf(
        cls=EngineConfig,
        panel="Engine",
        without=("seed",),
        brief=("device", "dtype", "max_model_len"),
    ),
]


Lora = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=PATH",
        help="LoRA adapter to use: its name and the folder that PEFT has written. It turns "
        "--enable-lora on.",
    ),
]


@command
@second_interrupt_ends()
def generate(
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    sampling: Sampling,
    engine: Engine,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; or give --input.")] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            help="Image file that --prompt asks about; may be given several times. The prompt is "
            "then a user's message in the model's chat template, after the images."
        ),
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help='File of prompts, or - for stdin, one JSON object per line: "prompt", '
            '"prompt_token_ids" or "messages", and optionally "sampling_params", "request_id", '
            '"priority" and "fairness_id". '
            "A field that is null counts as absent; blank lines are skipped.",
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="File for the results of --input, or - for stdout, one JSON object per line.",
        ),
    ] = None,
    stream: Annotated[bool, typer.Option(help="Print the text as it is generated.")] = True,
    lora: Lora = None,
) -> None:
    """Continue a prompt, or every prompt of a JSONL file.

    Only the generated text, or the results with --output -, goes to stdout. Exit code 1: a line of
    --input failed, or the output cannot be written; 2: an argument, the model or the device cannot
    be used; 130: Ctrl-C. A second Ctrl-C ends the program at once.
    """
    _check_mode(prompt, input_file, output_file)
    if image and prompt is None:
        raise ConfigError("--image: expected with --prompt TEXT, got --input FILE")
    check_sampling(sampling)
    adapter = adapter_of(lora, engine)
    if prompt is not None:
        _generate_one(model, prompt, image or (), sampling, engine, stream=stream, lora=adapter)
    elif input_file is not None and output_file is not None:
        _generate_batch(model, input_file, output_file, sampling, engine, adapter)


def check_sampling(sampling: dict[str, Any]) -> None:
    """Raise a ``RequestError`` for a wrong option, before a model is loaded."""
    SamplingParams(**{"max_tokens": None} | sampling)


def adapter_of(text: str | None, engine: dict[str, Any]) -> LoRARequest | None:
    """Return what --lora says, and let the engine take adapters; ConfigError: no NAME=PATH."""
    if text is None:
        return None
    from mrv1.engine import LoRARequest

    name, _, path = text.partition("=")
    if not name or not path:
        raise ConfigError(f"--lora: expected NAME=PATH, got {text!r}")
    engine["enable_lora"] = True
    return LoRARequest(name, 1, path)


def with_defaults(llm: LLM, sampling: dict[str, Any], *, max_tokens: int) -> dict[str, Any]:
    """Return sampling options, with the model's values for options that were not given."""
    return {"max_tokens": max_tokens} | llm.default_sampling_params | sampling


@contextmanager
def loaded(model: str, engine: dict[str, Any], lora: LoRARequest | None) -> Iterator[LLM]:
    """Load a model, and an adapter: a wrong one fails here, not once for each prompt."""
    from mrv1.engine import LLM

    with LLM(model, **engine) as llm:
        say(llm.describe())
        if lora is not None:
            llm.add_lora(lora)
        yield llm


def _check_mode(prompt: str | None, input_file: Path | None, output_file: Path | None) -> None:
    if (prompt is None) == (input_file is None):
        raise ConfigError("expected one of --prompt TEXT and --input FILE")
    if (input_file is None) != (output_file is None):
        raise ConfigError("expected --input FILE and --output FILE together")
    if input_file is None or output_file is None or STANDARD in (input_file, output_file):
        return
    if output_file.exists() and output_file.samefile(input_file):
        raise ConfigError(f"--output: expected another file than --input, got {output_file}")


def _generate_one(
    model: str,
    prompt: str,
    images: Sequence[str],
    sampling: dict[str, Any],
    engine: dict[str, Any],
    *,
    stream: bool,
    lora: LoRARequest | None,
) -> None:
    """Print the continuation of one prompt to stdout, as it comes or at the end."""
    from mrv1.cli.report import Usage, path_name

    with loaded(model, engine, lora) as llm:
        params = SamplingParams(**with_defaults(llm, sampling, max_tokens=MAX_TOKENS))
        typer.echo(prompt, err=True, nl=False)
        usage = Usage(llm)
        parts = [{"type": "image", "image": file} for file in images]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
        text = ""
        try:
            asked = llm.chat_prompt(messages) if images else prompt
            for output in llm.stream(asked, params, lora_request=lora):
                usage.observe([output])
                if stream or output.finished:
                    show(output.outputs[0].text[len(text) :], newline=False)
                    text = output.outputs[0].text
        except Mrv1Error:
            say("")  # the error begins a line, behind the prompt and the text so far
            raise
        show("")
        say(usage.line(path_name(engine["device"])))


def _generate_batch(
    model: str,
    input_file: Path,
    output_file: Path,
    sampling: dict[str, Any],
    engine: dict[str, Any],
    lora: LoRARequest | None,
) -> None:
    """Write the result of every line, and list the lines that failed."""
    from mrv1.cli.batch import parse_lines, read_input, run_batch
    from mrv1.cli.report import Usage, path_name

    content = read_input(input_file)
    with loaded(model, engine, lora) as llm:
        sampling = with_defaults(llm, sampling, max_tokens=MAX_TOKENS)
        SamplingParams(**sampling)  # reports a wrong combination once, not per line
        lines = parse_lines(content, sampling)
        usage = Usage(llm)
        # Not earlier: a failed load of the model must not erase a former run's results.
        with _opened(output_file) as target:
            name = "stdout" if output_file == STANDARD else f"--output {str(output_file)!r}"

            def write(line: str) -> None:
                with writing(target, name):
                    target.write(line)
                    target.flush()

            errors = run_batch(llm, lines, write, usage, lora)
        say(usage.line(path_name(engine["device"])))
    for number, message in errors.items():
        say(f"error: line {number}: {message}")
    where = "on stdout" if output_file == STANDARD else f"in {output_file}"
    say(f"{len(lines) - len(errors)} of {len(lines)} requests done, results {where}")
    if errors:
        raise typer.Exit(FAILURE)


def _opened(output_file: Path) -> AbstractContextManager[TextIO]:
    """Return --output, open for writing, stdout for good; ConfigError: it cannot be written."""
    if output_file == STANDARD:
        with writing_stdout():  # a closed one fails here
            return nullcontext(sys.stdout)
    try:
        return output_file.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output: cannot write {str(output_file)!r}: {error.strerror}"
        ) from error
