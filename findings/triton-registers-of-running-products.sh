#!/usr/bin/env bash
# On Hopper, the left operand of a product that a kernel has computed, such as int8 weights widened to bfloat16, stays
# in registers. In a pipelined loop Triton leaves some of these wgmma running at the end of a step, and their operands
# are dead to it: machine code of the next step overwrites the registers before it waits. The PTX manual calls that
# undefined. Results are wrong now and then. Needs no GPU: the script reads the machine code.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; pip="$folder/venv/bin/python -m pip install -q --disable-pip-version-check"
$pip numpy==2.3.5
for version in 3.6.0 3.7.1; do $pip --no-deps --target "$folder/$version" triton==$version; done

cat > "$folder/widened.py" <<'PY'
import re, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def product(out, x, w, K: tl.constexpr, TILE: tl.constexpr):
    """out = w @ x.T, of int8 weights that are widened in registers."""
    row, col, k = tl.arange(0, 128)[:, None], tl.arange(0, 128)[:, None], tl.arange(0, TILE)[None, :]
    y = tl.zeros((128, 128), tl.float32)
    for first in range(0, K, TILE):
        weight = tl.load(w + row * K + first + k).to(tl.bfloat16)
        y = tl.dot(weight, tl.trans(tl.load(x + col * K + first + k)), y)
    tl.store(out + row * 128 + tl.arange(0, 128)[None, :], y)


def loop_of(sass):
    """Return the instructions from the target of a branch back to the branch, with a product between."""
    lines = [line.partition("\t")[2].strip() or line.strip() for line in sass.splitlines()]
    for at, line in enumerate(lines):
        branch = re.search(r"\bBRA (\w+)", line)
        if branch and f"{branch[1]}:" in lines[:at]:
            loop = lines[lines.index(f"{branch[1]}:") : at]
            if any("HGMMA" in each for each in loop):
                return loop
    raise SystemExit("no loop with a product")


signature = {"out": "*fp32", "x": "*bf16", "w": "*i8", "K": "constexpr", "TILE": "constexpr"}
aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
source = ASTSource(product, signature, {(3,): 4096, (4,): 64}, aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})
loop = loop_of(compiled.asm["sass"])
running, group = [], set()  # the left operands of groups of products that may still run
for line in loop:
    if operands := re.search(r"HGMMA\S* R\d+, R(\d+),", line):
        group |= set(range(int(operands[1]), int(operands[1]) + 4))
    if operands and "gsb0" in line:
        running, group = [*running, group], set()
    if wait := re.search(r"WARPGROUP.DEPBAR.LE gsb0, 0x(\d+)", line):
        running = running[max(0, len(running) - int(wait[1])) :]
left = set().union(*running)
overwriting = []
for line in loop:
    if "WARPGROUP.DEPBAR" in line:
        break
    written = re.match(r"(?:@!?U?P\d+ )?(?!ST|LDGSTS)[A-Z][\w.]* R(\d+)\b", line)
    if written and int(written[1]) in left:
        overwriting.append(line)
print("triton", triton.__version__, "- a step leaves", len(running), "groups of products running")
print("  which read", " ".join(f"R{each}" for each in sorted(left)))
print("  and the next step writes these before it waits:", *(f"\n    {each}" for each in overwriting[:3]))
sys.exit(not overwriting)
PY
for version in 3.6.0 3.7.1; do
    TRITON_CACHE_DIR="$folder/cache-$version" PYTHONPATH="$folder/$version" \
        "$folder/venv/bin/python" "$folder/widened.py" 2> "$folder/stderr" ||
        { tail "$folder/stderr"; echo "the behaviour has changed"; exit 1; }
done
