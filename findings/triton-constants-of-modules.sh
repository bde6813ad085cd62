#!/usr/bin/env bash
# A constant that a kernel reads as an attribute of a module (consts.STEP) is not part of the key under which Triton
# caches the compiled kernel: after the constant has changed, the next process takes the old kernel from the cache,
# without a word. The same constant imported by name is part of the key. Nothing here needs a GPU.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; pip="$folder/venv/bin/python -m pip install -q --disable-pip-version-check"
$pip numpy==2.3.5
for version in 3.7.1 3.9.0; do $pip --no-deps --target "$folder/$version" triton==$version; done

cat > "$folder/stored.py" <<'PY'
import re
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import consts
from consts import STEP


@triton.jit
def by_module(out):
    tl.store(out, consts.STEP)


@triton.jit
def by_name(out):
    tl.store(out, STEP)


def stored(kernel):
    ttir = triton.compile(ASTSource(kernel, {"out": "*i32"}, {}), target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    return re.search(r"constant (\d+)", ttir)[1]


print(f"triton {triton.__version__}  STEP {STEP.value}: by_module stores {stored(by_module)}, by_name {stored(by_name)}")
PY
for version in 3.7.1 3.9.0; do
    for step in 2 3; do
        echo "import triton.language as tl; STEP = tl.constexpr($step)" > "$folder/consts.py"
        TRITON_DEFAULT_FP_FUSION=1 TRITON_CACHE_DIR="$folder/cache-$version" PYTHONDONTWRITEBYTECODE=1 \
            PYTHONPATH="$folder/$version" "$folder/venv/bin/python" "$folder/stored.py"
    done
done | tee "$folder/seen"
for version in 3.7.1 3.9.0; do
    for line in "2: by_module stores 2, by_name 2" "3: by_module stores 2, by_name 3"; do
        grep -qx "triton $version  STEP $line" "$folder/seen" || { echo "the behaviour has changed"; exit 1; }
    done
done
