#!/usr/bin/env bash
# In Triton, code after "if CONSTANT: return" is compiled although the constant is true and nothing reaches it: an
# operation that does not exist for the argument, or a second return of another type, is a CompilationError, in a kernel
# as in a function that it calls. In "else:" the same code is not compiled. So a function whose types depend on a
# constant needs "else". Nothing here needs a GPU.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; pip="$folder/venv/bin/python -m pip install -q --disable-pip-version-check"
$pip numpy==2.3.5
for version in 3.7.1 3.9.0; do $pip --no-deps --target "$folder/$version" triton==$version; done

cat > "$folder/compiled.py" <<'PY'
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError


@triton.jit
def after(x, IS_SCALAR: tl.constexpr):
    if IS_SCALAR:
        return x
    return tl.sum(x, axis=0)


@triton.jit
def otherwise(x, IS_SCALAR: tl.constexpr):
    if IS_SCALAR:
        return x
    else:
        return tl.sum(x, axis=0)


@triton.jit
def pair_after(x, IS_SCALAR: tl.constexpr):
    if IS_SCALAR:
        return x
    return (x, x)


def kernel_of(function):
    @triton.jit
    def kernel(out, FUNCTION: tl.constexpr):
        tl.store(out, FUNCTION(tl.program_id(0), True))

    return kernel, {"FUNCTION": function}


@triton.jit
def own_return(out, IS_SCALAR: tl.constexpr):
    if IS_SCALAR:
        tl.store(out, 1)
        return
    tl.store(out, tl.sum(tl.program_id(0), axis=0))


def result(kernel, constants):
    signature = {"out": "*i32"} | {name: "constexpr" for name in constants}
    try:
        triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    except CompilationError:
        return "refused"
    return "compiled"


found = {f.__name__: result(*kernel_of(f)) for f in (after, otherwise, pair_after)}
found["own_return"] = result(own_return, {"IS_SCALAR": True})
print(f"triton {triton.__version__} ", ", ".join(f"{name} {how}" for name, how in found.items()))
PY
for version in 3.7.1 3.9.0; do
    TRITON_DEFAULT_FP_FUSION=1 TRITON_CACHE_DIR="$folder/cache-$version" PYTHONDONTWRITEBYTECODE=1 \
        PYTHONPATH="$folder/$version" "$folder/venv/bin/python" "$folder/compiled.py"
done | tee "$folder/seen"
for version in 3.7.1 3.9.0; do
    grep -qx "triton $version  after refused, otherwise compiled, pair_after refused, own_return refused" \
        "$folder/seen" || { echo "the behaviour has changed"; exit 1; }
done
