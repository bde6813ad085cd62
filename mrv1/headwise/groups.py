"""Head groups: the KV heads that share blocks, what a group keeps, and its table columns."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mrv1.headwise.policy import FULL, HeadPolicy, Visible
from mrv1.kernels.cache.kv_layout import HeadRole


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGroup:
    """KV heads, across layers, that share block ids."""

    keeps: Visible  # what the blocks keep of a context; heads see this, or less
    num_heads: tuple[int, ...]  # [layers] heads of the group in each layer
    offset: int  # first column of its segment of a block-table row
    width: int  # columns of the segment
    max_blocks: int  # logical blocks of the longest request
    sink_blocks: int = 0  # columns of the sink, in front of the ring
    ring_blocks: int = 0  # columns that blocks use in turns; 0 = column i is logical block i


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """The head groups of a policy.

    Attributes:
        policy: which tokens each head sees.
        groups: groups of full heads come first.
        group_of_head: ``[layers][kv_heads]`` index of the head's group.
        visits_masked: whether attention reads the blocks that windows hide, and masks them.
    """

    policy: HeadPolicy
    groups: tuple[HeadGroup, ...]
    group_of_head: tuple[tuple[int, ...], ...]
    visits_masked: bool = False

    @classmethod
    def of_roles(
        cls, policy: HeadPolicy, *, block_size: int, max_model_len: int, max_query_len: int
    ) -> HeadGroups:
        """Return a group for each (window, sink), which keeps only blocks that its heads see.

        The table of a streaming group is a ring, if that has fewer columns than the longest
        request has blocks. ``max_query_len``: most tokens of one request in one step.
        """
        seen = policy.groups

        def ring(keeps: Visible) -> int:
            if keeps.is_full:
                return 0
            blocks = keeps.num_blocks(block_size, max_query_len)
            is_narrower = blocks < -(-max_model_len // block_size)
            return blocks - keeps.sink_blocks(block_size) if is_narrower else 0

        return cls._build(
            policy, seen, lambda layer, head: seen.index(policy.heads[layer][head]),
            block_size=block_size, max_model_len=max_model_len, ring=ring,
        )  # fmt: skip

    @classmethod
    def shared(cls, policy: HeadPolicy, *, block_size: int, max_model_len: int) -> HeadGroups:
        """Return one group of all heads, which keeps every block whatever its heads see."""
        return cls._build(
            policy, [FULL], lambda *_: 0, block_size=block_size, max_model_len=max_model_len
        )

    @classmethod
    def of_heads(cls, policy: HeadPolicy, *, block_size: int, max_model_len: int) -> HeadGroups:
        """Return full-width tables per head index, the form of FastDeploy's pull request 7718."""
        return cls._build(
            policy, [FULL] * policy.num_kv_heads, lambda _, head: head,
            block_size=block_size, max_model_len=max_model_len,
        )  # fmt: skip

    @classmethod
    def _build(
        cls,
        policy: HeadPolicy,
        keeps: Sequence[Visible],
        group_of: Callable[[int, int], int],
        *,
        block_size: int,
        max_model_len: int,
        ring: Callable[[Visible], int] = lambda _: 0,
    ) -> HeadGroups:
        group_of_head = tuple(
            tuple(group_of(layer, head) for head in range(policy.num_kv_heads))
            for layer in range(policy.num_layers)
        )
        max_blocks = -(-max_model_len // block_size)
        groups: list[HeadGroup] = []
        offset = 0
        for index, seen in enumerate(keeps):
            ring_blocks = ring(seen)
            sink_blocks = seen.sink_blocks(block_size) if ring_blocks else 0
            width = sink_blocks + ring_blocks if ring_blocks else max_blocks
            groups.append(
                HeadGroup(
                    keeps=seen,
                    num_heads=tuple(heads.count(index) for heads in group_of_head),
                    offset=offset,
                    width=width,
                    max_blocks=max_blocks,
                    sink_blocks=sink_blocks,
                    ring_blocks=ring_blocks,
                )
            )
            offset += width
        return cls(policy, tuple(groups), group_of_head)

    def slice(self, rank: int, size: int) -> HeadGroups:
        """Return the same groups with the heads of one tensor-parallel rank, maybe none in some.

        Every rank takes the same block ids. Errors as ``HeadPolicy.slice``.
        """
        policy = self.policy.slice(rank, size)
        first = rank * self.policy.num_kv_heads // size
        heads = builtins.slice(first, first + policy.num_kv_heads)
        group_of_head = tuple(layer[heads] for layer in self.group_of_head)
        groups = tuple(
            replace(group, num_heads=tuple(layer.count(index) for layer in group_of_head))
            for index, group in enumerate(self.groups)
        )
        return replace(self, policy=policy, groups=groups, group_of_head=group_of_head)

    def roles(self, layer: int) -> tuple[HeadRole, ...]:
        """Return a layer's heads in the form that kernels take."""
        return tuple(
            HeadRole(
                window=seen.window,
                sink=seen.sink,
                ring_blocks=self.groups[group].ring_blocks,
                table_offset=self.groups[group].offset,
                group=group,
            )
            for seen, group in zip(
                self.policy.heads[layer], self.group_of_head[layer], strict=True
            )
        )
