#!/usr/bin/env bash
# Before 3.9 a literal -0.0 in a Triton kernel is +0.0, in tl.full, tl.store and other= alike: the neutral element of an
# addition that keeps the sign of zeros cannot be written as a literal. A product with -1.0 keeps it. Needs no GPU.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; pip="$folder/venv/bin/python -m pip install -q --disable-pip-version-check"
$pip numpy==2.3.5
for version in 3.7.1 3.9.0; do $pip --no-deps --target "$folder/$version" triton==$version; done

cat > "$folder/zero.py" <<'PY'
import re, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def kernel(out, HOW: tl.constexpr):
    if HOW == "store":
        tl.store(out, -0.0)
    elif HOW == "full":
        tl.store(out, tl.full((), -0.0, tl.float32))
    elif HOW == "product":
        tl.store(out, tl.full((), 0.0, tl.float32) * -1.0)
    else:
        tl.store(out, tl.load(out, mask=tl.program_id(0) < 0, other=-0.0))


def bits(how):
    """The number that is stored where nothing is loaded: 0x80000000 is -0.0."""
    source = ASTSource(kernel, {"out": "*fp32", "HOW": "constexpr"}, {(1,): how})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    moved = re.findall(r"mov\.b32\s+%r\d+, (-?(?:0x[0-9a-fA-F]+|\d+));", ptx)
    return sorted({int(number, 0) & 0xFFFFFFFF for number in moved} & {0, 0x80000000})


print("triton", triton.__version__)
found = {how: bits(how) for how in ("store", "full", "other", "product")}
for how, numbers in found.items():
    print(f"{how:8}", [hex(number) for number in numbers])
literal = {"3.7.1": [0], "3.9.0": [0x80000000]}[triton.__version__]
want = {"store": literal, "full": literal, "other": literal, "product": [0x80000000]}
sys.exit(found != want)
PY
for version in 3.7.1 3.9.0; do
    TRITON_CACHE_DIR="$folder/cache-$version" PYTHONPATH="$folder/$version" "$folder/venv/bin/python" "$folder/zero.py" \
        2> "$folder/stderr" || { cat "$folder/stderr"; echo "the behaviour has changed"; exit 1; }
done
