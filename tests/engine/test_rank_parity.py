"""Several ranks give what one gives, over random scripts of all that an engine does.

Float64 rounds too little to flip a choice, so that tokens are equal; the ranks are threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import EngineConfig, RequestError, SamplingParams
from mrv1.engine.core import EngineCore
from mrv1.engine.request import Request
from mrv1.multimodal import MultimodalItem
from mrv1.runner import EachRank
from mrv1.runner.ranks import parallel_runner
from tests.engine.test_overlap import drained
from tests.models.families import random_model, tiny_checkpoint, tiny_config
from tests.models.test_fp8_cache import add_tensors, scale_tensors
from tests.models.vision_families import (
    IMAGE,
    VISION_END,
    VISION_START,
    random_vision_model,
    tiny_vision_config,
)
from tests.rank_helpers import HEARD, Evens, Shift, counting
from tests.thread_ranks import ThreadRanks

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
"""Of 4 and 8 ranks, several have the same KV head."""
VOCAB = 163
TEXT_TOKENS = st.integers(3, IMAGE - 1)
MAX_LEN = 128

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one step in flight": {"overlap": False},
    "policy": {"head_policy": "ratio=0.5,window=32,sink=16"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "quarter scales": {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "quarter"},
    "static scales and policy": {
        "kv_cache_dtype": "fp8_e4m3",
        "kv_scale": "head",
        "head_policy": "ratio=0.5,window=32,sink=0",
    },
    "drafts": {"speculative": {"method": "ngram", "num_tokens": 3, "prompt_lookup_min": 1}},
    "per head ids": {"per_head_ids": True},
    "no prefix caching": {"enable_prefix_caching": False},
    "processed logprobs": {"logprobs_mode": "processed_logprobs"},
    "deterministic": {"deterministic": True},
    "rank invariant": {"deterministic": True, "rank_invariant": True},
    "custom processors": {},
    "vision": {},
}
"""Options, by name."""


class Op(NamedTuple):
    """What the script does next."""

    name: str
    """add, step, abort; or, once no request runs: sleep, weights, reset, listen."""
    value: Any


@st.composite
def params(draw) -> dict[str, Any]:
    """Draw sampling parameters: greedy or random, with edits, filters and reports."""
    chosen: dict[str, Any] = {"max_tokens": draw(st.integers(4, 12))}
    chosen |= {
        "temperature": draw(st.sampled_from([0, 0, 0.8, 1.5])),
        "seed": draw(st.integers(0, 9)),
    }
    optional = {
        "top_k": st.sampled_from([1, 5, 13, 77]),  # 13 and 77 mean something to ``Shift``
        "top_p": st.sampled_from([0.3, 0.9]),
        "min_p": st.sampled_from([0.01, 0.2]),
        "repetition_penalty": st.just(1.3),
        "frequency_penalty": st.just(0.5),
        "presence_penalty": st.just(0.4),
        "logit_bias": st.dictionaries(TEXT_TOKENS, st.sampled_from([-3.0, 3.0]), max_size=3),
        "bad_words_token_ids": st.lists(st.lists(TEXT_TOKENS, min_size=1, max_size=2), max_size=3),
        "stop_token_ids": st.lists(TEXT_TOKENS, max_size=20),
        "min_tokens": st.just(1),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 2),
        "structured_output": st.just(Evens()),
    }
    names = draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True))
    return chosen | {name: draw(optional[name]) for name in names}


@st.composite
def scripts(draw) -> list[Op]:
    """Draw a script; prompts share a prefix, and some have images."""
    shared = draw(st.lists(TEXT_TOKENS, min_size=16, max_size=40))
    ops = []
    for index in range(draw(st.integers(3, 5))):
        tail = draw(st.lists(TEXT_TOKENS, min_size=17, max_size=40))
        prompt = [*(shared if draw(st.booleans()) else []), *tail]
        images = draw(st.lists(st.integers(0, 2), max_size=2))
        ops.append(Op("add", (prompt, images, draw(params()))))
        ops.append(Op("step", draw(st.integers(0, 3))))
        if draw(st.integers(0, 5)) == 0:
            ops.append(Op("abort", draw(st.integers(0, index))))
        if draw(st.integers(0, 3)) == 0:
            change = draw(
                st.one_of(
                    st.builds(Op, st.just("sleep"), st.sampled_from([1, 2])),
                    st.builds(Op, st.just("weights"), st.integers(0, 2)),
                    st.builds(Op, st.just("reset"), st.none()),
                    st.builds(Op, st.just("listen"), st.booleans()),
                )
            )
            ops.append(change)
    return ops


@cache
def new_weights(seed: int, is_vision: bool) -> dict[str, torch.Tensor]:
    if is_vision:
        state = random_vision_model(
            tiny_vision_config("qwen3_vl", **HEADS), seed=seed
        ).state_dict()
    else:
        state = random_model(
            tiny_config("qwen3", vocab_size=VOCAB, **HEADS), seed=seed
        ).state_dict()
    return dict(state)


class Player:
    """Plays scripts on an engine."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._num_added = 0

    @property
    def is_vision(self) -> bool:
        return self.core.runner.model_config.vision is not None

    def play(self, script: list[Op]) -> list[Request | str]:
        """Return the requests, or why one was refused, in their order."""
        requests: list[Request | str] = []
        for name, value in script:
            if name == "add":
                requests.append(self._added(*value))
            elif name == "step":
                for _ in range(value):
                    self.core.step()
            elif name == "abort" and value < len(requests):
                request = requests[value]
                if isinstance(request, Request):
                    self.core.abort(request.req_id)
            elif name != "abort":
                self._finish()
                self._change(name, value)
        self._finish()
        self.core.set_kv_listener(None)
        return requests

    def _finish(self) -> None:
        for _ in range(600):
            if not self.core.has_unfinished_requests:
                return
            self.core.step()
        raise AssertionError("the engine does not come to an end")

    def _added(
        self, prompt: list[int], images: list[int], chosen: dict[str, Any]
    ) -> Request | str:
        self._num_added += 1
        token_ids, items = list(prompt), []
        for seed in images if self.core.config.speculation is None else ():
            token_ids.append(VISION_START)
            items.append(self._image(seed, len(token_ids)))
            token_ids += [IMAGE] * items[-1].num_tokens + [VISION_END]
        options = {"multimodal": items} if items else {}
        try:
            return self.core.add_request(
                str(self._num_added), token_ids[: MAX_LEN - 20] if not items else token_ids,
                SamplingParams(**chosen), **options,
            )  # fmt: skip
        except RequestError as error:
            return str(error)

    def _image(self, seed: int, start: int) -> MultimodalItem:
        grid = [(1, 4, 4), (1, 4, 6), (1, 6, 4)][seed]
        generator = torch.Generator().manual_seed(seed)
        columns = self.core.runner.model_config.feature_size
        features = torch.randn(grid[1] * grid[2] // 4, columns, generator=generator) * 0.1
        grid_thw = grid if self.is_vision else None
        return MultimodalItem(features=features, start=start, grid_thw=grid_thw)

    def _change(self, name: str, value: Any) -> None:
        core = self.core
        if name == "sleep":
            core.sleep(value)
            core.wake_up(["kv_cache"])
            core.wake_up()
            if value == 2:
                core.update_weights(new_weights(0, self.is_vision))
        elif name == "weights":
            weights = new_weights(value, self.is_vision)
            some = {n: t for n, t in weights.items() if value != 1 or ".layers.1." in n}
            core.update_weights(some, partial=True)
        elif name == "reset":
            core.reset_prefix_cache()
        else:
            core.set_kv_listener(EachRank(counting) if value else None)


def make_core(path: Path, case: str, size: int) -> EngineCore:
    """Return an engine with 9 blocks, which makes requests preempt each other."""
    options = {
        "num_kv_blocks": 9, "max_num_seqs": 4, "max_num_batched_tokens": 24,
        "max_model_len": MAX_LEN, "dtype": "float64", "device": "cpu", **CASES[case],
    }  # fmt: skip
    config = EngineConfig(model=str(path), tensor_parallel_size=size, **options)
    processors = [Shift()] if case == "custom processors" else []
    return EngineCore(config, logits_processors=processors, progress=False)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Callable[[str], Path]:
    @cache
    def path_of(kind: str) -> Path:
        path = tmp_path_factory.mktemp(kind)
        if kind == "vision":
            config = tiny_vision_config("qwen3_vl", **HEADS)
            random_vision_model(config).save_pretrained(path)
        else:
            tiny_checkpoint(path, "qwen3", vocab_size=VOCAB, **HEADS)
            add_tensors(path, scale_tensors(0))
        return path

    return path_of


@pytest.fixture(scope="module")
def players(checkpoints) -> Iterator[Callable[[str, int], tuple[Player, Player]]]:
    """Return a function that makes players of one rank and of several, with the same past."""
    made: dict[tuple[str, int], tuple[Player, Player]] = {}

    def pair(case: str, size: int) -> tuple[Player, Player]:
        if (case, size) not in made:
            close()
            path = checkpoints("vision" if case == "vision" else "text")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parallel_runner, "Ranks", ThreadRanks)
                one, several = (Player(make_core(path, case, each)) for each in (1, size))
            made[case, size] = one, several
        return made[case, size]

    def close() -> None:
        for players in made.values():
            for player in players:
                player.core.runner.close()
        made.clear()

    yield pair
    close()


