"""Values that a caller may give where something else is expected; reading some of them raises."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

ROWS = torch.arange(8, dtype=torch.float32).view(4, 2)


class Unreadable:
    """An object all of whose methods fail."""

    def fail(self, *args: object) -> Any:
        raise OSError("no such thing")

    __repr__ = __eq__ = __len__ = __iter__ = __array__ = __index__ = __lt__ = fail
    __hash__ = object.__hash__


class Text(str):
    """A text that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise OSError("no such thing")

    __hash__ = str.__hash__


class Fields(Mapping[str, object]):
    """A mapping of fields that cannot be read."""

    def __getitem__(self, key: str) -> object:
        raise OSError("no such thing")

    def __iter__(self) -> Iterator[str]:
        return iter(("features", "start"))

    def __len__(self) -> int:
        return 2


class Subclass(torch.Tensor):
    """A tensor that torch does not make."""


def odd_tensors() -> list[torch.Tensor]:
    """Tensors of every kind that is not a plain matrix of floats or integers."""
    whole = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 4]])
    with warnings.catch_warnings():  # of prototypes
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([ROWS])
        jagged = torch.nested.nested_tensor([ROWS, ROWS[:1]], layout=torch.jagged)
        quantized = torch.quantize_per_tensor(ROWS, 0.1, 0, torch.quint8)
        rows = ROWS.to_sparse_csr()
    return [
        nested, jagged, quantized, rows, ROWS.to_sparse(), whole.to_sparse(),
        *(ROWS.to(getattr(torch, name)) for name in ("float8_e4m3fn", "float8_e5m2", "bool")),
        ROWS.to(torch.complex64).conj(), torch._neg_view(ROWS), torch._neg_view(whole),
        ROWS.to("meta"), whole.to("meta"), ROWS.bfloat16(), ROWS.clone().requires_grad_(),
        torch.nn.Parameter(ROWS), ROWS.as_subclass(Subclass), whole.as_subclass(Subclass),
        ROWS[0], ROWS[:0], torch.tensor(1.0), ROWS / 0, whole, whole.to(torch.uint8), ROWS.T,
    ]  # fmt: skip


def odd_values() -> st.SearchStrategy[object]:
    """Values of every type, alone and in lists."""
    of_objects = np.empty(4, object)
    for place in range(4):
        of_objects[place] = Unreadable()
    arrays = [
        ROWS.numpy(), ROWS.numpy()[::-1], ROWS.numpy().astype(">f4"), ROWS.numpy().astype("g"),
        ROWS.numpy().astype(object), of_objects, np.array("x"), np.zeros((4, 2), "O"),
        np.zeros(4, [("a", "i4")]), np.full((20, 2), 2**63, np.uint64), np.array([["a"]] * 20),
        np.ones((20, 2), "m8[s]"), np.ma.masked_array([1.0]), np.float64(2), np.int64(-1),
    ]  # fmt: skip
    single = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 30),
        st.sampled_from([2**31, 2**63, -(2**64), 10**400, 10**5000]),
        st.floats(),
        st.complex_numbers(),
        st.text(st.characters(), max_size=4),
        st.sampled_from(
            ["~nouser12345/x.npy", "\ud800", "\ud800.npy", "a\0.npy", ".npy", "image"]
        ),
        st.binary(max_size=3),
        st.sampled_from([*odd_tensors(), *arrays]),
        st.builds(Unreadable),
        st.builds(Fields),
        st.builds(Text, st.just("image")),
        st.just(range(10**9, 10**9 + 4)),
    )
    return single | st.lists(single, max_size=3) | st.dictionaries(st.text(max_size=2), single)
