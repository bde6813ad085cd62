"""Where the pages of one layer's KV cache are, and which positions each KV head may see.

Element address of token ``t`` of block ``b`` for KV head ``h`` in one layer's K (or V) buffer::

    head_base[h] + b * block_stride[h] + t * token_stride

One formula serves every layout; the constructors below name the usual ones. Which column of a
request's block-table row holds logical block ``L`` for head ``h`` follows from its role
(S = ceil(sink / block_size), R = ring_blocks)::

    column = table_offset[h] + (L                if R == 0 or L < S
                                S + (L - S) % R  otherwise)

A query at position ``p`` of head ``h`` sees key position ``k`` when ``k <= p`` and
(``window[h] < 0`` or ``k > p - window[h]`` or ``k < sink[h]``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

BLOCK_SIZES = (16, 32, 64, 128)  # block sizes that the kernels accept, in tokens
ALIGNMENT_BYTES = 16
"""Bases and strides are multiples of this, so that a page row is read in 16-byte pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRole:
    """What one KV head may see, and where its segment of a block-table row starts."""

    window: int = -1
    """Visible tokens including the current one; -1 = full context."""
    sink: int = 0
    """Leading tokens that stay visible besides the window; 0 without a window."""
    ring_blocks: int = 0
    """Columns of the ring, which follow the sink's; 0 = no ring: column is the logical block."""
    table_offset: int = 0
    """First column of this head's segment in a block-table row."""
    group: int = 0
    """Head group: the row of ``slot_mapping`` that serves this head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Addresses and roles of one layer's KV heads; tensors are on the cache's device.

    Build one with :meth:`hnd`, :meth:`nhd`, :meth:`head_groups` or :meth:`per_head_ids`.
    """

    num_kv_heads: int
    block_size: int
    """Tokens per block."""
    head_dim: int
    token_stride: int
    """Elements from one token to the next inside a page."""
    head_base: torch.Tensor
    """[kv_heads] int64, in elements."""
    block_stride: torch.Tensor
    """[kv_heads] int64, in elements."""
    table_offset: torch.Tensor
    """[kv_heads] int32, columns."""
    window: torch.Tensor
    """[kv_heads] int32, tokens, -1 = full."""
    sink: torch.Tensor
    """[kv_heads] int32, tokens."""
    ring_blocks: torch.Tensor
    """[kv_heads] int32, blocks, 0 = no ring."""
    group_of_head: torch.Tensor
    """[kv_heads] int32, row of ``slot_mapping``."""
    kinds: torch.Tensor
    """[kinds, 3] int32: each pair of window and sink, and the number of heads that have it."""
    full_heads: torch.Tensor
    """[full heads] int32: the heads without a window."""
    streaming_heads: torch.Tensor
    """[streaming heads] int32: the heads with a window."""
    num_groups: int
    """Rows of ``slot_mapping``."""
    address_unit: int
    """Elements; every address and ``head_dim`` are multiples of this (host fact)."""
    has_window: bool
    """Whether any head has a window (host fact: kernels for full heads omit the window's code)."""
    has_ring: bool
    """Whether any head has a ring (host fact)."""
    roles: tuple[HeadRole, ...]
    """The role of each KV head (host fact)."""
    least_row_width: int
    """Columns that the roles need in a block-table row of any context length (host fact)."""
    page_end: int
    """Elements up to the end of the farthest page of block 0 (host fact)."""
    page_shapes: tuple[tuple[int, int, int], ...]
    """Shapes of a four-dimensional cache without its first dimension, the blocks: ``(kv_heads,
    block_size, head_dim)`` for HND, ``(block_size, kv_heads, head_dim)`` for NHD, none for others
    (host fact)."""
    visits_masked: bool = False
    """Whether attention reads the pages that windows hide and masks their keys instead of skipping
    them (host fact): slower, for comparisons. No ring then; the hidden values must be finite."""

    @classmethod
    def build(
        cls,
        *,
        block_size: int,
        head_dim: int,
        token_stride: int,
        head_base: Sequence[int],
        block_stride: Sequence[int],
        roles: Sequence[HeadRole],
        num_groups: int | None = None,
        device: torch.device | str = "cpu",
    ) -> KVLayout:
        """Return a layout from plain numbers, checked on the host.

        ``num_groups``: rows of ``slot_mapping``; None = the number of groups that the roles name.

        Raises:
            ValueError: an impossible size, an unaligned base or stride, a role that contradicts
                itself, or fewer groups than the roles name; the message names the argument.
        """
        num_kv_heads = len(roles)
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size: expected one of {BLOCK_SIZES}, got {block_size}")
        if num_kv_heads < 1 or head_dim < 1:
            raise ValueError(
                f"roles, head_dim: expected at least 1, got {num_kv_heads} heads of {head_dim}"
            )
        for name, values in (("head_base", head_base), ("block_stride", block_stride)):
            if len(values) != num_kv_heads:
                raise ValueError(f"{name}: expected {num_kv_heads} values, got {len(values)}")
        multiple = ALIGNMENT_BYTES // 2  # elements of the narrowest unquantized dtype
        for name, value in (
            ("token_stride", token_stride),
            *(("head_base", v) for v in head_base),
            *(("block_stride", v) for v in block_stride),
        ):
            if value < 0 or value % multiple:
                raise ValueError(
                    f"{name}: expected a multiple of {ALIGNMENT_BYTES} bytes "
                    f"({multiple} elements), got {value} elements"
                )
        for name, value in (
            ("token_stride", token_stride * block_size),
            *(("block_stride", v) for v in block_stride),
        ):
            if value >= 2**31:  # 32-bit factors: only block times stride is wider
                raise ValueError(f"{name}: expected a block within 2**31 elements, got {value}")
        for head, role in enumerate(roles):
            if role.window == 0 or role.window < -1:
                raise ValueError(f"window of head {head}: expected -1 or >= 1, got {role.window}")
            for field in ("sink", "ring_blocks", "table_offset", "group"):
                if getattr(role, field) < 0:
                    raise ValueError(
                        f"{field} of head {head}: expected >= 0, got {getattr(role, field)}"
                    )
            for field in ("sink", "ring_blocks"):
                if role.window < 0 and getattr(role, field):
                    raise ValueError(
                        f"{field} of head {head}: expected 0 for a full head, "
                        f"got {getattr(role, field)}"
                    )
            least = -(-(role.window - 1) // block_size) + 1  # for steps of one token
            if role.ring_blocks and role.ring_blocks < least:
                raise ValueError(
                    f"ring_blocks of head {head}: expected 0 or >= {least} to cover a window of "
                    f"{role.window}, got {role.ring_blocks}"
                )

        used_groups = max(r.group for r in roles) + 1
        if num_groups is None:
            num_groups = used_groups
        elif num_groups < used_groups:
            raise ValueError(
                f"num_groups: expected at least {used_groups} for the roles' groups, "
                f"got {num_groups}"
            )

        kinds = Counter((role.window, role.sink) for role in roles)

        def column(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        return cls(
            num_kv_heads=num_kv_heads, block_size=block_size,
            head_dim=head_dim, token_stride=token_stride,
            head_base=column(head_base, torch.int64),
            block_stride=column(block_stride, torch.int64),
            table_offset=column([r.table_offset for r in roles], torch.int32),
            window=column([r.window for r in roles], torch.int32),
            sink=column([r.sink for r in roles], torch.int32),
            ring_blocks=column([r.ring_blocks for r in roles], torch.int32),
            group_of_head=column([r.group for r in roles], torch.int32),
            kinds=torch.tensor(
                [(*kind, count) for kind, count in kinds.items()], dtype=torch.int32, device=device
            ),
            full_heads=column([h for h, r in enumerate(roles) if r.window < 0], torch.int32),
            streaming_heads=column([h for h, r in enumerate(roles) if r.window >= 0], torch.int32),
            num_groups=num_groups,
            address_unit=math.gcd(head_dim, token_stride, *head_base, *block_stride),
            has_window=any(r.window >= 0 for r in roles),
            has_ring=any(r.ring_blocks > 0 for r in roles),
            roles=tuple(roles),
            page_end=max(head_base) + (block_size - 1) * token_stride + head_dim,
            page_shapes=tuple(
                _shapes_of(block_size, head_dim, token_stride, head_base, block_stride)
            ),
            least_row_width=max(
                r.table_offset + bool(r.ring_blocks) * (-(-r.sink // block_size) + r.ring_blocks)
                for r in roles
            ),
        )  # fmt: skip

    @classmethod
    def hnd(
        cls,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        *,
        window: int = -1,
        sink: int = 0,
        roles: Sequence[HeadRole] | None = None,
        device: torch.device | str = "cpu",
    ) -> KVLayout:
        """Return the default layout ``[blocks, heads, block_size, head_dim]``: contiguous pages.

        All heads have ``window`` and ``sink``, or each head has its own role in ``roles``.

        Raises:
            ValueError: ``roles`` together with a window or a sink, or not one role per head.
        """
        if roles is None:
            roles = [HeadRole(window=window, sink=sink)] * num_kv_heads
        elif (window, sink) != (-1, 0):
            raise ValueError(
                f"roles, window, sink: expected roles alone, got roles with {window=}, {sink=}"
            )
        elif len(roles) != num_kv_heads:
            raise ValueError(f"roles: expected {num_kv_heads} heads, got {len(roles)}")
        page = block_size * head_dim
        return cls.build(
            block_size=block_size, head_dim=head_dim, token_stride=head_dim,
            head_base=[h * page for h in range(num_kv_heads)],
            block_stride=[num_kv_heads * page] * num_kv_heads, roles=roles, device=device,
        )  # fmt: skip

    @classmethod
    def nhd(
        cls,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        *,
        window: int = -1,
        sink: int = 0,
        device: torch.device | str = "cpu",
    ) -> KVLayout:
        """Return the layout ``[blocks, block_size, heads, head_dim]``."""
        return cls.build(
            block_size=block_size, head_dim=head_dim, token_stride=num_kv_heads * head_dim,
            head_base=[h * head_dim for h in range(num_kv_heads)],
            block_stride=[block_size * num_kv_heads * head_dim] * num_kv_heads,
            roles=[HeadRole(window=window, sink=sink)] * num_kv_heads, device=device,
        )  # fmt: skip

    @classmethod
    def head_groups(
        cls,
        roles: Sequence[HeadRole],
        group_base: Sequence[int],
        block_size: int,
        head_dim: int,
        *,
        device: torch.device | str = "cpu",
    ) -> KVLayout:
        """Return the layout of several head groups in one buffer.

        Group ``g`` starts at element ``group_base[g]`` and is an HND cache of its own heads:
        ``[blocks of g, heads of g, block_size, head_dim]``. A group may have only heads of other
        layers.
        """
        bases, strides = group_addresses(roles, group_base, block_size * head_dim)
        return cls.build(
            block_size=block_size, head_dim=head_dim, token_stride=head_dim, head_base=bases,
            block_stride=strides, roles=roles, num_groups=len(group_base), device=device,
        )  # fmt: skip

    @classmethod
    def per_head_ids(
        cls,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        max_blocks: int,
        *,
        window: Sequence[int] | None = None,
        sink: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> KVLayout:
        """Return HND pages with an independent block list per head (FastDeploy PR 7718's form).

        The block table is ``[batch * kv_heads, max_blocks]``; ``slot_mapping`` has a row per head.

        Raises:
            ValueError: not one window or not one sink per head.
        """
        windows = [-1] * num_kv_heads if window is None else list(window)
        sinks = [0] * num_kv_heads if sink is None else list(sink)
        for name, values in (("window", windows), ("sink", sinks)):
            if len(values) != num_kv_heads:
                raise ValueError(f"{name}: expected {num_kv_heads} values, got {len(values)}")
        roles = [
            HeadRole(window=windows[h], sink=sinks[h], table_offset=h * max_blocks, group=h)
            for h in range(num_kv_heads)
        ]
        return cls.hnd(num_kv_heads, block_size, head_dim, roles=roles, device=device)

    def packed(self, codes_per_element: int) -> KVLayout:
        """Return the layout in a cache's elements, if one holds several neighbouring codes."""
        if codes_per_element == 1:
            return self
        return replace(
            self,
            head_dim=self.head_dim // codes_per_element,
            token_stride=self.token_stride // codes_per_element,
            head_base=self.head_base // codes_per_element,
            block_stride=self.block_stride // codes_per_element,
            address_unit=self.address_unit // codes_per_element,
            page_end=self.page_end // codes_per_element,
            page_shapes=tuple((a, b, dim // codes_per_element) for a, b, dim in self.page_shapes),
        )

    def table_rows(self, block_table: torch.Tensor, num_reqs: int) -> torch.Tensor:
        """Return ``block_table`` as one row per request.

        Accepts ``[num_reqs, row_width]`` or, for per-head tables, ``[num_reqs * kv_heads,
        max_blocks]`` (a view, never a copy).

        Raises:
            TypeError: not int32.
            ValueError: another shape, rows narrower than the layout's segments, or a per-head
                table that is not contiguous or not as wide as ``table_offset`` requires.
        """
        if block_table.dtype != torch.int32:
            raise TypeError(f"block_table: expected dtype torch.int32, got {block_table.dtype}")
        if block_table.dim() == 2 and block_table.shape[0] == num_reqs:
            if num_reqs and block_table.shape[1] < self.least_row_width:
                raise ValueError(
                    f"block_table: expected rows of at least {self.least_row_width} columns for "
                    f"the layout's segments, got {list(block_table.shape)}"
                )
            return block_table
        if (
            block_table.dim() == 2
            and block_table.shape[0] == num_reqs * self.num_kv_heads
            and block_table.is_contiguous()
        ):
            offsets = [role.table_offset for role in self.roles]
            max_blocks = block_table.shape[1]
            if offsets != [head * max_blocks for head in range(self.num_kv_heads)]:
                raise ValueError(
                    "block_table: expected a row per request and KV head, as wide as the layout's "
                    f"table_offset {offsets} needs, got {list(block_table.shape)}"
                )
            return block_table.view(num_reqs, -1)
        raise ValueError(
            f"block_table: expected [{num_reqs}, row_width] or contiguous "
            f"[{num_reqs * self.num_kv_heads}, max_blocks], got {list(block_table.shape)}"
        )


def group_addresses(
    roles: Sequence[HeadRole], group_base: Sequence[int], page: int
) -> tuple[list[int], list[int]]:
    """Return each head's base and block stride, if group ``g`` starts at ``group_base[g]``.

    A block of a group has ``page`` elements a head. A group without a base is a ValueError.
    """
    size = Counter(role.group for role in roles)
    seen: Counter[int] = Counter()
    bases, strides = [], []
    for head, role in enumerate(roles):
        if role.group >= len(group_base):
            raise ValueError(
                f"group of head {head}: expected < {len(group_base)}, got {role.group}"
            )
        bases.append(group_base[role.group] + seen[role.group] * page)
        strides.append(size[role.group] * page)
        seen[role.group] += 1
    return bases, strides


def _shapes_of(
    block_size: int,
    head_dim: int,
    token_stride: int,
    head_base: Sequence[int],
    block_stride: Sequence[int],
) -> Iterator[tuple[int, int, int]]:
    """Yield the shapes that a cache with these addresses may have, without its first dimension."""
    num_kv_heads = len(head_base)
    if list(block_stride) != [num_kv_heads * block_size * head_dim] * num_kv_heads:
        return
    addresses = list(head_base), token_stride
    if addresses == ([h * block_size * head_dim for h in range(num_kv_heads)], head_dim):
        yield num_kv_heads, block_size, head_dim
    if addresses == ([h * head_dim for h in range(num_kv_heads)], num_kv_heads * head_dim):
        yield block_size, num_kv_heads, head_dim
