"""Batch inference over many GPUs, or many machines: Ray Data runs one mrv1 engine in each actor.

    python examples/ray_batch.py prompts.jsonl outputs --model Qwen/Qwen3-0.6B --engines 8

Every line of the JSONL file has a ``prompt``; other columns are kept. Each output line has the
generated ``text`` too, or an ``error`` if mrv1 refused this request. Needs ray[data].
"""

from __future__ import annotations

import argparse
from typing import Any

from mrv1 import LLM, SamplingParams


class Generator:
    """One engine. Ray makes it once in every actor, and passes it one batch after the other."""

    def __init__(self, model: str, options: dict[str, Any], max_tokens: int) -> None:
        """Load the model.

        Args:
            model: as for ``LLM``.
            options: other options of ``LLM``.
            max_tokens: tokens to generate for each prompt.
        """
        self.llm = LLM(model, **options)
        self.params = SamplingParams(temperature=0, max_tokens=max_tokens)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with a text and an error for every prompt; "" = none."""
        outputs = self.llm.generate(batch["prompt"].tolist(), self.params, use_tqdm=False)
        batch["text"] = [output.outputs[0].text for output in outputs]
        batch["error"] = [str(output.error or "") for output in outputs]
        return batch


def main() -> None:
    """Read the prompts, generate, write the outputs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", help="JSONL file, or a folder of them")
    parser.add_argument("outputs", help="folder for JSONL files")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--engines", type=int, default=1, help="actors, one engine each")
    parser.add_argument("--gpus", type=float, default=1, help="GPUs of each engine; 0 = its CPU")
    parser.add_argument("--cpus", type=float, default=1, help="cores of each; leave some to Ray")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=512, help="prompts of a call")
    arguments = parser.parse_args()
    import ray.data  # after --help, which needs no Ray

    rows = ray.data.read_json(arguments.prompts)
    rows = rows.map_batches(
        Generator,
        fn_constructor_kwargs={
            "model": arguments.model,
            "options": {"dtype": arguments.dtype},
            "max_tokens": arguments.max_tokens,
        },
        compute=ray.data.ActorPoolStrategy(size=arguments.engines),
        num_gpus=arguments.gpus,
        num_cpus=arguments.cpus,
        batch_size=arguments.batch_size,
    )
    rows.write_json(arguments.outputs)


if __name__ == "__main__":
    main()
