#!/usr/bin/env bash
# The order in which tl.sum adds up a row depends on the strides and addresses of the tensors of the kernel, even of
# one that is only stored to: where they are multiples of 16, Triton compiles a variant in which a thread holds four
# neighbours, else each has a thread of its own. So equal rows have other bits in another tensor, although the tile
# and the warps are the same. The steps of the sum between threads show it; nothing here needs a GPU.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; pip="$folder/venv/bin/python -m pip install -q --disable-pip-version-check"
$pip numpy==2.3.5
for version in 3.7.1 3.9.0; do $pip --no-deps --target "$folder/$version" triton==$version; done

cat > "$folder/sums.py" <<'PY'
import re, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def kernel(out, x, out_stride, x_stride):
    row, column = tl.arange(0, 128)[:, None], tl.arange(0, 8)[None, :]
    value = tl.load(x + row * x_stride + column)
    tl.store(out + row * out_stride + column, value / tl.sum(value, axis=1)[:, None])


def steps(*multiples_of_16):
    """Return the distances between the threads whose sums of a row are added."""
    source = ASTSource(
        kernel, {"out": "*fp32", "x": "*fp32", "out_stride": "i32", "x_stride": "i32"},
        attrs={(i,): [["tt.divisibility", 16]] for i in multiples_of_16},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    found = re.findall(r"shfl\.sync\.bfly\.b32.*, (\d+), 31, -1;", ptx)
    return found[: found.index("1") + 1]


print("triton", triton.__version__)
found = [steps(0, 1), steps(0, 1, 3), steps(0, 1, 2), steps(0, 3)]
names = ("both addresses", "and the stride of x", "and the stride of out", "address of out, stride of x")
for name, order in zip(names, found):
    print(f"multiples of 16: {name:27} threads add up at distances {', '.join(order)}")
sys.exit(found != [["4", "2", "1"], ["1"], ["1"], ["4", "2", "1"]])
PY
for version in 3.7.1 3.9.0; do
    TRITON_CACHE_DIR="$folder/cache-$version" PYTHONPATH="$folder/$version" "$folder/venv/bin/python" "$folder/sums.py" \
        2> "$folder/stderr" || { cat "$folder/stderr"; echo "the behaviour has changed"; exit 1; }
done
