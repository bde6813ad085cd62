"""The decoder over an fp8 cache against transformers; the static scales of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrv1.config import checkpoint_dir
from mrv1.engine.tokenizer import Tokenizer
from mrv1.errors import ConfigError
from mrv1.kernels.registry import select_ops
from mrv1.models import Checkpoint, ModelConfig, load_model
from mrv1.models.checkpoint import scale_names
from mrv1.models.loading import load_weights
from tests.models.driver import PagedDriver
from tests.models.families import random_model, tiny_checkpoint, tiny_config
from tests.models.quantizing_cache import fp8_logits
from tests.models.test_decoder import PROMPTS, decoder

HEAD_SCALES = torch.tensor([[[0.02, 0.03], [0.01, 0.02]], [[0.03, 0.01], [0.02, 0.05]]])
"""[layers, 2, kv_heads] of the tiny configurations."""


# --- forward -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["token", "quarter", "head"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_logits_over_an_fp8_cache_err_no_more_than_transformers(
    granularity: str, dtype: torch.dtype, device: torch.device
) -> None:
    """For every model dtype the error against float64 is at most 1.5 times transformers' error.

    Rope in float32 differs between the two by its last bit, and on a GPU so does every sum. Either
    may turn an fp8 code: ``turned`` allows for that.
    """
    if dtype == torch.float64 and device.type == "cuda":
        pytest.skip("float64 runs on the CPU reference path only")
    scales = HEAD_SCALES.to(device) if granularity == "head" else None
    config = tiny_config("qwen3")
    exact = random_model(config).to(device, torch.float64)
    quarter = 4 if granularity == "quarter" else None
    model = decoder(config, device, dtype)
    for chunk in (None, 5):
        how = (scales, quarter, chunk)
        expected = torch.cat([fp8_logits(exact, prompt, *how) for prompt in PROMPTS])
        driver = PagedDriver(
            model, block_size=16, num_blocks=8, granularity=granularity, head_scales=scales
        )
        error = torch.cat(driver.logits(PROMPTS, chunk)).double() - expected
        theirs = exact.to(dtype)
        their_error = torch.cat([fp8_logits(theirs, p, *how) for p in PROMPTS]) - expected
        turned = (1e-4 if device.type == "cpu" else 3e-4) * expected.std()
        assert error.abs().mean() <= 1.5 * their_error.abs().mean() + turned, chunk
        exact.to(torch.float64)


@torch.inference_mode()
def test_an_fp8_cache_changes_the_logits_of_a_trained_model_little() -> None:
    """Codes are within 1/16 of their values; the embedded model's logits move by 1.4%."""
    directory = checkpoint_dir("tiny")
    model = load_model(
        directory, device="cpu", dtype=torch.float32, ops=select_ops("reference"), progress=False
    )
    text = "KING RICHARD III:\nA horse! A horse! my kingdom for a horse!\n\nROMEO:\nO, she doth"
    ids = Tokenizer(directory).encode(text)

    def run(driver: PagedDriver) -> torch.Tensor:
        return driver.logits([ids], None)[0]

    plain = PagedDriver(model, block_size=16, num_blocks=4)
    exact = run(plain)
    largest = [[x.nan_to_num().abs().amax((0, 2, 3)) for x in (c.k, c.v)] for c in plain.caches]
    scales = torch.stack([torch.stack(layer) for layer in largest]) / 448
    for granularity, head_scales in (("token", None), ("quarter", None), ("head", scales)):
        driver = PagedDriver(
            model, block_size=16, num_blocks=4, granularity=granularity, head_scales=head_scales
        )
        error = run(driver) - exact
        assert 0 < error.std() < 0.03 * exact.std(), granularity


# --- scales of a checkpoint ----------------------------------------------------------------------


def add_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def scale_tensors(spelling: int, scales: torch.Tensor = HEAD_SCALES) -> dict[str, torch.Tensor]:
    """Return ``[layers, 2, ...]`` scales by tensor name, in one of the supported spellings."""
    return {
        scale_names(layer, part)[spelling]: scales[layer, index].clone()
        for layer in range(len(scales))
        for index, part in enumerate("kv")
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path, "qwen3")
    return tmp_path


def load(directory: Path) -> torch.Tensor:
    config = ModelConfig.from_pretrained(directory)
    return Checkpoint.at(directory).kv_scales(config.num_layers, config.num_kv_heads)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        (0, "self_attn.k_scale"),
        (1, "self_attn.attn.k_scale"),
        (2, "self_attn.k_proj.k_scale"),
    ],
)
def test_scales_are_found_under_every_name(checkpoint: Path, spelling: int, name: str) -> None:
    tensors = scale_tensors(spelling)
    assert f"model.layers.1.{name}" in tensors
    add_tensors(checkpoint, tensors)
    assert torch.equal(load(checkpoint), HEAD_SCALES)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_scale_serves_all_heads_of_a_layer(
    checkpoint: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    per_layer = HEAD_SCALES[:, :, :1].to(dtype)
    add_tensors(checkpoint, scale_tensors(0, per_layer.view(2, 2, *shape)))
    assert torch.equal(load(checkpoint), per_layer.float().expand(2, 2, 2))


def test_a_missing_scale_is_named_with_the_alternative(checkpoint: Path) -> None:
    tensors = scale_tensors(0)
    del tensors["model.layers.1.self_attn.v_scale"]
    add_tensors(checkpoint, tensors)
    with pytest.raises(
        ConfigError,
        match=r"model\.layers\.1\.self_attn\.v_scale: missing, .*choose kv_scale='token'",
    ):
        load(checkpoint)


def test_missing_scales_are_counted(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.k_scale: missing \(and 3 more"):
        load(checkpoint)


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
def test_a_scale_must_be_positive_and_finite(checkpoint: Path, value: float) -> None:
    tensors = scale_tensors(0) | {"model.layers.0.self_attn.v_scale": torch.tensor(value)}
    add_tensors(checkpoint, tensors)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.v_scale: expected finite"):
        load(checkpoint)


def test_a_misshaped_scale_is_refused(checkpoint: Path) -> None:
    add_tensors(checkpoint, scale_tensors(0) | {"model.layers.0.self_attn.k_scale": torch.ones(3)})
    with pytest.raises(
        ConfigError, match=r"expected one value or 2 \(KV heads\), got shape \[3\]"
    ):
        load(checkpoint)


@pytest.mark.parametrize("spelling", [0, 1, 2])
def test_scales_are_ignored_where_the_cache_does_not_use_them(
    checkpoint: Path, spelling: int
) -> None:
    config = ModelConfig.from_pretrained(checkpoint)
    before = load_weights(
        Checkpoint.at(checkpoint), config, device="cpu", dtype=torch.float32, progress=False
    )
    add_tensors(checkpoint, scale_tensors(spelling))
    after = load_weights(
        Checkpoint.at(checkpoint), config, device="cpu", dtype=torch.float32, progress=False
    )
    assert torch.equal(before.embed, after.embed)
