#!/usr/bin/env bash
# Which loads go past the caches depends on the GPU's maker: Triton drops volatile=True from loads for AMD, where
# cache_modifier=".cv" holds, and before 3.9 it drops ".cv" for NVIDIA, where volatile=True holds: both without a
# word. Nothing here needs a GPU.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; pip="$folder/venv/bin/python -m pip install -q --disable-pip-version-check"
$pip numpy==2.3.5
for version in 3.7.1 3.9.0; do $pip --no-deps --target "$folder/$version" triton==$version; done

cat > "$folder/loads.py" <<'PY'
import re, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def kernel(out, x, MODIFIER: tl.constexpr, VOLATILE: tl.constexpr):
    i = tl.arange(0, 128)
    tl.store(out + i, tl.load(x + i, cache_modifier=MODIFIER, volatile=VOLATILE))


def loads(target, modifier, volatile):
    source = ASTSource(
        kernel, {"out": "*i32", "x": "*i32", "MODIFIER": "constexpr", "VOLATILE": "constexpr"},
        {(2,): modifier, (3,): volatile},
    )
    asm = triton.compile(source, target=target).asm
    if "ptx" in asm:
        return re.findall(r"\bld\.\S*global\S*", asm["ptx"])
    return [" ".join(line.split()) for line in re.findall(r"(?:global|buffer)_load.*", asm["amdgcn"])]


print("triton", triton.__version__)
afresh = []
for name, target in (("sm_90", GPUTarget("cuda", 90, 32)), ("gfx942", GPUTarget("hip", "gfx942", 64))):
    for modifier, volatile in (("", True), (".cv", False)):
        found = loads(target, modifier, volatile)
        print(f"{name:7} modifier={modifier!r:6} volatile={volatile!s:5} {found}")
        afresh.append(bool(re.search(r"volatile|\.cv|sc0 sc1", found[0])))
want = {"3.7.1": [True, False, False, True], "3.9.0": [True, True, False, True]}[triton.__version__]
sys.exit(afresh != want)
PY
for version in 3.7.1 3.9.0; do
    TRITON_CACHE_DIR="$folder/cache-$version" PYTHONPATH="$folder/$version" "$folder/venv/bin/python" "$folder/loads.py" \
        2> "$folder/stderr" || { cat "$folder/stderr"; echo "the behaviour has changed"; exit 1; }
done
