"""mrv1's draw in the sampler of vLLM's second model runner."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM's Python files: make full-vllm", allow_module_level=True)

import numpy as np
import torch
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from mrv1 import ConfigError
from mrv1.integrations.vllm import draw_sampler, models
from mrv1.integrations.vllm.draw_sampler import DrawModelState, DrawSampler
from mrv1.integrations.vllm.versions import interface
from tests.integrations.vllm.serving import Engine, new_config
from tests.integrations.vllm.test_head_wise import new_config as model_config
from tests.models.families import tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB = 40
PARAMS = (
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
)


class HostBuffer:
    """Stands for vLLM's buffer in pinned memory, which a machine without a GPU has not."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()
        self.uva = (lambda n=None: self.cpu[:n]) if interface().resolves_kv_layout else self.cpu


@pytest.fixture
def sampler(device: torch.device, monkeypatch) -> DrawSampler:
    """Return the sampler that vLLM's runner would get, with a request of each of ``PARAMS``."""
    if device.type == "cpu":
        monkeypatch.setattr(buffer_utils, "UvaBuffer", HostBuffer)
        monkeypatch.setattr(buffer_utils, "NonUvaBuffer", HostBuffer, raising=False)
    states = RequestState(
        max_num_reqs=8, max_model_len=64, max_num_batched_tokens=32, num_speculative_steps=0,
        vocab_size=VOCAB, device=device,
    )  # fmt: skip
    options = {"max_num_reqs": 8, "vocab_size": VOCAB, "device": device, "req_states": states}
    if "vllm_config" in inspect.signature(Sampler).parameters:
        options["vllm_config"] = new_config()
    state = SimpleNamespace(device=device)
    own, rejection = DrawModelState.custom_sampler(state, Sampler(**options))
    assert rejection is None
    for slot, params in enumerate(PARAMS):
        given = {"req_idx": slot, "sampling_params": VllmParams(seed=100 + slot, **params)}
        if "prompt_len" in inspect.signature(own.add_request).parameters:
            given["prompt_len"] = 4
        own.add_request(**given)
    own.apply_staged_writes()
    return own


def draw(sampler: DrawSampler, logits: torch.Tensor, slots: list[int], pos: int = 0):
    """Return the tokens of rows of these slots, at positions from ``pos`` on."""
    mapping = torch.tensor(slots, dtype=torch.int32, device=logits.device)
    given = {
        "idx_mapping": mapping,
        "idx_mapping_np": np.array(slots, dtype=np.int32),
        "pos": torch.arange(pos, pos + len(slots), device=logits.device),
        "input_ids": torch.zeros(len(slots), dtype=torch.int32, device=logits.device),
        "expanded_local_pos": torch.zeros_like(mapping),
        "seq_lens_upper_bound_np": np.full(len(slots), 8),
    }
    args = [given[name] for name in interface().sample_args]
    tokens, edited = sampler.sample(logits, mapping, *args, return_logprobs=False)
    return tokens.cpu(), edited


def probabilities(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Return what one row's tokens should be drawn with."""
    probs = (logits.double().cpu() / temperature).softmax(0)
    probs[probs < min_p * probs.max()] = 0
    order = probs.argsort(descending=True)
    probs[order[top_k or VOCAB :]] = 0
    probs /= probs.sum()
    mass = probs[order].cumsum(0) - probs[order]  # of likelier tokens
    probs[order[mass >= top_p]] = 0
    return probs / probs.sum()


@pytest.mark.gpu
def test_tokens_are_drawn_from_what_the_filters_keep(sampler, device):
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)).to(device) * 2
    num_draws = 4000
    logits = row.expand(num_draws, VOCAB).clone()
    for slot, params in enumerate(PARAMS):
        tokens, edited = draw(sampler, logits, [slot] * num_draws)
        assert torch.equal(edited, row.expand_as(edited))  # log-probabilities stay raw
        found = torch.bincount(tokens, minlength=VOCAB) / num_draws
        if params["temperature"] == 0:
            assert found[row.argmax()] == 1
            continue
        expected = probabilities(row, **params)
        assert found[expected == 0].sum() == 0, params
        # The distance of a sample of n from its distribution: about sqrt(kept / n) / 2.
        kept = int((expected > 0).sum())
        assert (found - expected).abs().sum() / 2 < (kept / num_draws) ** 0.5, params


@pytest.mark.gpu
def test_a_rows_token_does_not_depend_on_the_batch(sampler, device):
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2)).to(device)
    together, _ = draw(sampler, logits, [0, 1, 2, 3, 4, 5], pos=9)
    for row in range(6):
        alone, _ = draw(sampler, logits[row : row + 1], [row], pos=9 + row)
        assert alone == together[row]


@pytest.mark.gpu
def test_a_row_without_a_token_gets_token_0(sampler, device):
    logits = torch.full((2, VOCAB), -torch.inf, device=device)
    logits[1] = torch.nan
    assert draw(sampler, logits, [1, 5])[0].tolist() == [0, 0]


def test_the_seam_takes_what_vllm_gives():
    names = [*inspect.signature(Sampler.sample).parameters]
    assert names == [
        "self", "logits", "expanded_idx_mapping", *interface().sample_args, "return_logprobs"
    ]  # fmt: skip
    for state in (ModelState, DrawModelState):
        assert [*inspect.signature(state.custom_sampler).parameters] == ["self", "sampler"]


def test_a_model_offers_the_sampler_to_vllms_runner(tmp_path: Path, monkeypatch):
    tiny_checkpoint(tmp_path, "qwen3")
    config = model_config(tmp_path)
    config.additional_config = {"sampler": "other"}
    with pytest.raises(ConfigError, match="sampler: expected one of"):
        Engine(config)
    config.additional_config = {"sampler": "mrv1"}
    monkeypatch.setattr(models, "check_support", lambda _: None)
    engine = Engine(config)
    assert engine.worker.model.get_model_state_cls() is DrawModelState
    engine.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_v2_model_runner": False}, "VLLM_USE_V2_MODEL_RUNNER: expected 1"),
        ({"speculative_config": object()}, "speculative_config: expected None"),
        ({"logprobs_mode": "processed_logprobs"}, "logprobs_mode: expected a raw one"),
        ({"use_fp64_gumbel": True}, "use_fp64_gumbel: expected False"),
        ({"return_sampling_mask": True}, "return_sampling_mask: expected False"),
    ],
)
def test_what_the_draw_cannot_serve_is_refused_by_name(change: dict, message: str):
    model = SimpleNamespace(logprobs_mode="raw_logprobs", use_fp64_gumbel=False)
    config = SimpleNamespace(use_v2_model_runner=True, speculative_config=None, model_config=model)
    draw_sampler.check_support(config)
    for name, value in change.items():
        setattr(config if hasattr(config, name) else model, name, value)
    with pytest.raises(ConfigError, match=f"sampler='mrv1': {message}"):
        draw_sampler.check_support(config)
