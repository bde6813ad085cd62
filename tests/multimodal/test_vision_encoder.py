"""Images in conversations, from the file to the answer, against transformers' whole model."""

from __future__ import annotations

import base64
import json
import re
import shutil
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoVideoProcessor, Qwen3VLProcessor

from mrv1 import LLM
from mrv1.errors import ConfigError, RequestError
from mrv1.multimodal import Video, VisionEncoder, encode_images, vision_encoder
from mrv1.sampler import SamplingParams
from tests.cli.conftest import mrv1 as mrv1  # the fixture
from tests.models.vision_families import (
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_FAMILIES,
    VISION_START,
)
from tests.multimodal.odd_values import Unreadable
from tests.multimodal.test_vision_models import Prompt, expected

pytestmark = [
    # Where torchvision is installed, transformers uses it for images and warns of its own array.
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
    pytest.mark.skipif(
        "torchvision" in (getattr(AutoImageProcessor, "_backends", None) or ())
        and find_spec("torchvision") is None,
        reason="not run: images need torchvision with transformers before 5.18",
    ),
]

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def picture(seed: int, height: int = 20, width: int = 28) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def data_url(image: Image.Image) -> str:
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def transformers_greedy(checkpoint: Any, token_ids: list[int], images: list[Any]) -> list[int]:
    """Return transformers' answer to expanded tokens and the images' pixels."""
    processor = AutoImageProcessor.from_pretrained(checkpoint.path)
    inputs = processor(images=images, return_tensors="pt")
    out = checkpoint.oracle.generate(
        torch.tensor([token_ids]),
        pixel_values=inputs["pixel_values"],
        image_grid_thw=inputs["image_grid_thw"],
        mm_token_type_ids=(torch.tensor([token_ids]) == IMAGE).long(),
        max_new_tokens=GREEDY.max_tokens,
        min_new_tokens=GREEDY.max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    checkpoint.oracle.model.rope_deltas = None
    return out[0, len(token_ids) :].tolist()


def make_llm(path: Any, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 32, "max_num_seqs": 4}
    return LLM(str(path), **(defaults | options))


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_chat_with_images_equals_transformers(checkpoints, family, tmp_path):
    """A file's URL, a data URL and a PIL image in several messages; and a chat without images."""
    checkpoint = checkpoints(family)
    images = [picture(1), picture(2, 12, 50), picture(3, 40, 9)]
    images[0].save(tmp_path / "a 1.png")  # %20 in the URL
    messages = [
        {
            "role": "w10",
            "content": [
                {"type": "image", "image": (tmp_path / "a 1.png").as_uri()},
                {"type": "text", "text": " w20 w21 "},
                {"type": "image_url", "image_url": {"url": data_url(images[1])}},
            ],
        },
        {"role": "w11", "content": "w30 w31"},
        {"role": "w10", "content": ["w40 ", {"type": "image", "image": images[2]}]},
    ]
    with make_llm(checkpoint.path) as llm:
        plain = [{"role": "w10", "content": [{"type": "text", "text": "w50"}]}]
        with_images, text_only = llm.chat([messages, plain], GREEDY)
    assert text_only.error is None
    assert text_only.prompt_token_ids == (3, 10, 50, 4, 5)
    assert with_images.error is None
    token_ids = list(with_images.prompt_token_ids)
    counts = [len(run) for run in _runs(token_ids)]
    processor = AutoImageProcessor.from_pretrained(checkpoint.path)
    grids = processor(images=images, return_tensors="pt")["image_grid_thw"]
    assert counts == [int(grid.prod()) // 4 for grid in grids]
    collapsed = [t for i, t in enumerate(token_ids) if t != IMAGE or token_ids[i - 1] != IMAGE]
    one = [VISION_START, IMAGE, VISION_END]
    assert collapsed == [3, 10, *one, 20, 21, *one, 4, 3, 11, 30, 31, 4, 3, 10, 40, *one, 4, 5]
    want = transformers_greedy(checkpoint, token_ids, images)
    assert list(with_images.outputs[0].token_ids) == want


def _runs(token_ids: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for at, token in enumerate(token_ids):
        if token == IMAGE:
            if at == 0 or token_ids[at - 1] != IMAGE:
                runs.append([])
            runs[-1].append(at)
    return runs


def test_images_alone_are_a_prompt(checkpoints):
    checkpoint = checkpoints("qwen2_vl")
    images = [picture(4), np.asarray(picture(5))]
    prompt = encode_images(checkpoint.path, images, device="cpu")
    token_ids, items = prompt["prompt_token_ids"], prompt["multimodal"]
    want = []
    for item in items:
        assert item.start == len(want) + 1
        want += [VISION_START, *[IMAGE] * item.num_tokens, VISION_END]
    assert token_ids == want
    with make_llm(checkpoint.path) as llm:
        (output,) = llm.generate(prompt, GREEDY)
    assert list(output.outputs[0].token_ids) == transformers_greedy(checkpoint, token_ids, images)


def test_equal_images_have_equal_features_and_hashes(checkpoints):
    encoder = VisionEncoder(checkpoints("qwen3_vl").path, device="cpu")
    first, second = (
        encoder.prompt(None, [picture(6), other])["multimodal"]
        for other in (picture(7), picture(6))
    )
    assert first[0].content_hash == second[0].content_hash == second[1].content_hash
    assert first[0].content_hash != first[1].content_hash
    assert torch.equal(first[0].tensor, second[1].tensor)


BAD_IMAGES = [
    ("missing.png", r"images\[0\]: expected a PIL image, .*, got 'missing.png': .*No such file"),
    ("http://127.0.0.1:1/a.png", r"got 'http://127.0.0.1:1/a.png': .*No such file"),
    ("data:image/png;base64,???", r"got 'data:image/png;base64,\?\?\?'"),
    ("data:image/png;base64,AAAA", "cannot identify image"),
    (np.zeros((4, 4, 3), np.float32), r"float32 \[4, 4, 3\]"),
    (5, r"got 5: int"),
    (Image.new("RGB", (2000, 1)), r"images\[0\]: expected an image for this model's processor"),
    *(
        (image, r"images\[0\]: expected a PIL image, .* or a data URL with base64, got ")
        for image in (
            "~nouser12345/x.png", "\ud800.png", "a\0.png", "data:image/png;base64,\ud800",
            "data:", Unreadable(), torch.zeros(2, 2, 3, device="meta"),
        )
    ),
]  # fmt: skip


def test_a_conversation_with_a_bad_image_fails_alone(checkpoints):
    """Without a network too: an address is a file that does not exist."""
    images = [*(image for image, _ in BAD_IMAGES), picture(1)]
    conversations = [
        [{"role": "w10", "content": [{"type": "image", "image": image}]}] for image in images
    ]
    with make_llm(checkpoints("qwen2_vl").path) as llm:
        *refused, good = llm.chat(conversations, GREEDY)
        assert good.error is None
        for output, (_, message) in zip(refused, BAD_IMAGES, strict=True):
            assert isinstance(output.error, RequestError)
            assert re.search(message, str(output.error))
        prompt = llm.chat_prompt(conversations[-1])
        both = {"prompt": prompt, "multimodal": prompt.items}
        with pytest.raises(RequestError, match="multimodal: expected none with images"):
            llm.generate(both, GREEDY)


def test_a_model_of_text_alone_refuses_images():
    with pytest.raises(ConfigError, match=r"a checkpoint with a vision encoder, got .*tiny"):
        VisionEncoder("tiny")


def test_placeholders_and_images_are_counted(checkpoints):
    encoder = VisionEncoder(checkpoints("qwen2_vl").path, device="cpu")
    with pytest.raises(RequestError, match=r"images: expected 2, one for each placeholder .*150"):
        encoder.prompt([3, IMAGE, 4, IMAGE], [picture(1)])


def test_a_checkpoint_without_a_processor_is_named(checkpoints, tmp_path):
    for file in checkpoints("qwen2_vl").path.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(
        ConfigError, match=r"image processor: expected preprocessor_config\.json or"
    ):
        VisionEncoder(tmp_path)


def test_a_checkpoint_chooses_no_kernel_of_the_hub(checkpoints, tmp_path):
    """Such a kernel is code that transformers would download and run."""
    path = shutil.copytree(checkpoints("qwen2_vl").path, tmp_path / "model")
    config = json.loads((path / "config.json").read_text("utf-8"))
    named = {"attn_implementation": "kernels-community/flash-attn2"}
    config |= named | {"vision_config": config["vision_config"] | named}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    encoder = VisionEncoder(path, device="cpu")
    assert encoder._encoder.config._attn_implementation == "sdpa"


def test_no_code_of_a_processor_runs_and_nobody_is_asked(checkpoints, tmp_path, monkeypatch):
    path = shutil.copytree(checkpoints("qwen2_vl").path, tmp_path / "model")
    config = json.loads((path / "preprocessor_config.json").read_text("utf-8"))
    config |= {"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Own"}}
    (path / "preprocessor_config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "own.py").write_text("raise SystemExit", encoding="utf-8")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    with pytest.raises(ConfigError, match=r"vision encoder: .*no code of a checkpoint is run"):
        VisionEncoder(path, device="cpu")


def test_the_command_line_takes_image_files(checkpoints, mrv1, tmp_path):
    checkpoint, image = checkpoints("qwen2_vl"), picture(1)
    image.save(tmp_path / "a.png")
    options = ("--model", checkpoint.path, "--device", "cpu", "--num-kv-blocks", "32")
    greedy = ("--temperature", "0", "--max-tokens", "5", "--ignore-eos", "--dtype", "float32")
    result = mrv1("generate", *options, *greedy, "--prompt", "w20", "--image", tmp_path / "a.png")
    assert result.exit_code == 0, result.stderr
    with make_llm(checkpoint.path) as llm:
        content = [{"type": "image", "image": image}, {"type": "text", "text": "w20"}]
        (output,) = llm.chat([{"role": "user", "content": content}], GREEDY)
    assert result.stdout == output.outputs[0].text + "\n"
    result = mrv1("generate", *options, "--input", "x", "--output", "y", "--image", "a.png")
    assert result.exit_code == 2
    assert "--image: expected with --prompt TEXT" in result.stderr


# --- videos --------------------------------------------------------------------------------------

needs_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="not run: needs the extra 'video'"
)


def frames_of(seed: int, count: int = 5) -> np.ndarray[Any, Any]:
    shape = (count, 20, 28, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@needs_torchvision
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_chat_with_a_video_and_an_image_equals_transformers(checkpoints, family):
    """Five frames, the last of which the processor repeats, as an array and as images."""
    checkpoint, frames, image = checkpoints(family), frames_of(1), picture(1)
    answers = []
    for each in (frames, [Image.fromarray(frame) for frame in frames]):
        content = [
            {"type": "text", "text": "w20 "},
            {"type": "video", "video": each, "fps": 2.0},
            {"type": "text", "text": " w21 "},
            {"type": "image", "image": image},
        ]
        with make_llm(checkpoint.path) as llm:
            (output,) = llm.chat([{"role": "w10", "content": content}], GREEDY)
        answers.append((list(output.prompt_token_ids), list(output.outputs[0].token_ids)))
    assert answers[0] == answers[1]
    token_ids, got = answers[0]
    of_video = AutoVideoProcessor.from_pretrained(checkpoint.path)(
        videos=[frames], do_sample_frames=False, return_tensors="pt"
    )
    of_image = AutoImageProcessor.from_pretrained(checkpoint.path)(
        images=[image], return_tensors="pt"
    )
    num_steps, height, width = of_video["video_grid_thw"][0].tolist()
    step = [VIDEO] * (height * width // 4)
    video = [VISION_START, *step * num_steps, VISION_END]
    if family.startswith("qwen3_vl"):  # "<0.2 seconds>" is two unknown words
        video = [0, 0, VISION_START, *step, VISION_END] * num_steps
    places = [VISION_START, *[IMAGE] * (len(of_image["pixel_values"]) // 4), VISION_END]
    assert token_ids == [3, 10, 20, *video, 21, *places, 4, 5]
    ids = torch.tensor([token_ids])
    types = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    inputs = {**of_video, **of_image, "mm_token_type_ids": types}
    if family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = [1.0]
    _, want, _ = expected(checkpoint.oracle, Prompt(token_ids, inputs=inputs), len(got))
    assert got == want


@needs_torchvision
@pytest.mark.parametrize("count", [4, 5])
def test_frames_are_told_apart_by_their_times(checkpoints, count):
    """As transformers' processor writes them."""
    encoder = VisionEncoder(checkpoints("qwen3_vl").path, device="cpu")
    texts = []

    class Spy:
        def encode(self, text: str, **_: object) -> list[int]:
            texts.append(text)
            return [7]

    encoder._tokenizer = Spy()
    prompt = encoder.prompt([VIDEO], videos=[Video(frames=frames_of(2, count), fps=1.5)])
    times = Qwen3VLProcessor._calculate_timestamps(None, [*range(count)], 1.5, 2)
    assert texts == [f"<{time:.1f} seconds>" for time in times]
    items = prompt["multimodal"]
    assert len({item.content_hash for item in items}) == len(items) == len(texts)
    assert all(prompt["prompt_token_ids"][item.start - 2] == 7 for item in items)


def test_the_frames_of_a_video_are_different_items(checkpoints):
    """Without torchvision: the processor of videos is a stand-in with the patches of 3 steps."""
    encoder = VisionEncoder(checkpoints("qwen3_vl").path, device="cpu")
    patches = torch.randn(3 * 16, 96, generator=torch.Generator().manual_seed(0))

    class Processor:
        temporal_patch_size = 2

        def __call__(self, **_: object) -> dict[str, torch.Tensor]:
            return {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([[3, 4, 4]])}

    class Words:
        def encode(self, text: str, **_: object) -> list[int]:
            return [7]

    encoder._video_processor, encoder._tokenizer = Processor(), Words()
    frames = np.zeros((6, 16, 16, 3), np.uint8)
    items = encoder.prompt([VIDEO], videos=[Video(frames=frames, fps=2.0)])["multimodal"]
    assert len(items) == 3
    assert len({item.content_hash for item in items}) == 3, "or one would have another's features"
    again = encoder.prompt([VIDEO], videos=[Video(frames=frames, fps=2.0)])["multimodal"]
    assert [item.content_hash for item in again] == [item.content_hash for item in items]


@pytest.mark.parametrize(
    ("video", "message"),
    [
        (frames_of(0), r"videos\[0\]: expected a Video, got array"),
        (Video(frames=frames_of(0)), r"videos\[0\]: fps: expected the frames of each sec.* None"),
        (Video(frames=frames_of(0), fps=0), "fps: expected the frames of each second, got 0"),
        (Video(frames=frames_of(0), fps=True), "fps: expected the frames of each second, got Tr"),
        (Video(frames=frames_of(0), fps=Unreadable()), r"fps: expected .* that cannot be printed"),
        (Video(frames=[Unreadable()], fps=1), r"frames\[0\]: expected a PIL image"),
        (Video(frames=range(2), fps=1), r"frames\[0\]: expected a PIL image"),
        (Video(frames="a.mp4", fps=1), r"frames: expected a uint8 array .*, got 'a.mp4'"),
        (Video(frames=frames_of(0)[0], fps=1), r"frames: expected .* got 'uint8 \[20, 28, 3\]'"),
        (Video(frames=frames_of(0, 0), fps=1), r"expected \[frames, height, width, 3\], got \[0,"),
        (Video(frames=[picture(1), "b.png"], fps=1), r"frames\[1\]: expected a PIL image"),
        (
            Video(frames=[picture(1), picture(2, 12)], fps=1),
            r"expected images of one size, got \(28, 20\) and \(28, 12\)",
        ),
    ],
)
def test_a_wrong_video_is_named(checkpoints, video, message):
    encoder = VisionEncoder(checkpoints("qwen2_5_vl").path, device="cpu")
    with pytest.raises(RequestError, match=message):
        encoder.prompt(None, videos=[video])


def test_without_torchvision_a_conversation_with_a_video_fails_alone(checkpoints, monkeypatch):
    monkeypatch.setattr(vision_encoder, "find_spec", lambda name: name == "PIL" or None)
    part = {"type": "video", "video": frames_of(0), "fps": 2.0}
    conversations = [[{"role": "w10", "content": each}] for each in ([part], "w20")]
    with make_llm(checkpoints("qwen2_vl").path) as llm:
        refused, good = llm.chat(conversations, GREEDY)
    assert good.error is None
    assert "videos: torchvision: expected it installed for videos" in str(refused.error)


def test_placeholders_and_videos_are_counted(checkpoints):
    encoder = VisionEncoder(checkpoints("qwen2_vl").path, device="cpu")
    with pytest.raises(RequestError, match=r"videos: expected 1, one for each placeholder .*151"):
        encoder.prompt([3, VIDEO, 4])
