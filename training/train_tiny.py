"""Train the weights of the embedded ``tiny`` checkpoint.

Run ``python -m training.train_tiny --out DIR`` from the repository root; see training/README.md.
Writes ``model.safetensors`` (bfloat16) and ``tiny_model.json`` (every figure) to ``DIR``.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from training.batches import Batch, BatchStream, Mixture, loader
from training.corpus import CHECKPOINT_DIR, END_OF_TEXT, EncodedText, encode, load_split
from training.evaluate import Logits, bits_per_byte, recall_accuracy, text_loss
from training.model import TinyModel
from training.recall import NUM_DISTRACTORS, RECALLED, REPEATED, TEXT, RecallVocabulary

_LOG = logging.getLogger("train_tiny")
LOSS_NAMES = {TEXT: "text_loss", RECALLED: "recall_loss", REPEATED: "repeat_loss"}
RECALL_TARGET = 0.99  # below it, recall decides between checkpoints more than text loss
EVAL_SEED_OFFSET = 1_000_003  # the trials that pick a checkpoint differ from the reported trials


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Hyperparameters; every field is a command-line option of the same name."""

    out: str = "build/tiny"
    """Directory for the results."""
    device: str = "cuda"
    """Torch device."""
    seed: int = 0
    """Seed of initialisation, dropout and data."""
    steps: int = 2600
    """Optimizer steps of the whole schedule."""
    max_minutes: float = 5.0
    """Time limit: it shortens the schedule, never the final evaluation."""
    reserve_seconds: float = 45.0
    """Part of the time limit kept for the final evaluation."""
    num_tokens: int = 2048
    """Tokens of context per row."""
    text_rows: int = 4
    """Rows of plain text per batch."""
    recall_rows: int = 20
    """Rows of recall per batch (of recall and repetition together in the first steps)."""
    first_repeat_rows: int = 12
    """Rows of repeated random tokens per batch in the first steps."""
    repeat_rows: int = 2
    """Rows of repeated random tokens per batch afterwards."""
    near_steps: int = 1000
    """Steps of the first stage: near questions and short repetitions form the copying heads."""
    near_distance: int = 96
    """Longest distance of the first stage, in tokens."""
    dense_steps: int = 800
    """Steps of the second stage: every distance, still dense."""
    recall_text_fraction: float = 0.1
    """Fraction of recall rows that also train their running text."""
    text_weight: float = 1.0
    """Weight of the mean loss of plain text."""
    recall_weight: float = 1.0
    """Weight of the mean loss of recalled values."""
    structure_weight: float = 0.05
    """Weight of the mean loss of the recall lines' punctuation."""
    repeat_weight: float = 0.5
    """Weight of the mean loss of repeated random tokens."""
    lr: float = 2e-3
    """Peak learning rate."""
    min_lr_fraction: float = 0.02
    """Last learning rate over the peak."""
    warmup_steps: int = 200
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """AdamW weight decay of matrices."""
    dropout: float = 0.3
    """Dropout of the embedding and the residual branches."""
    merge_dropout: float = 0.1
    """BPE-dropout of the randomised tokenisations."""
    num_tokenisations: int = 16
    """Randomised tokenisations of the corpus; as many rows use the canonical tokenisation."""
    ema: float = 0.998
    """Decay of the averaged weights, which are measured and saved."""
    eval_every: int = 250
    """Steps between measurements."""
    eval_trials: int = 256
    """Recall trials per distance in a measurement during training."""
    final_trials: int = 1024
    """Recall trials per distance at the end."""
    eval_rows: int = 32
    """Rows per forward pass of a measurement."""
    eval_distances: str = "256,1024,1900"
    """Distances measured during training, in tokens."""
    final_distances: str = "128,256,512,1024,1536,1900"
    """Distances measured at the end, in tokens."""
    workers: int = 5
    """Processes that make batches."""
    compile: int = 1
    """1: run the training step through torch.compile."""

    @classmethod
    def parse(cls, arguments: list[str]) -> Options:
        """Read options from the command line."""
        parser = argparse.ArgumentParser(description=__doc__)
        for field in dataclasses.fields(cls):
            name = "--" + field.name.replace("_", "-")
            parser.add_argument(name, type=type(field.default), default=field.default)
        return cls(**vars(parser.parse_args(arguments)))


class Evaluator:
    """Measures a model on the held-out text."""

    def __init__(self, options: Options, tokenizer: Tokenizer, text: str) -> None:
        """Tokenise the held-out ``text``."""
        self.options = options
        self.device = torch.device(options.device)
        self.ids = encode(tokenizer, text).ids
        self.num_bytes = len(text.encode())
        self.vocabulary = RecallVocabulary.from_tokenizer(tokenizer)

    def text_loss(self, logits_of: Logits) -> float:
        """Return nats per token."""
        options = self.options
        return text_loss(logits_of, self.ids, options.num_tokens, options.eval_rows, self.device)

    def recall(
        self, logits_of: Logits, distances: str, num_trials: int, seed: int
    ) -> dict[str, float]:
        """Return the accuracy by distance."""
        return {
            distance: recall_accuracy(
                logits_of,
                self.vocabulary,
                self.ids,
                distance=int(distance),
                num_trials=num_trials,
                num_tokens=self.options.num_tokens,
                rows=self.options.eval_rows,
                seed=seed,
                device=self.device,
            )
            for distance in distances.split(",")
        }


