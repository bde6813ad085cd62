"""Items: their sources, their checks, and the digest that names their content."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from mrv1 import RequestError
from mrv1.multimodal import MultimodalItem, as_items, in_order
from mrv1.multimodal.item import _FIELDS
from tests.multimodal.odd_values import odd_values

ROWS = torch.arange(12, dtype=torch.float32).view(3, 4)


def item(**fields: object) -> MultimodalItem:
    return MultimodalItem(**({"features": ROWS, "start": 2} | fields))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_every_source_gives_the_same_rows(tmp_path, dtype):
    rows = ROWS.to(getattr(torch, dtype))
    save_file({"any name": rows}, tmp_path / "rows.safetensors")
    sources: list[object] = [rows, [rows[:1], rows[1:]], str(tmp_path / "rows.safetensors")]
    if dtype != "bfloat16":  # numpy has none
        np.save(tmp_path / "rows.npy", rows.numpy())
        sources += [rows.numpy(), tmp_path / "rows.npy", [rows[:1].numpy(), rows[1:]]]
        sources.append(np.load(tmp_path / "rows.npy", mmap_mode="r"))  # read-only
    made = [item(features=source) for source in sources]
    assert all(torch.equal(each.tensor, rows) for each in made)
    assert {each.tensor.dtype for each in made} == {rows.dtype}
    assert len({each.content_hash for each in made}) == 1
    assert (made[0].num_tokens, made[0].end, made[0].name) == (3, 5, "image at token 2")


NAN, INF = ROWS.clone(), ROWS.clone()
NAN[1, 2], INF[2, 0] = torch.nan, torch.inf


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"features": ROWS[0]}, r"features: expected shape \[n, hidden\], both >= 1, got \[4\]"),
        ({"features": ROWS[:0]}, r"features: expected shape .*, got \[0, 4\]"),
        (
            {"features": ROWS.int()},
            r"features: expected one of float16, .*float64, got torch\.int32",
        ),
        ({"features": NAN}, r"features: expected finite values, got NaN or infinity in row 1"),
        ({"features": INF}, r"features: expected finite values, got NaN or infinity in row 2"),
        ({"features": []}, r"features: expected at least one tensor, got an empty list"),
        ({"features": [ROWS, ROWS[:, :3]]}, r"features: expected parts of one hidden size"),
        ({"features": [ROWS, ROWS.half()]}, r"features: expected parts of one hidden size, dtype"),
        ({"features": [[1.0, 2.0]]}, r"features: expected a tensor, an array, a file name"),
        ({"features": np.array([["a"]])}, r"features: expected an array of floats, got <U1"),
        ({"features": ROWS.numpy()[::-1]}, r"features: expected .*, got float32 \(.*negative"),
        (
            {"features": np.ma.masked_array(ROWS.numpy(), mask=ROWS.numpy() > 3)},
            r"features: expected an array without a mask, got a masked array",
        ),
        ({"features": "missing.npy"}, r"features: expected a readable file 'missing\.npy', got"),
        ({"features": "rows.pt"}, r"features: expected a \.npy or \.safetensors file, got rows"),
        ({"features": None}, r"features: expected a tensor, .*got NoneType"),
        ({"start": -1}, r"start: expected an integer >= 0, got -1"),
        ({"start": "3"}, r"start: expected an integer >= 0, got '3'"),
        ({"start": True}, r"start: expected an integer >= 0, got True"),
        ({"modality": "smell"}, r"modality: expected one of .*, got 'smell'"),
        ({"grid_thw": (1, 2)}, r"grid_thw: expected three integers >= 1, got \(1, 2\)"),
        ({"grid_thw": (1, 0, 2)}, r"grid_thw: expected three integers >= 1"),
        ({"grid_thw": (1, 1, 2), "modality": "audio"}, r"grid_thw: expected None for audio"),
        ({"second_per_grid": 0, "modality": "video"}, r"second_per_grid: expected a number"),
        ({"second_per_grid": 1.0}, r"second_per_grid: expected None for image, got 1\.0"),
        ({"bidirectional": 1}, r"bidirectional: expected True or False, got 1"),
        ({"cache_key": 5}, r"cache_key: expected a string or bytes, got 5"),
        ({"cache_key": "\ud800"}, r"cache_key: .*, got UnicodeEncodeError\(.*surrogates not"),
        ({"start": 2**31}, r"start: expected at most 2147483647, got 2147483648"),
        ({"features": "~nouser12345/x.npy"}, r"features: expected a readable file '~nouser12345"),
        ({"features": ROWS.to(torch.float8_e5m2)}, r"features: expected one of .*, got torch\.fl"),
        ({"features": ROWS.to("meta")}, r"features: expected a dense tensor .*, got one on meta"),
        ({"features": ROWS.to_sparse()}, r"features: expected a dense .*, got torch\.sparse_coo"),
        (
            {"grid_thw": torch.zeros(3, device="meta")},
            r"grid_thw: expected a value .* meta tensor",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_item(fields, message):
    with pytest.raises(RequestError, match=rf"multimodal item \(\w+ at token [-\w]+\): {message}"):
        item(**fields)


def test_files_that_hold_something_else_are_refused(tmp_path):
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "text.safetensors").write_text("no tensors")
    np.save(tmp_path / "objects.npy", np.array([{}]))
    save_file({"b": ROWS, "a": ROWS.clone()}, tmp_path / "two.safetensors")
    for name in ("text.npy", "text.safetensors", "objects.npy"):
        with pytest.raises(RequestError, match=f"expected a readable file '.*{name}'"):
            item(features=tmp_path / name)
    with pytest.raises(RequestError, match=r"expected one tensor in '.*', got \['a', 'b'\]"):
        item(features=tmp_path / "two.safetensors")


@given(fields=st.dictionaries(st.sampled_from([*_FIELDS]), odd_values(), min_size=1, max_size=3))
def test_a_field_of_any_kind_is_taken_or_refused(fields):
    """Nothing but a ``RequestError`` leaves an item, and an item that is made can be used."""
    try:
        made = item(**fields)
        (made,) = as_items([made])
        in_order([made], 2**31)
        made.prepared(made.tensor.shape[1], torch.float32, pin_memory=False)
    except RequestError as error:
        assert str(error).startswith("multimodal item (")  # noqa: PT017 - whichever it is
    else:
        assert type(made.tensor) is torch.Tensor
        assert torch.isfinite(made.tensor).all()
        assert not made.tensor.requires_grad


def test_bits_of_views_are_resolved_and_a_parameter_is_its_tensor():
    made = [item(features=torch._neg_view(-ROWS)), item(features=torch.nn.Parameter(ROWS))]
    assert {each.content_hash for each in made} == {item().content_hash}


def test_the_digest_covers_the_dtype():
    """The same bytes are other numbers in another dtype."""
    half = ROWS.half()
    digests = {
        item(features=half.view(dtype)).content_hash for dtype in (torch.half, torch.bfloat16)
    }
    assert len(digests) == 2


def test_the_digest_covers_everything_but_the_place():
    different = [
        item(),
        item(features=ROWS + 1),
        item(features=ROWS.view(6, 2)),
        item(features=ROWS.double()),
        item(modality="video"),
        item(modality="video", second_per_grid=0.5),
        item(grid_thw=(1, 2, 6)),
        item(grid_thw=(1, 6, 2)),
        item(bidirectional=True),
        item(cache_key="a"),
        item(cache_key="b"),
    ]
    assert len({each.content_hash for each in different}) == len(different)
    assert item(start=9).content_hash == item().content_hash
    assert (
        item(cache_key="a", features=NAN.nan_to_num()).content_hash == different[-2].content_hash
    )
    assert item(cache_key=b"a").content_hash == different[-2].content_hash
    grids = [[1, 2, 6], np.array([1, 2, 6]), torch.tensor([1, 2, 6])]
    assert {item(grid_thw=grid).content_hash for grid in grids} == {different[6].content_hash}


def test_an_item_for_a_model_keeps_its_digest():
    given_item = item(features=ROWS.double())
    made = given_item.prepared(4, torch.float32, pin_memory=False)
    assert made.tensor.dtype == torch.float32
    assert torch.equal(made.tensor, ROWS)
    assert (
        made.content_hash == given_item.content_hash == item(features=ROWS.double()).content_hash
    )
    assert given_item.tensor.dtype == torch.float64
    same = item()
    assert same.prepared(4, torch.float32, pin_memory=False) is same, "nothing is to be done"
    with pytest.raises(
        RequestError, match=r"features: expected \[n, 5\], the model's hidden size"
    ):
        item().prepared(5, torch.float32, pin_memory=False)
    large = item(features=ROWS + 1e6)
    with pytest.raises(RequestError, match=r"features: expected values that fit torch\.float16"):
        large.prepared(4, torch.float16, pin_memory=False)


def test_an_item_is_frozen_and_compares_by_identity():
    made = item()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.start = 3
    assert made != item()
    assert len({made, made}) == 1


@given(
    spans=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=4),
    num_tokens=st.integers(0, 14),
)
def test_items_are_sorted_and_do_not_overlap(spans, num_tokens):
    items = [item(features=torch.ones(size, 1), start=start) for start, size in spans]
    covered = [token for start, size in spans for token in range(start, start + size)]
    if any(token >= num_tokens for token in covered):
        with pytest.raises(RequestError, match=f"within the prompt's {num_tokens} tokens"):
            in_order(items, num_tokens)
    elif len(set(covered)) < len(covered):
        with pytest.raises(RequestError, match="expected no item before token"):
            in_order(items, num_tokens)
    else:
        ordered = in_order(items, num_tokens)
        assert [each.start for each in ordered] == sorted(start for start, _ in spans)


def test_items_may_be_dicts_as_in_a_line_of_json():
    (made,) = as_items([{"features": ROWS, "start": 1, "grid_thw": [1, 1, 3]}])
    assert (made.start, made.grid_thw) == (1, (1, 1, 3))
    assert as_items(None) == as_items([]) == []
    for wrong, message in (
        ("rows", "multimodal: expected a list of items, got str"),
        (
            [ROWS],
            r"multimodal\[0\]: expected a MultimodalItem or a dict of its fields, got Tensor",
        ),
        ([{"features": ROWS}], r"multimodal\[0\]: expected features, start and others"),
        ([item(), {"features": ROWS, "start": 1, "grid": 1}], r"multimodal\[1\]: expected feat"),
    ):
        with pytest.raises(RequestError, match=message):
            as_items(wrong)
