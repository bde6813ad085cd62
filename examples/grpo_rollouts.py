"""Reinforcement learning with mrv1's rollouts, in plain torch: GRPO on the embedded model.

    python examples/grpo_rollouts.py --steps 20

Each step draws several answers to every prompt, scores them, gives the memory to the trainer,
takes a step of gradient descent towards the answers that were better than the others of their
prompt, and gives the engine the new weights, without a new process. With ``deterministic`` the
log-probabilities that came with the tokens are those of a second pass over the whole texts, bit by
bit: the trainer's ratios begin with what was drawn, not with what another kernel says of it. On a
CPU, whose library adds in an order that depends on the number of tokens, the engine is in float64
for that, and slow.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrv1 import LLM, SamplingParams
from mrv1.config import checkpoint_dir

PROMPTS = ("ROMEO:\n", "JULIET:\n", "FRIAR LAURENCE:\n", "NURSE:\n")
CLIP = 0.2  # of the ratio of new to old probabilities


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer to a prompt."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: torch.Tensor  # of each of ``tokens``, [tokens] float32, as they were drawn
    reward: float


def reward(text: str) -> float:
    """Score a text: this example wants short lines, of 10 characters or fewer."""
    return min(10 * text.count("\n") / (1 + len(text)), 1.0)


def rollouts(llm: LLM, group: int, max_tokens: int, seed: int) -> list[list[Rollout]]:
    """Return ``group`` answers to each prompt, with the log-probabilities of their tokens."""
    params = SamplingParams(n=group, max_tokens=max_tokens, seed=seed, logprobs=0)
    return [
        [
            Rollout(
                output.prompt_token_ids,
                each.token_ids,
                _of_tokens(each.logprobs, each.token_ids),
                reward(each.text),
            )
            for each in output.outputs
        ]
        for output in llm.generate(list(PROMPTS), params, use_tqdm=False)
    ]


def second_pass(llm: LLM, drawn: list[Rollout]) -> list[torch.Tensor]:
    """Return the log-probabilities of the answers' tokens as one pass over each text has them."""
    texts = [{"prompt_token_ids": [*each.prompt, *each.tokens]} for each in drawn]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(texts, params, use_tqdm=False)
    return [
        _of_tokens(output.prompt_logprobs[len(each.prompt) :], each.tokens)
        for output, each in zip(outputs, drawn, strict=True)
    ]


def _of_tokens(logprobs: object, tokens: tuple[int, ...]) -> torch.Tensor:
    values = [found[token].logprob for found, token in zip(logprobs, tokens, strict=True)]
    return torch.tensor(values, dtype=torch.float32)


def loss_of(model: PreTrainedModel, groups: list[list[Rollout]]) -> tuple[torch.Tensor, float]:
    """Return GRPO's clipped loss, and how far the ratio of trainer to engine is from 1 at most.

    A reward counts by its distance from those of the same prompt. Before the first step of
    descent a ratio is 1 but for dtype and kernels, in which trainer and engine differ.
    """
    losses, farthest = [], 0.0
    for group in groups:
        rewards = torch.tensor([each.reward for each in group])
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
        for each, advantage in zip(group, advantages.tolist(), strict=True):
            text = torch.tensor([[*each.prompt, *each.tokens]], device=model.device)
            logits = model(text).logits[0, len(each.prompt) - 1 : -1].float()
            new = logits.log_softmax(-1).gather(-1, text[0, len(each.prompt) :, None])[:, 0]
            ratio = (new - each.logprobs.to(new.device)).exp()
            farthest = max(farthest, float((ratio.detach() - 1).abs().max()))
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            losses.append(-torch.minimum(ratio * advantage, clipped * advantage).mean())
    return torch.stack(losses).mean(), farthest


def train(
    *, steps: int, group: int, max_tokens: int, learning_rate: float, device: str = "auto"
) -> list[float]:
    """Train; return the mean reward of each step's rollouts."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float64"
    model = AutoModelForCausalLM.from_pretrained(checkpoint_dir("tiny"), dtype=torch.float32)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    means = []
    options = {
        "num_kv_blocks": 1024,
        # CUDA graphs are captured after each sleep: no more sizes than are needed.
        "max_num_seqs": len(PROMPTS) * group,
        "max_num_batched_tokens": 2048,
    }
    with LLM("tiny", device=device, dtype=dtype, deterministic=True, **options) as llm:
        for step in range(steps):
            groups = rollouts(llm, group, max_tokens, seed=step)
            drawn = [each for group in groups for each in group]
            for each, again in zip(drawn, second_pass(llm, drawn), strict=True):
                if not torch.equal(each.logprobs, again):
                    raise RuntimeError(f"step {step}: the second pass has other bits")
            llm.sleep(level=2)  # the trainer has the memory; the weights will be others anyway
            loss, farthest = loss_of(model, groups)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            llm.wake_up(["weights"])
            llm.update_weights(model.named_parameters())
            llm.wake_up(["kv_cache"])
            means.append(sum(each.reward for each in drawn) / len(drawn))
            print(
                f"step {step}: reward {means[-1]:.3f}, {len(drawn)} rollouts, each with the bits "
                f"of a second pass; trainer and engine differ by {farthest:.1e}"
            )
    return means


def main() -> None:
    """Train the embedded model to write short lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
