"""The benchmark of losses by type of the KV cache, against transformers."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.kv_cache_loss import cpu_name, main
from mrv1.config import checkpoint_dir
from training.corpus import load_split


def test_a_record_holds_transformers_losses_and_each_caches_over_them(tmp_path):
    path = tmp_path / "loss.json"
    options = "--model tiny --repeats 3 --length 40 --device cpu --commit c"
    main([str(path), *options.split()])
    record = json.loads(path.read_text("utf-8"))
    assert record["conditions"]["cpu"].startswith(cpu_name())
    auto, fp8, int4 = record["results"]
    assert [each["kv_dtype"] for each in (auto, fp8, int4)] == ["auto", "fp8_e4m3", "int4"]
    folder = checkpoint_dir("tiny")
    ids = AutoTokenizer.from_pretrained(folder).encode(load_split()[1])[: 3 * 40]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for row, loss in zip(torch.tensor(ids).view(3, 40), auto["losses"], strict=True):
        with torch.no_grad():
            assert loss == pytest.approx(model(row[None], labels=row[None]).loss.item(), abs=1e-4)
    for each in (fp8, int4):
        mean, low, high = each["of_auto"]
        assert low <= mean <= high
        assert mean == pytest.approx(sum(each["losses"]) / sum(auto["losses"]), abs=1e-4)
        assert each["losses"] != auto["losses"]
    assert auto["of_auto"] == [1, 1, 1]
    assert auto["token_bytes"] > fp8["token_bytes"] > int4["token_bytes"]


def test_losses_are_over_that_of_exact_values(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "loss.json"), "--kv-dtypes", "int4"])
    assert "expected 'auto' first, got 'int4'" in capsys.readouterr().err
