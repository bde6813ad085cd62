#!/usr/bin/env bash
# Before Triton 3.9 a tl.join in the path of one operand of tl.dot, as rotary embedding has it, changes the layout of
# both: a lane has four neighbours of bfloat16 numbers in place of two (kWidth), as of 8-bit codes that were widened.
# Tiles in shared memory are then read without ldmatrix, by twice as many loads. Where each lane has loaded just what
# its tensor core takes without a join, lanes exchange values by shuffles, unless columns are reordered. Needs no GPU.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; pip="$folder/venv/bin/python -m pip install -q --disable-pip-version-check"
$pip numpy==2.3.5
for version in 3.6.0 3.7.1 3.9.0; do $pip --no-deps --target "$folder/$version" triton==$version; done

cat > "$folder/joined.py" <<'PY'
import re, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def turned(x, ROWS: tl.constexpr, COLS: tl.constexpr, JOIN: tl.constexpr):
    """Return x after work on pairs of neighbours, or on single elements: within a lane in both cases."""
    if JOIN:
        a, b = tl.split(tl.reshape(x, [ROWS, COLS // 2, 2]))
        x = tl.reshape(tl.join(a - b, a + b), [ROWS, COLS])
    else:
        x = x + x
    return x


@triton.jit
def shared(out, x, w, JOIN: tl.constexpr, RUN: tl.constexpr):
    """Tiles of w go through shared memory, as usual."""
    row, col = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    few = tl.arange(0, 16)[:, None]
    a = turned(tl.load(x + few * 64 + col), 16, 64, JOIN)
    for tile in range(16):
        y = tl.dot(a, tl.trans(tl.load(w + (tile * 64 + row) * 64 + col)))
        tl.store(out + few * 1024 + tile * 64 + col, y)


@triton.jit
def lanes(out, x, w, JOIN: tl.constexpr, RUN: tl.constexpr):
    """A lane loads eight columns, reordered for a layout in which it has RUN neighbours at a time."""
    row, few, col = tl.arange(0, 8)[:, None], tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    y = tl.zeros((16, 8), tl.float32)
    for step in range(16):
        a = turned(tl.load(x + few * 512 + step * 32 + col), 16, 32, JOIN)
        b = tl.load(w + row * 512 + step * 32 + col)
        a = tl.permute(tl.reshape(a, [16, 4, 8 // RUN, RUN]), (0, 2, 1, 3))
        b = tl.permute(tl.reshape(b, [8, 4, 8 // RUN, RUN]), (0, 2, 1, 3))
        y = tl.dot(tl.reshape(a, [16, 32]), tl.trans(tl.reshape(b, [8, 32])), y)
    tl.store(out + few * 8 + tl.arange(0, 8)[None, :], y)


COUNTED = ("mma.sync", "ldmatrix.sync", "ld.shared", "shfl.sync")


def seen(kernel, join, run, warps):
    """Return kWidth, and how often each of COUNTED is in the loop's PTX."""
    signature = {"out": "*fp32", "x": "*bf16", "w": "*bf16", "JOIN": "constexpr", "RUN": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    source = ASTSource(kernel, signature, {(3,): join, (4,): run}, aligned)
    options = {"num_warps": warps, "num_stages": 1 if warps == 1 else 3}
    asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    ptx = asm["ptx"]
    label = re.search(r"bra\S*\s+(\$L__BB\d+_\d+);", ptx[ptx.index("mma.sync") :])[1]  # the branch back
    loop = ptx[ptx.index(f"\n{label}:") : ptx.rindex(label)]
    (width,) = set(re.findall(r"kWidth = (\d+)", asm["ttgir"]))
    return int(width), *(loop.count(name) for name in COUNTED)


print("triton", triton.__version__)
found = {}
for kernel, run, warps in ((shared, 2, 4), (lanes, 2, 1), (lanes, 4, 1)):
    for join in (False, True):
        found[kernel.__name__, run, join] = width, *counts = seen(kernel, join, run, warps)
        what = kernel.__name__ if kernel is shared else f"lanes, runs of {run}"
        print(f"{what:16} {'join' if join else '':4} kWidth {width} ", *(f"{n} {c};" for n, c in zip(COUNTED, counts)))
# Two ld.shared of the first kernel are the result's on its way to the store.
two = {("shared", 2): (2, 8, 8, 2, 0), ("lanes", 2): (2, 2, 0, 0, 0), ("lanes", 4): (2, 2, 0, 0, 12)}
four = {("shared", 2): (4, 8, 0, 18, 0), ("lanes", 2): (4, 2, 0, 0, 12), ("lanes", 4): (4, 2, 0, 0, 0)}
joined = two if triton.__version__ == "3.9.0" else four
sys.exit(found != {(*key, join): row for join in (False, True) for key, row in (joined if join else two).items()})
PY
for version in 3.6.0 3.7.1 3.9.0; do
    TRITON_CACHE_DIR="$folder/cache-$version" PYTHONPATH="$folder/$version" \
        "$folder/venv/bin/python" "$folder/joined.py" 2> "$folder/stderr" ||
        { tail "$folder/stderr"; echo "the behaviour has changed"; exit 1; }
done
