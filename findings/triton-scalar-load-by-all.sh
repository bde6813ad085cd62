#!/usr/bin/env bash
# A scalar load of a Triton kernel is executed by all threads of a program, a scalar store by one: the PTX has a
# predicate for the store alone. A word of the host's memory that a program of 16 warps polls is so read 16 times over
# PCIe in each poll; of a load of a tile whose mask leaves one lane, by one thread. Needs no GPU: the script reads the PTX.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; pip="$folder/venv/bin/python -m pip install -q --disable-pip-version-check"
$pip numpy==2.3.5
for version in 3.6.0 3.7.1 3.9.0; do $pip --no-deps --target "$folder/$version" triton==$version; done

cat > "$folder/scalar.py" <<'PY'
import re, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def scalar(word, out):
    tl.store(out + tl.program_id(0), tl.load(word, volatile=True))


@triton.jit
def one_lane(word, out):
    lane = tl.arange(0, 512)  # as many as threads
    words = tl.load(word + lane * 0, mask=lane == 0, other=0, volatile=True)
    tl.store(out + tl.program_id(0), tl.max(words))


def memory(kernel):
    """Return whether the load and the store of global memory have a predicate."""
    source = ASTSource(kernel, {"word": "*i32", "out": "*i32"})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16}).asm["ptx"]
    (load,) = re.findall(r"^\s*(@%p\d+)?\s*ld\.volatile\.global\.\S+", ptx, re.MULTILINE)
    (store,) = re.findall(r"^\s*(@%p\d+)?\s*st\.global\.\S+", ptx, re.MULTILINE)
    return bool(load), bool(store)


print("triton", triton.__version__)
found = {kernel.__name__: memory(kernel) for kernel in (scalar, one_lane)}
for name, (load, store) in found.items():
    print(f"  {name}: the load is {'predicated' if load else 'of all threads'}, the store {'predicated' if store else 'of all threads'}")
sys.exit(found != {"scalar": (False, True), "one_lane": (True, True)})
PY
for version in 3.6.0 3.7.1 3.9.0; do
    TRITON_CACHE_DIR="$folder/cache-$version" PYTHONPATH="$folder/$version" \
        "$folder/venv/bin/python" "$folder/scalar.py" 2> "$folder/stderr" ||
        { tail "$folder/stderr"; echo "the behaviour has changed"; exit 1; }
done
