"""The head and the tail of a step in one CUDA graph: each replay equals the oracles' step."""

from __future__ import annotations

import pytest
import torch

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.step.contracts import (
    FAILED,
    LENGTH,
    RUNNING,
    STOP_TOKEN,
    AppendedTokens,
    GatheredTokens,
    RequestSlots,
    SlotTables,
)
from tests.kernels.elementwise import bundled

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_only]

MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB = 64, 128, 16, 50
NUM_ROWS, MAX_SEGMENTS = 40, 100
ROW_WIDTH = MAX_MODEL_LEN // BLOCK_SIZE


class Step:
    """State of every slot as views of one buffer, and the buffers of a step's decode graph."""

    def __init__(self, ops, device) -> None:
        self.ops = ops
        vectors = ("num_tokens", "num_computed_tokens", "max_total_tokens", "stopped")
        sizes = [1, 1, 1, 1, 2, ROW_WIDTH, MAX_MODEL_LEN]
        self.state = torch.zeros(sum(sizes) * MAX_NUM_REQS, dtype=torch.int32, device=device)
        parts = self.state.split([size * MAX_NUM_REQS for size in sizes])
        self.vectors = dict(zip(vectors, parts, strict=False))
        self.stop_token_ids, self.block_tables, self.token_ids = (
            part.view(MAX_NUM_REQS, -1) for part in parts[4:]
        )
        self.upload = torch.zeros(20_000, dtype=torch.int32, device=device)

        def full(*shape: int, dtype=torch.int32) -> torch.Tensor:
            return torch.full(shape, -9, dtype=dtype, device=device)

        self.slots = bundled(
            {
                "token_ids": self.token_ids,
                "stop_token_ids": self.stop_token_ids,
                **self.vectors,
            },
            slots=RequestSlots,
        )["slots"]
        self.tables = SlotTables(
            block_tables=self.block_tables,
            table_offset=full(1).zero_(),
            sink=full(1).zero_(),
            ring_blocks=full(1).zero_(),
            block_size=BLOCK_SIZE,
        )
        self.outputs = {
            "input_ids": full(NUM_ROWS, dtype=torch.int64),
            "positions": full(NUM_ROWS, dtype=torch.int64),
            "seq_lens": full(NUM_ROWS),
            "slot_mapping": full(1, NUM_ROWS, dtype=torch.int64),
            "logits_rows": full(NUM_ROWS, dtype=torch.int64),
            "block_table": full(NUM_ROWS, ROW_WIDTH),
        }
        self.output = full(NUM_ROWS, 1, dtype=torch.int64)
        self.num_output = full(NUM_ROWS)

    def run(self) -> None:
        """Scatter the upload, gather, derive tokens from a sum of the inputs, update."""
        upload, outputs = self.upload, self.outputs
        num_segments, idx_mapping = upload[:1], upload[1 : 1 + NUM_ROWS]
        segments = upload[1 + NUM_ROWS :][: 3 * MAX_SEGMENTS].view(-1, 3)
        self.ops.scatter_segments(self.state, upload, segments, num_segments)
        gathered = GatheredTokens(**outputs)
        self.ops.gather_tokens(idx_mapping, None, self.slots, self.tables, gathered, query_len=1)
        signature = outputs["input_ids"] * 31 + outputs["positions"] * 7 + outputs["seq_lens"]
        signature += outputs["slot_mapping"][0] + outputs["block_table"][:, 0]
        tokens = (signature % (VOCAB + 1) - 1)[:, None]  # sometimes -1: the row fails
        self.ops.post_update(
            idx_mapping,
            None,
            outputs["logits_rows"],
            tokens,
            self.slots,
            AppendedTokens(output=self.output, num_output=self.num_output),
            query_len=1,
        )

    def results(self) -> dict[str, list]:
        tensors = {**self.outputs, "state": self.state}
        tensors |= {"output": self.output, "num_output": self.num_output}
        return {name: tensor.tolist() for name, tensor in tensors.items()}


def _upload(generator: torch.Generator, layout: Step) -> torch.Tensor:
    """Return an upload: some slots get a new request, a few segments each; rows are drawn anew."""

    def random(low: int, high: int, size: int = 1) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    order = torch.randperm(MAX_NUM_REQS, generator=generator).tolist()
    segments, data = [], []
    first_word = 1 + NUM_ROWS + 3 * MAX_SEGMENTS

    def write(target: torch.Tensor, values: list[int] | int) -> None:
        """Stage ``values``; an int n stages n times -1."""
        dst = target.storage_offset()
        if isinstance(values, int):
            segments.append((dst, -1, values))
            return
        segments.append((dst, first_word + len(data), len(values)))
        data.extend(values)

    for slot in order[: random(0, 12)[0]]:
        length = random(1, 60)[0]
        write(layout.token_ids[slot], random(0, VOCAB, length))
        for name, value in (
            ("num_tokens", length),
            ("num_computed_tokens", length - 1),
            ("max_total_tokens", length + random(1, 30)[0]),
            ("stopped", 0),
        ):
            write(layout.vectors[name][slot], [value])
        write(layout.stop_token_ids[slot], random(0, VOCAB, 2) if slot % 2 else 2)
        write(layout.block_tables[slot], random(0, 9999, ROW_WIDTH))
    rows = [
        slot if keep else -1 for slot, keep in zip(order, random(0, 6, NUM_ROWS), strict=False)
    ]
    table = [word for segment in segments for word in segment]
    table += [1] * (3 * MAX_SEGMENTS - len(table))
    return torch.tensor([len(segments), *rows, *table, *data], dtype=torch.int32)


def test_replays_of_one_graph_equal_the_oracle_steps(device):
    generator = torch.Generator().manual_seed(0)
    step, oracle = Step(kernels, device), Step(reference, "cpu")
    for each in (step, oracle):
        each.vectors["stopped"].fill_(LENGTH)
    step.run()  # compiles, on slots that have all stopped
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    codes = set()
    for _ in range(60):
        upload = _upload(generator, oracle)
        for each in (step, oracle):
            each.upload[: len(upload)].copy_(upload)
        graph.replay()
        oracle.run()
        assert step.results() == oracle.results()
        codes.update(oracle.vectors["stopped"].tolist())
    assert codes == {RUNNING, STOP_TOKEN, LENGTH, FAILED}
