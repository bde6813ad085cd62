#!/usr/bin/env bash
# A float32 product of two 16-bit values that a kernel rounds with .to(tl.float16) before it adds a third is not rounded.
# LLVM narrows product and sum to 16 bits, which alone would give the same numbers, and then fuses them into one
# instruction, which rounds once. The default fusion of a product and a sum is known; here a cast stands between them in
# the source, and in Triton's own IR. enable_fp_fusion=False keeps the cast. bfloat16 is alike. Needs no GPU: the
# script reads the PTX, and computes what both orders of rounding give.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; pip="$folder/venv/bin/python -m pip install -q --disable-pip-version-check"
$pip numpy==2.3.5
for version in 3.6.0 3.7.1 3.9.0; do $pip --no-deps --target "$folder/$version" triton==$version; done

cat > "$folder/rounded.py" <<'PY'
import re, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def rounded(out, a, b, c, DTYPE: tl.constexpr):
    """out = round(a * b) + c."""
    i = tl.arange(0, 128)
    product = tl.load(a + i).to(tl.float32) * tl.load(b + i).to(tl.float32)
    product = product.to(DTYPE)  # the rounding that gets lost
    tl.store(out + i, (product.to(tl.float32) + tl.load(c + i).to(tl.float32)).to(DTYPE))


@triton.jit
def by_fma(out, a, b, c, DTYPE: tl.constexpr):
    """The same, with a product that LLVM leaves in 32 bits."""
    i = tl.arange(0, 128)
    zeros = tl.zeros((128,), tl.float32)
    product = tl.fma(tl.load(a + i).to(tl.float32), tl.load(b + i).to(tl.float32), zeros).to(DTYPE)
    tl.store(out + i, (product.to(tl.float32) + tl.load(c + i).to(tl.float32)).to(DTYPE))


def arithmetic(kernel, short, dtype, fusion):
    """Return how often Triton's IR rounds before the sum, and the instructions of the PTX."""
    signature = dict.fromkeys(("out", "a", "b", "c"), f"*{short}") | {"DTYPE": "constexpr"}
    options = {"num_warps": 4, "enable_fp_fusion": fusion}
    compiled = triton.compile(ASTSource(kernel, signature, {(4,): dtype}), target=GPUTarget("cuda", 90, 32), options=options)
    rounds = compiled.asm["ttgir"].partition("arith.addf")[0].count("arith.truncf")
    return rounds, re.findall(r"\b(?:fma|mul|add|cvt)\.(?:rn\.)?b?f\S+", compiled.asm["ptx"])


print("triton", triton.__version__)
lost = True
for short, dtype in (("fp16", tl.float16), ("bf16", tl.bfloat16)):
    for kernel, fusion in ((rounded, True), (rounded, False), (by_fma, True)):
        rounds, ptx = arithmetic(kernel, short, dtype, fusion)
        print(f"  {short}, {kernel.__name__}, enable_fp_fusion={fusion}: {rounds} rounding before the sum in TTGIR; PTX:", *ptx)
        one = len(ptx) == 1 and ptx[0].startswith("fma.rn")
        lost &= rounds == 1 and one == (kernel is rounded and fusion)
sys.exit(not lost)
PY
for version in 3.6.0 3.7.1 3.9.0; do
    TRITON_CACHE_DIR="$folder/cache-$version" PYTHONPATH="$folder/$version" \
        "$folder/venv/bin/python" "$folder/rounded.py" 2> "$folder/stderr" ||
        { tail "$folder/stderr"; echo "the behaviour has changed"; exit 1; }
done
"$folder/venv/bin/python" - <<'PY'
import numpy as np

a = b = np.float16(1 + 2**-10)
c = -(a * b)  # numpy rounds each product to float16
kept = np.float16(np.float16(np.float32(a) * np.float32(b)) + c)
once = np.float16(np.float64(a) * np.float64(b) + np.float64(c))
print(f"float16: {a} * {b} + {c} is {kept} as the source says, and {once:.3g} rounded once")
rng = np.random.default_rng(0)
a, b, c = rng.standard_normal((3, 1_000_000)).astype(np.float16)
kept = (a.astype(np.float32) * b.astype(np.float32)).astype(np.float16).astype(np.float32) + c.astype(np.float32)
once = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
differ = kept.astype(np.float16) != once.astype(np.float16)
print(f"of a million normal triples {differ.mean():.0%} differ")
PY
