"""The example of rollouts for reinforcement learning: equal bits, and the trainer's weights."""

from __future__ import annotations

import re

import pytest
import torch

from examples import grpo_rollouts


@pytest.mark.gpu
def test_the_engine_follows_the_trainer_and_passes_give_the_same_bits(capsys, monkeypatch, device):
    monkeypatch.setattr(grpo_rollouts, "PROMPTS", ("ROMEO:",))
    means = grpo_rollouts.train(
        steps=2, group=2, max_tokens=5, learning_rate=1e-3, device=device.type
    )
    assert len(means) == 2
    assert all(0 <= mean <= 1 for mean in means)
    lines = capsys.readouterr().out.splitlines()
    # The second step's ratios are near 1 because the engine has the weights of the first.
    farthest = [float(re.search(r"differ by (.*)$", line)[1]) for line in lines]
    assert len(farthest) == 2
    assert max(farthest) < (0.3 if device.type == "cuda" else 1e-3)  # bfloat16 there


def test_a_better_answer_becomes_likelier():
    """At a ratio of 1 the gradient of the loss is that of the advantages times log-probability."""

    class Logits(torch.nn.Module):
        device = torch.device("cpu")

        def __init__(self) -> None:
            super().__init__()
            self.logits = torch.nn.Parameter(torch.zeros(5))

        def forward(self, text):
            return type("Output", (), {"logits": self.logits.expand(1, text.shape[1], 5)})

    model = Logits()
    uniform = torch.full((1,), 0.2).log()
    group = [
        grpo_rollouts.Rollout((0,), (token,), uniform, reward)
        for token, reward in ((1, 1.0), (2, 0.0))
    ]
    loss, farthest = grpo_rollouts.loss_of(model, [group])
    loss.backward()
    assert farthest < 1e-6
    better, worse = model.logits.grad[1:3].tolist()
    assert better < 0 < worse


def test_other_bits_end_the_training(monkeypatch):
    def other(llm, drawn):
        return [each.logprobs.nextafter(torch.tensor(torch.inf)) for each in drawn]

    monkeypatch.setattr(grpo_rollouts, "second_pass", other)
    with pytest.raises(RuntimeError, match="step 0: the second pass has other bits"):
        grpo_rollouts.train(steps=1, group=1, max_tokens=1, learning_rate=0, device="cpu")
