"""An option is one field: ``LLM`` and the command line have every field, a new field too."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal

import pytest
import typer

from benchmarks.cli.app import app as bench_app
from benchmarks.engines.generate import GenerateBench
from benchmarks.engines.headwise import HeadwiseBench
from benchmarks.engines.headwise_options import HeadwiseOptions
from benchmarks.engines.runner import RunnerBench
from benchmarks.kernels.attention_options import AttentionBench
from benchmarks.kernels.kv_write import KVWriteBench
from benchmarks.kernels.sampler import SamplerBench
from mrv1 import LLM, EngineConfig, SamplingParams
from mrv1.calibration import CalibrateOptions
from mrv1.cli import app
from mrv1.cli.options import FieldsOf, command
from mrv1.options import env_fields, field_docs, parameters, takes

OF_MODEL = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens"}
"""Sampling parameters that generation_config.json may set."""

ENGINE, SAMPLING = fields(EngineConfig), fields(SamplingParams)

IN_FILES_ALONE = {
    "n", "logprobs", "logprob_token_ids", "prompt_logprobs", "logit_bias", "stop_token_sequences",
    "bad_words_token_ids", "structured_output", "structured_outputs", "detokenize",
}  # fmt: skip
"""Sampling parameters that ``mrv1 generate`` has no options for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreOptions(EngineConfig):
    """The engine's options, and a new option of each kind."""

    colour: Literal["red", "blue"] = "red"
    """Colour of the ``tokens``."""
    num_shades: int = 7
    """Shades of the
    colour."""
    is_bright: bool = False
    """Whether it shines."""
    is_warm: bool = True
    """Whether it glows."""
    tint_ids: tuple[int, ...] = (1, 2)
    """Tints."""
    brush: str | None = None
    """Kind of brush."""
    mixture: Mapping[str, object] | None = None
    """Parts of colours."""


