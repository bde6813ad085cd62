"""On a GPU: vLLM's ``LLM`` with mrv1's backend and worker, beside vLLM's FLASH_ATTN."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM's Python files: make full-vllm", allow_module_level=True)

import numpy as np
import torch

from benchmarks.engines.driver import FP8_NEAR_TIE, NEAR_TIES
from benchmarks.measure.child import ChildError, run_in_child
from tests.integrations.vllm.gpu_models import (
    CONFIGS,
    VOCAB,
    Outputs,
    engine_options,
    generate,
    random_model,
    write_model,
)
from tests.integrations.vllm.plugins import write_plugins
from tests.integrations.vllm.serving import NO_WHOLE_VLLM

pytestmark = pytest.mark.filterwarnings("ignore")

(ROUNDING,) = [value for dtype, value in NEAR_TIES.items() if "bfloat16" in str(dtype)]
PROMPT_LENGTHS = (700, 33, 1, 128, 257, 64, 16, 1500, 300, 15, 17, 512)
MAX_TOKENS = 24


def problems(expected: Outputs, found: Outputs, tolerance: float) -> list[str]:
    """Return where outputs differ by more than rounding; each token follows the expected ones."""
    wrong = []
    for row, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        for step, ((wanted, best), (token, values)) in enumerate(zip(theirs, ours, strict=True)):
            if token != wanted:
                first, second = sorted(best.values(), reverse=True)[:2]
                if first - second > tolerance:
                    wrong.append(f"row {row} step {step}: {token}, {wanted} leads {best}")
            elif abs(values[token] - best[token]) > tolerance:
                wrong.append(f"row {row} step {step}: {values[token]}, expected {best[token]}")
    return wrong


def num_sure(expected: Outputs, found: Outputs) -> int:
    """Return how many equal tokens lead the next best by more than rounding."""
    sure = 0
    for theirs, ours in zip(expected, found, strict=True):
        for (wanted, best), (token, _) in zip(theirs, ours, strict=True):
            first, second = sorted(best.values(), reverse=True)[:2]
            sure += token == wanted and first - second > ROUNDING
    return sure


def test_outputs_may_differ_by_rounding_alone():
    theirs = [[(1, {1: -0.5, 2: -0.6}), (3, {3: -1.0, 4: -2.0})]]
    assert problems(theirs, theirs, 0) == []
    parted = [[(2, {1: -0.6, 2: -0.5}), (3, {3: -1.0, 4: -2.0})]]
    assert problems(theirs, parted, 0.2) == []
    assert len(problems(theirs, parted, 0.05)) == 1
    assert len(problems(theirs, [[parted[0][0], (4, {4: -1.0})]], 0.2)) == 1
    assert len(problems(theirs, [[(1, {1: -0.5}), (3, {3: -1.3})]], 0.2)) == 1
    assert len(problems(theirs, [[(1, {1: -0.5}), (4, {4: -1.0})]], 0.2)) == 1
    assert num_sure(theirs, theirs) == 1
    assert num_sure(theirs, [[(1, {1: -0.5}), (4, {4: -1.0})]]) == 0
    assert num_sure([theirs[0][::-1]], [theirs[0]]) == 0
    assert num_sure(theirs, [[(2, {}), theirs[0][1]]]) == 1


def _rounded(module: torch.nn.Module, inputs: object, output: object) -> torch.Tensor | None:
    return output.bfloat16().float() if isinstance(output, torch.Tensor) else None


@pytest.mark.parametrize("name", CONFIGS)
def test_most_tokens_are_sure_and_rounding_moves_no_logit_far(name: str):
    # What the comparison on a GPU needs: in float32, and with every module's output rounded.
    model = random_model(name).float()
    prompt = torch.from_numpy(np.random.default_rng(2).integers(3, VOCAB, size=(1, 160)))
    with torch.no_grad():
        exact = model(prompt).logits[0].log_softmax(-1)
        for module in model.modules():
            module.register_forward_hook(_rounded)
        rounded = model(prompt).logits[0].log_softmax(-1)
    best, tokens = exact.topk(2)
    leads = best[:, 0] - best[:, 1]
    assert (leads > ROUNDING).float().mean() > 0.6
    errors = (rounded - exact).gather(1, tokens).abs()
    assert errors.max() <= ROUNDING
    assert errors.quantile(0.98) < ROUNDING / 2
    assert (leads[rounded.argmax(1) != tokens[:, 0]] <= ROUNDING).all()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a model's name and a door to its outputs, made once."""
    if NO_WHOLE_VLLM:
        pytest.skip(NO_WHOLE_VLLM)
    folder = tmp_path_factory.mktemp("models")
    write_plugins(folder, on_cpu=False)
    generator = np.random.default_rng(1)
    prompts = [generator.integers(3, VOCAB, size=length).tolist() for length in PROMPT_LENGTHS]

    @cache
    def made(model: str, door: str) -> Outputs:
        expected = None if door == "FLASH_ATTN" else made(model, "FLASH_ATTN")
        if not (folder / model).is_dir():
            write_model(folder / model, model)
        options = engine_options(folder / model, door)
        try:
            (found,) = run_in_child(generate, options, prompts, MAX_TOKENS, expected)
        except ChildError as error:
            pytest.fail("\n".join([str(error), *error.log]))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield made


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.parametrize(
    ("model", "door", "tolerance"),
    [
        ("llama", "backend", ROUNDING),
        ("llama", "backend-fp8", FP8_NEAR_TIE),
        ("llama", "backend-any-graph", ROUNDING),
        ("llama", "worker", ROUNDING),
        ("qwen3_moe", "backend", ROUNDING),
        ("gemma2", "backend", ROUNDING),
        ("gpt_oss", "backend", ROUNDING),
        pytest.param("llama", "backend-ranks-2", ROUNDING, marks=pytest.mark.multi_gpu(2)),
        pytest.param("llama", "backend-stages-2", ROUNDING, marks=pytest.mark.multi_gpu(2)),
        pytest.param("llama", "worker-ranks-2", ROUNDING, marks=pytest.mark.multi_gpu(2)),
        # Two ranks have the same KV head.
        pytest.param("llama", "worker-ranks-4", ROUNDING, marks=pytest.mark.multi_gpu(4)),
    ],
)
def test_outputs_are_those_of_flash_attention(
    outputs: Callable[[str, str], Outputs], model: str, door: str, tolerance: float
):
    expected, found = outputs(model, "FLASH_ATTN"), outputs(model, door)
    assert problems(expected, found, tolerance) == []
    num_tokens = len(expected) * MAX_TOKENS
    assert num_sure(expected, found) >= num_tokens // 4, "hardly a token is sure"