QUICK = [("plain", 2), ("vision", 2), ("static scales and policy", 4)]
ALL = [(case, size) for case in CASES for size in (2, 4, 8)]


@pytest.mark.parametrize(
    ("case", "size"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.full) for each in ALL],
)
@settings(max_examples=max(settings.default.max_examples // 24, 2))  # each is many steps of ranks
@given(script=scripts())
def test_ranks_give_what_one_gives(players, case, size, script):
    one, several = players(case, size)
    HEARD.clear()
    expected = one.play(script)
    num_heard = HEARD.pop(0, 0)
    got = several.play(script)
    assert (dict.fromkeys(range(size), num_heard) if num_heard else {}) == HEARD
    check_equal(one, several, expected, got)


def check_equal(
    one: Player, several: Player, expected: list[Request | str], got: list[Request | str]
) -> None:
    """Check what two players have of a script."""
    for core in (one.core, several.core):
        drained(core)
    for request, other in zip(expected, got, strict=True):
        if isinstance(request, str):
            assert other == request
            continue
        assert isinstance(other, Request)
        assert str(other.error) == str(request.error)
        assert other.output_token_ids == request.output_token_ids
        assert other.finish_reason == request.finish_reason
        assert other.stop_reason == request.stop_reason
        for name in ("output_logprobs", "prompt_logprobs"):
            parts, others = getattr(request, name) or [], getattr(other, name) or []
            for part, of_other in zip(parts, others, strict=True):
                np.testing.assert_array_equal(of_other.token_ids, part.token_ids)
                np.testing.assert_array_equal(of_other.ranks, part.ranks)
                np.testing.assert_allclose(of_other.logprobs, part.logprobs, rtol=1e-5, atol=1e-9)
    for name in (
        "num_steps", "num_preemptions", "prefix_hit_tokens", "num_accepted_tokens",
        "num_generated_tokens", "num_nan_rows",
    ):  # fmt: skip
        assert several.core.metrics()[name] == one.core.metrics()[name]


SCRIPT = [
    Op("listen", True),
    Op("add", ([5, 6, 7, 8] * 6, [0, 1], {"max_tokens": 12, "temperature": 0, "logprobs": 2})),
    Op("add", ([5, 6, 7, 8] * 6, [], {"max_tokens": 9, "seed": 3, "prompt_logprobs": 1})),
    Op("step", 3),
    Op("add", ([9, 11], [], {"max_tokens": 8, "structured_output": Evens(), "temperature": 0})),
    Op("add", ([5, 6, 7, 8] * 5, [2], {"max_tokens": 16, "temperature": 0})),
    Op("step", 2),
    Op("abort", 3),
    Op("weights", 1),
    Op("listen", False),
    Op("add", ([5, 6, 7, 8] * 6, [0], {"max_tokens": 12, "temperature": 0})),
    Op("sleep", 2),
    Op("add", ([5, 6, 7, 8] * 6, [0], {"max_tokens": 12, "top_p": 0.9, "min_p": 0.01})),
    Op("sleep", 1),
    Op("add", ([5, 6, 7, 8] * 6, [1], {"max_tokens": 12, "temperature": 0})),
]


@pytest.mark.full
@pytest.mark.parametrize(("case", "size"), [("plain", 2), ("vision", 4)])
def test_processes_give_what_one_rank_gives(checkpoints, case, size):
    path = checkpoints("vision" if case == "vision" else "text")
    one, several = (Player(make_core(path, case, each)) for each in (1, size))
    check_equal(one, several, one.play(SCRIPT), several.play(SCRIPT))
    for player in (one, several):
        player.core.runner.close()