def options_of(path: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the options of a command by the name of their field; "bench" are the benchmarks."""
    is_bench = path[0] == "bench"
    found = typer.main.get_command(bench_app if is_bench else app)
    path = path[is_bench:]
    for name in path:
        _, found, _ = found.resolve_command(typer.Context(found), [name])
    return {option.name: option for option in found.params}


def text_of(option: Any) -> str:
    """Return an option's help without the remarks that its type adds."""
    return option.help.partition(" One of ")[0].removesuffix(" Repeatable.")


# --- every field ---------------------------------------------------------------------------------


def test_every_field_has_a_docstring():
    for cls, each in [(EngineConfig, ENGINE), (SamplingParams, SAMPLING)]:
        assert list(field_docs(cls)) == [field.name for field in each]
        assert all(doc.endswith(".") for doc in field_docs(cls).values())


@pytest.mark.parametrize("field", ENGINE, ids=lambda field: field.name)
def test_llm_has_every_field_of_an_engine(field):
    taken = inspect.signature(LLM).parameters[field.name]
    is_model = field.name == "model"
    assert taken.kind is (taken.POSITIONAL_OR_KEYWORD if is_model else taken.KEYWORD_ONLY)
    if is_model:
        assert taken.default is taken.empty
    else:
        assert taken.default == (None if field.default is MISSING else field.default)
    assert f"\n    {field.name}: " in inspect.getdoc(LLM.__init__)


def test_llm_takes_objects_that_a_configuration_cannot_hold():
    assert inspect.signature(LLM).parameters.keys() - {field.name for field in ENGINE} == {
        "logits_processors", "override_generation_config", "use_tqdm_on_load"
    }  # fmt: skip
    assert "\n    logits_processors: " in inspect.getdoc(LLM.__init__)
    assert "HeadPolicy" in str(inspect.signature(LLM).parameters["head_policy"].annotation)


@pytest.mark.parametrize("field", ENGINE, ids=lambda field: field.name)
def test_generate_has_every_field_of_an_engine(field):
    """Except the seed: ``--seed`` is the sampling parameter of the one request."""
    option = options_of(("generate",))[field.name]
    if field.name in ("model", "seed"):
        assert option.rich_help_panel != "Engine"
        return
    assert option.rich_help_panel == "Engine"
    assert option.default == (None if field.default is MISSING else field.default)
    assert text_of(option) == field_docs(EngineConfig)[field.name].replace("``", "")


@pytest.mark.parametrize("field", SAMPLING, ids=lambda field: field.name)
def test_generate_has_every_sampling_parameter_that_text_can_give(field):
    option = options_of(("generate",)).get(field.name)
    if field.name in IN_FILES_ALONE:
        assert option is None
        return
    assert option.rich_help_panel == "Sampling"
    if field.name in OF_MODEL:  # max_tokens: vLLM's 16 is short for a reader
        least = 128 if field.name == "max_tokens" else field.default
        assert option.default is None
        assert option.show_default == f"the model's, else {least}"
        if field.name == "max_tokens":
            return
    else:
        assert option.default == (None if field.default == () else field.default)
    assert text_of(option) == field_docs(SamplingParams)[field.name].replace("``", "")


@pytest.mark.parametrize(
    ("path", "cls", "without"),
    [
        (("bench", "generate"), GenerateBench, set()),
        (("bench", "runner"), RunnerBench, set()),
        (("bench", "capacity"), HeadwiseOptions, set()),
        (("bench", "headwise"), HeadwiseBench, set()),
        (("bench", "attention"), AttentionBench, set()),
        (("bench", "kv-write"), KVWriteBench, set()),
        (("bench", "sampler"), SamplerBench, {"stds"}),
        (("calibrate",), CalibrateOptions, set()),
    ],
)
def test_a_command_has_every_field_of_its_options_class(path, cls, without):
    options = options_of(path)
    assert {field.name for field in fields(cls)} - options.keys() == without
    assert all(option.help for option in options.values())


# --- a new field ---------------------------------------------------------------------------------


def test_a_new_field_is_an_option_of_python():
    class Engine:
        @takes(MoreOptions)
        def __init__(self, **options: object) -> None:
            """Start."""

    signature = inspect.signature(Engine)
    assert {"colour", *(field.name for field in ENGINE)} <= signature.parameters.keys()
    assert signature.parameters["colour"].default == "red"
    assert "\n    num_shades: Shades of the colour." in inspect.getdoc(Engine.__init__)
    assert signature.parameters["debug"].default is None  # from the environment
    assert signature.parameters["debug"].annotation == bool | None
    assert {each.name for each in parameters(MoreOptions)} == signature.parameters.keys()
    assert env_fields(MoreOptions) == env_fields(EngineConfig)


@pytest.fixture
def paint():
    """Return a function that runs a command with these fields and returns the values it got."""
    from typer.testing import CliRunner

    got: dict[str, Any] = {}

    @command
    def paint(
        options: Annotated[dict[str, Any], FieldsOf(cls=MoreOptions, without=("debug",))],
        seed: Annotated[int, typer.Option(help="In place of the field.")] = 3,
    ) -> None:
        """Paint."""
        got.update(options=options, seed=seed)
        MoreOptions(**options)

    painter = typer.Typer()
    painter.command()(paint)

    def run(*arguments: str) -> tuple[Any, dict[str, Any]]:
        got.clear()
        return CliRunner().invoke(painter, ["--model", "tiny", *arguments]), dict(got)

    return run


def test_a_new_field_is_an_option_of_a_command(paint):
    result, got = paint()
    assert result.exit_code == 0, result.output
    expected = {"colour": "red", "num_shades": 7, "is_bright": False, "is_warm": True}
    assert got["options"].items() >= expected.items()
    assert (
        not {"tint_ids", "brush", "debug", "debug_sync", "max_model_len"} & got["options"].keys()
    )
    assert got["seed"] == 3
    result, got = paint(
        "--colour", "blue", "--num-shades", "2", "--is-bright", "--no-is-warm", "--tint-id", "5",
        "--tint-id", "6", "--brush", "flat", "--debug-sync", "--mixture", '{"red": [1]}',
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    expected = {
        "colour": "blue", "num_shades": 2, "is_bright": True, "is_warm": False, "tint_ids": (5, 6),
        "brush": "flat", "debug_sync": True, "mixture": {"red": [1]},
    }  # fmt: skip
    assert got["options"].items() >= expected.items()


def test_help_shows_text_choices_and_default(paint):
    result, _ = paint("--help")
    said = " ".join(word for word in result.output.split() if word.isascii())
    assert "Colour of the tokens. One of red, blue. [default: red]" in said
    assert "Shades of the colour. [default: 7]" in said
    assert "Tints. Repeatable. [default: (1, 2)]" in said
    assert "--no-is-warm" in said
    assert "--no-is-bright" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block-size", "20"), "error: block_size: expected one of (16, 32, 64, 128), got 20"),
        (("--dtype", "int8"), "error: dtype: expected one of ('auto', 'float32',"),
        (("--num-shades", "many"), "Invalid value for '--num-shades'"),
        (("--debug",), "No such option"),
    ],
)
def test_a_wrong_value_is_refused_by_name(paint, arguments, message):
    result, _ = paint(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_field_that_text_cannot_express_must_be_left_out():
    with pytest.raises(TypeError, match=r"SamplingParams.structured_output: expected a type"):
        FieldsOf(cls=SamplingParams).options()


def test_fields_of_a_package_without_sources_have_no_docstrings(monkeypatch):
    def no_source(cls: type) -> str:
        raise OSError("could not get source code")

    assert field_docs(EngineConfig).keys() == {field.name for field in ENGINE}
    monkeypatch.setattr(inspect, "getsource", no_source)
    assert field_docs(EngineConfig) == {}
