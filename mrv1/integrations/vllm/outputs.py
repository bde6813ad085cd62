"""The result of a step as vLLM's scheduler reads it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from vllm.v1.outputs import (
    AsyncModelRunnerOutput,
    KVConnectorOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)

from mrv1.integrations.vllm.requests import Step
from mrv1.runner import AsyncOutput, StepOutput, TokenLogprobs

logger = logging.getLogger(__name__)

FAILED_TOKEN = 0
"""What a row without a token reports: vLLM waits for a token of each row that draws."""


class StepResult(AsyncModelRunnerOutput):  # type: ignore[misc]
    """A launched step; ``get_output`` waits for it, in whichever thread vLLM calls it."""

    def __init__(
        self, step: Step, output: AsyncOutput, transferred: KVConnectorOutput | None
    ) -> None:
        self._step, self._output, self._transferred = step, output, transferred

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step's tokens and log-probabilities; StepError if a kernel failed."""
        output = runner_output(self._step, self._output.result())
        output.kv_connector_output = self._transferred
        return output

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """Return what a KV connector said of the step, also if the step failed."""
        return self._transferred


def runner_output(step: Step, output: StepOutput) -> ModelRunnerOutput:
    """Return a step's result in vLLM's form."""
    tokens = [*map(list, output.token_ids)]
    failed_again = not all(tokens) and any(known.has_failed for known in step.requests)
    failed = _fail_rows(step, output, tokens) if output.errors or failed_again else None
    return ModelRunnerOutput(
        req_ids=step.req_ids,
        req_id_to_index=step.rows,
        sampled_token_ids=tokens,
        logprobs=_logprobs(output.logprobs, len(tokens)) if output.logprobs else None,
        prompt_logprobs_dict=_prompt_logprobs(step, output),
        num_nans_in_logits=failed,
    )


def _fail_rows(step: Step, output: StepOutput, tokens: list[list[int]]) -> dict[str, int]:
    """Give each row that failed, now or before, an arbitrary token; return which rows did.

    vLLM's worker can end no request with an error; ``num_nans_in_logits`` counts it.
    """
    found = {}
    for row in step.samples.nonzero()[0].tolist():
        if tokens[row]:
            continue
        known, req_id = step.requests[row], step.req_ids[row]
        if not known.has_failed:
            known.has_failed = True
            logger.error(
                "request %s: expected a token, got none, because %s; its tokens are %d from here",
                req_id, output.errors.get(row, "it has stopped"), FAILED_TOKEN,
            )  # fmt: skip
        tokens[row] = [FAILED_TOKEN]
        found[req_id] = 1
    return found


def _logprobs(reports: Mapping[int, TokenLogprobs], num_rows: int) -> LogprobsLists:
    """Return a line for each row; vLLM reads those of rows that asked, as far as they asked."""
    width = max(report.token_ids.shape[1] for report in reports.values())
    token_ids = np.zeros((num_rows, width), dtype=np.int32)
    logprobs = np.full((num_rows, width), -np.inf, dtype=np.float32)
    ranks = np.zeros(num_rows, dtype=np.int32)
    for row, report in reports.items():
        count = report.token_ids.shape[1]
        token_ids[row, :count] = report.token_ids[0]
        logprobs[row, :count] = report.logprobs[0]
        ranks[row] = report.ranks[0, 0]
    return LogprobsLists(token_ids, logprobs, ranks)


def _prompt_logprobs(step: Step, output: StepOutput) -> dict[str, LogprobsTensors]:
    """Collect the log-probabilities of prompts; return those of prompts that are complete."""
    for row, report in output.prompt_logprobs.items():
        step.prompt_logprobs[row].append(report)
    found = {}
    for row, parts in step.prompt_logprobs.items():
        if parts and step.samples[row]:
            found[step.req_ids[row]] = _joined(parts)
            parts.clear()
    return found


def _joined(parts: Sequence[TokenLogprobs]) -> LogprobsTensors:
    token_ids = np.concatenate([part.token_ids for part in parts])
    logprobs = np.concatenate([part.logprobs for part in parts])
    ranks = np.concatenate([part.ranks[:, 0] for part in parts])
    return LogprobsTensors(
        logprob_token_ids=torch.from_numpy(token_ids.astype(np.int32)),
        logprobs=torch.from_numpy(logprobs.astype(np.float32)),
        selected_token_ranks=torch.from_numpy(ranks.astype(np.int32)),
    )
