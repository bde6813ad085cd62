"""Several ranks and one give the same tokens to prompts with images, video and other features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mrv1 import EngineConfig, SamplingParams
from mrv1.engine.core import EngineCore
from mrv1.engine.request import Request
from mrv1.errors import CapacityError, StepError
from mrv1.multimodal import MultimodalItem
from mrv1.runner.ranks import parallel_runner
from mrv1.runner.sleep import SleepMode
from tests.models.families import tiny_checkpoint
from tests.models.vision_families import (
    FEATURE_FAMILIES,
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_START,
    random_vision_model,
    tiny_vision_config,
)
from tests.thread_ranks import ThreadRanks

PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=2, logprobs=2),
    SamplingParams(temperature=1.2, seed=5, max_tokens=8, ignore_eos=True),
]
MakeCore = Callable[..., EngineCore]


@pytest.fixture
def make_core(monkeypatch) -> MakeCore:
    monkeypatch.setattr(parallel_runner, "Ranks", ThreadRanks)
    made: list[EngineCore] = []

    def make(path: Path, size: int, **options: object) -> EngineCore:
        settings = {
            "dtype": "float64", "num_kv_blocks": 12, "max_num_seqs": 4, "max_model_len": 128,
            "max_num_batched_tokens": 24,
        }  # fmt: skip
        config = EngineConfig(
            model=str(path), device="cpu", tensor_parallel_size=size, **(settings | options)
        )
        made.append(EngineCore(config, progress=False))
        return made[-1]

    yield make
    for core in made:
        core.runner.close()


Given = list[tuple[list[int], list[MultimodalItem]]]
"""Token ids and items of prompts."""


def prompts(num_columns: int, *, family: str | None = None) -> Given:
    """Return prompts with an image, the same image again, two images, a video, and none."""
    generator = torch.Generator().manual_seed(3)

    def part(*grid: int, modality: str = "image") -> dict[str, object]:
        count = grid[0] * grid[1] * grid[2] // 4
        if modality == "video" and family == "ernie4_5_vl_moe":
            count //= 2  # a feature of two frames
        features = torch.randn(count, num_columns, generator=generator) * 0.1
        grid_thw = None if family is None else grid
        return {"features": features, "modality": modality, "grid_thw": grid_thw}

    def placed(*parts: dict[str, object]) -> tuple[list[int], list[MultimodalItem]]:
        token_ids, items = [5, 6, 7], []
        for each in parts:
            token_ids.append(VISION_START)
            items.append(MultimodalItem(start=len(token_ids), **each))
            token = VIDEO if each["modality"] == "video" else IMAGE
            token_ids += [token] * items[-1].num_tokens
            token_ids += [VISION_END, 9, 11]
        return token_ids, items

    shared = part(1, 4, 6)
    frames = 1 if (family or "").startswith("qwen3_vl") else 2  # there, an item is a frame
    video = part(frames, 4, 4, modality="video")
    return [placed(shared), placed(shared), placed(part(1, 4, 4), shared), placed(video), placed()]


def run(core: EngineCore, given: Given) -> list[Request]:
    requests = [
        core.add_request(f"{index}", token_ids, PARAMS[index % 2], multimodal=items)
        for index, (token_ids, items) in enumerate(given)
    ]
    while core.has_unfinished_requests:
        core.step()
    return requests


def check_equal(one: EngineCore, several: EngineCore, given: Given) -> None:
    for request, other in zip(run(one, given), run(several, given), strict=True):
        assert (request.error, other.error) == (None, None)
        assert other.output_token_ids == request.output_token_ids
        for name in ("output_logprobs", "prompt_logprobs"):
            for told, of_other in zip(getattr(request, name), getattr(other, name), strict=True):
                assert told.token_ids.tolist() == of_other.token_ids.tolist()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("family", FEATURE_FAMILIES)
def test_prompts_with_images_and_video_get_the_tokens_of_one_rank(
    tmp_path, make_core, family, size
):
    """M-RoPE in all families, DeepStack's columns in Qwen3-VL, and ERNIE's two sets of experts."""
    random_vision_model(tiny_vision_config(family)).save_pretrained(tmp_path)
    one, several = make_core(tmp_path, 1), make_core(tmp_path, size)
    given = prompts(one.runner.model_config.feature_size, family=family)
    for _ in range(2):  # the second time, features are in the buffer already
        check_equal(one, several, given)
    assert several.metrics()["num_preemptions"] == one.metrics()["num_preemptions"]


def test_tokens_of_an_item_see_each_other_on_every_rank(tmp_path, make_core):
    """Their ranges of keys come to each rank with the launch of the layers."""
    tiny_checkpoint(tmp_path, "qwen3")
    one, several = (make_core(tmp_path, size) for size in (1, 2))
    given = prompts(64)
    for _, items in given:
        for item in items:
            object.__setattr__(item, "bidirectional", True)
    check_equal(one, several, given)


@pytest.mark.parametrize("configured", [None, 1 << 16])
def test_features_for_a_model_without_an_encoder_get_memory_when_they_come(
    tmp_path, make_core, configured
):
    tiny_checkpoint(tmp_path, "qwen3")
    one, several = (make_core(tmp_path, size, mm_cache_memory_bytes=configured) for size in (1, 2))
    given = prompts(64)
    check_equal(one, several, given)
    runners = [several.runner, *several.runner._ranks.runners.values()]
    assert len({len(each.features.rows) for each in runners}) == 1
    assert several.kv_report()["feature_bytes"] == 2 * one.kv_report()["feature_bytes"] > 0
    for core in (one, several):
        core.sleep()
        core.wake_up()
    check_equal(one, several, given)


def test_a_rank_without_room_for_features_fails_the_requests_that_bring_some(
    tmp_path, make_core, monkeypatch
):
    tiny_checkpoint(tmp_path, "qwen3")
    one, several = (make_core(tmp_path, size) for size in (1, 2))
    full, allocate = several.runner._ranks.runners[1].memory, SleepMode.allocate_features

    def without_room(self: SleepMode) -> None:
        if self is full:
            raise CapacityError(
                "mm_cache_memory_bytes: expected room for 1 bytes on cpu, got less"
            )
        allocate(self)

    given = prompts(64)
    with monkeypatch.context() as patch:
        patch.setattr(SleepMode, "allocate_features", without_room)
        (failed,) = run(several, given[:1])
    assert isinstance(failed.error, StepError)
    assert "rank 1: mm_cache_memory_bytes: expected room" in str(failed.error)
    assert several.kv_report()["feature_bytes"] == 0
    check_equal(one, several, given)