class Trainer:
    """The training loop and its state: model, averaged model, optimizer, best checkpoint."""

    def __init__(self, options: Options, config: Qwen3Config, evaluator: Evaluator) -> None:
        """Initialise everything from ``options.seed``."""
        self.options = options
        self.evaluator = evaluator
        self.device = torch.device(options.device)
        torch.manual_seed(options.seed)
        self.model = TinyModel(config, dropout=options.dropout).to(self.device)
        self.average = copy.deepcopy(self.model).eval().requires_grad_(requires_grad=False)
        self.forward = torch.compile(self.model) if options.compile else self.model
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() != 2]
        parameter_groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            parameter_groups,
            lr=options.lr,
            betas=(0.9, 0.98),
            weight_decay=options.weight_decay,
            fused=True,
        )
        weights = {
            TEXT: options.text_weight,
            RECALLED: options.recall_weight,
            REPEATED: options.repeat_weight,
        }
        self.loss_weights = torch.full((5,), options.structure_weight, device=self.device)
        self.loss_weights[0] = 0.0
        for target, weight in weights.items():
            self.loss_weights[target] = weight
        self.curve: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {"score": math.inf}

    def autocast(self) -> torch.autocast:
        """Return the mixed-precision context (bfloat16 on a GPU, none on a CPU)."""
        is_cuda = self.device.type == "cuda"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_cuda)

    def averaged_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the averaged model's logits."""
        with self.autocast():
            logits: torch.Tensor = self.average(input_ids)
        return logits

    def losses(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss of every kind of target, [5]."""
        tokens, targets = (part.to(self.device, non_blocking=True) for part in batch)
        with self.autocast():
            logits = self.forward(tokens[:, :-1])
        per_token = functional.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        kinds = torch.arange(5, device=self.device, dtype=torch.uint8)[:, None]
        chosen = (targets[:, 1:].flatten() == kinds).float()
        return (chosen @ per_token) / chosen.sum(dim=1).clamp_min(1.0)

    def step(self, batch: Batch, step: int, progress: float) -> torch.Tensor:
        """Take one optimizer step; return its losses, still on the device."""
        learning_rate = self.learning_rate(step, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        losses = self.losses(batch)
        (losses * self.loss_weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        keep = min(self.options.ema, (1 + step) / (10 + step))
        with torch.no_grad():
            averaged = [p.data for p in self.average.parameters()]
            torch._foreach_lerp_(averaged, [p.data for p in self.model.parameters()], 1.0 - keep)
        return losses.detach()

    def learning_rate(self, step: int, progress: float) -> float:
        """Return the rate at ``progress`` in [0, 1]: linear warm-up, then a cosine."""
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
        floor = self.options.min_lr_fraction
        warm = min(1.0, (step + 1) / self.options.warmup_steps)
        return self.options.lr * warm * (floor + (1.0 - floor) * cosine)

    def train(self, stream: BatchStream, started: float) -> dict[str, Any]:
        """Run the schedule until its steps or the time are spent; return how it ended."""
        options = self.options
        seconds = options.max_minutes * 60 - options.reserve_seconds
        batches = loader(
            stream, num_workers=options.workers, pin_memory=self.device.type == "cuda"
        )
        loop_started = time.monotonic()
        window = torch.zeros(5, device=self.device)
        since = step = 0
        progress = 0.0
        while progress < 1.0:
            used = (time.monotonic() - loop_started) / (seconds - (loop_started - started))
            progress = max(step / options.steps, used)
            window += self.step(next(batches), step, progress)
            step += 1
            since += 1
            if step % options.eval_every == 0 or progress >= 1.0 or step == options.steps:
                self.measure(step, progress, window / since, time.monotonic() - loop_started)
                window.zero_()
                since = 0
            if step == options.steps:
                break
        return {
            "steps": step,
            "planned_steps": options.steps,
            "train_seconds": round(time.monotonic() - loop_started, 1),
        }

    def measure(self, step: int, progress: float, losses: torch.Tensor, seconds: float) -> None:
        """Measure the averaged model, extend the curve, and keep it if it is the best so far."""
        options = self.options
        trained = {name: round(float(losses[kind]), 4) for kind, name in LOSS_NAMES.items()}
        validation_loss = self.evaluator.text_loss(self.averaged_logits)
        recall = self.evaluator.recall(
            self.averaged_logits,
            options.eval_distances,
            options.eval_trials,
            options.seed + EVAL_SEED_OFFSET,
        )
        entry = {
            "step": step,
            "seconds": round(seconds, 1),
            "lr": self.learning_rate(step, progress),
            **trained,
            "validation_loss": round(validation_loss, 4),
            "recall": {distance: round(value, 4) for distance, value in recall.items()},
        }
        self.curve.append(entry)
        _LOG.info("%s", json.dumps(entry))
        missing = sum(max(0.0, RECALL_TARGET - value) for value in recall.values())
        score = validation_loss + 10.0 * missing
        if score < self.best["score"]:
            state = {
                name: tensor.detach().to("cpu", torch.bfloat16, copy=True)
                for name, tensor in self.average.state_dict().items()
            }
            self.best = {"score": score, "step": step, "state": state}


def build_stream(options: Options, tokenizer: Tokenizer, text: str) -> BatchStream:
    """Tokenise the training text and describe the batches."""
    randomised = [
        encode(tokenizer, text, merge_dropout=options.merge_dropout)
        for _ in range(options.num_tokenisations)
    ]
    texts: list[EncodedText] = randomised + [encode(tokenizer, text)] * max(1, len(randomised))
    dense = Mixture(
        text_rows=options.text_rows,
        recall_rows=options.recall_rows + options.repeat_rows - options.first_repeat_rows,
        repeat_rows=options.first_repeat_rows,
        min_lines=options.num_tokens // 24,
        max_lines=options.num_tokens // 12,
        max_distance=options.num_tokens,
    )
    near = dataclasses.replace(dense, max_distance=options.near_distance)
    sparse = Mixture(
        text_rows=options.text_rows,
        recall_rows=options.recall_rows,
        repeat_rows=options.repeat_rows,
        min_lines=8,
        max_lines=options.num_tokens // 20,
        max_distance=options.num_tokens,
        recall_text_fraction=options.recall_text_fraction,
    )
    return BatchStream(
        texts,
        RecallVocabulary.from_tokenizer(tokenizer),
        stages=(
            (0, near),
            (options.near_steps, dense),
            (options.near_steps + options.dense_steps, sparse),
        ),
        vocab_size=tokenizer.get_vocab_size(),
        num_tokens=options.num_tokens,
        end_of_text=tokenizer.get_vocab()[END_OF_TEXT],
        seed=options.seed,
    )


def final_figures(
    options: Options, config: Qwen3Config, evaluator: Evaluator, state: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Measure the saved bfloat16 weights with transformers' own model, computing in float32."""
    reference = Qwen3ForCausalLM(config).to(evaluator.device, torch.float32).eval()
    missing, unexpected = reference.load_state_dict(state, strict=False)
    if unexpected or missing not in ([], ["lm_head.weight"]):
        raise RuntimeError(f"state: expected Qwen3ForCausalLM's names, got {missing, unexpected}")
    reference.tie_weights()

    def logits_of(input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = reference(input_ids=input_ids, use_cache=False).logits
        return logits

    ours = TinyModel(config).to(evaluator.device).eval()
    ours.load_state_dict(state)
    sample = torch.from_numpy(evaluator.ids[None, : options.num_tokens]).to(evaluator.device)
    with torch.inference_mode():
        difference = float((logits_of(sample) - ours(sample)).abs().max())
    loss = evaluator.text_loss(logits_of)
    accuracy = evaluator.recall(
        logits_of, options.final_distances, options.final_trials, options.seed
    )
    return {
        "validation": {
            "loss_nats_per_token": round(loss, 4),
            "bits_per_byte": round(
                bits_per_byte(loss, len(evaluator.ids), evaluator.num_bytes), 4
            ),
            "num_tokens": len(evaluator.ids),
            "num_bytes": evaluator.num_bytes,
        },
        "recall": {
            "trials_per_distance": options.final_trials,
            "distractors": NUM_DISTRACTORS,
            "accuracy": accuracy,
        },
        "max_logit_difference_to_training_model": difference,
    }


def environment(device: torch.device) -> dict[str, str]:
    """Name the device and the versions a result depends on."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def main(arguments: list[str]) -> None:
    """Train, save the best checkpoint, and report on it."""
    started = time.monotonic()
    options = Options.parse(arguments)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    config = Qwen3Config.from_pretrained(CHECKPOINT_DIR)
    tokenizer = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
    train_text, held_out_text = load_split()
    evaluator = Evaluator(options, tokenizer, held_out_text)
    trainer = Trainer(options, config, evaluator)
    stream = build_stream(options, tokenizer, train_text)
    _LOG.info("set up in %.1f s", time.monotonic() - started)
    ended = trainer.train(stream, started)
    save_file(trainer.best["state"], out / "model.safetensors", metadata={"format": "pt"})
    rows = options.text_rows + options.recall_rows + options.repeat_rows
    results = {
        "seed": options.seed,
        **ended,
        "selected_step": trainer.best["step"],
        "tokens_seen": ended["steps"] * rows * options.num_tokens,
        "num_parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        **final_figures(options, config, evaluator, trainer.best["state"]),
        "environment": environment(trainer.device),
        "hyperparameters": {
            name: value
            for name, value in dataclasses.asdict(options).items()
            if name not in ("out", "device")
        },
        "curve": trainer.curve,
    }
    (out / "tiny_model.json").write_text(json.dumps(results, indent=1) + "\n")
    for name in ("seed", "steps", "selected_step", "train_seconds", "validation", "recall"):
        _LOG.info("%-14s %s", name, results[name])
    _LOG.info("whole run %.1f s", time.monotonic() - started)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    main(sys.argv[1:])
