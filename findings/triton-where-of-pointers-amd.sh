#!/usr/bin/env bash
# Whether a kernel that chooses between two pointers compiles for AMD depends on the sizes of the tensors, before Triton
# 3.9. Pointers of tensors below 2 GiB are marked at the launch: a choice between a marked and an unmarked pointer fails
# ("PassManager::run failed"), so a kernel may pass all tests and fail with a large tensor. A choice for each element
# fails with two small tensors too. A choice between addresses as numbers compiles. Needs no GPU.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; pip="$folder/venv/bin/python -m pip install -q --disable-pip-version-check"
$pip numpy==2.3.5
for version in 3.6.0 3.7.1 3.9.0; do $pip --no-deps --target "$folder/$version" triton==$version; done

cat > "$folder/choice.py" <<'PY'
import sys, types
import triton, triton.language as tl
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def where(a, b, n):
    tl.store(tl.where(n > 0, b, a), 1)


@triton.jit
def branches(a, b, n):
    if n > 0:
        p = b
    else:
        p = a
    tl.store(p, 1)


@triton.jit
def elements(a, b, n):
    i = tl.arange(0, 128)
    tl.store(tl.where(i < n, b + i, a + i), 1)


@triton.jit
def numbers(a, b, n):
    address = tl.where(n > 0, b.to(tl.int64), a.to(tl.int64))
    tl.store(address.to(tl.pointer_type(tl.int32)), 1)


class Tensor:
    """Stands for a tensor where Triton chooses the marks of a launch's pointers."""

    def __init__(self, size):
        self.data_ptr, self.ptr_range = lambda: 1 << 20, lambda: size


def marks_of(size):
    return HIPBackend.parse_attr(HIPBackend.get_tensor_specialization(Tensor(size), align=True))


def result(kernel, sizes, target):
    marks = {(i,): marks_of(size) for i, size in enumerate(sizes)}
    source = ASTSource(kernel, {"a": "*i32", "b": "*i32", "n": "i32"}, attrs=marks)
    try:
        triton.compile(source, target=target)
    except RuntimeError as error:
        return str(error)
    return "compiled"


sys.modules["torch"] = types.ModuleType("torch")  # Triton imports it to see the size, and does not use it here
SMALL, LARGE = (1 << 31) - 1, 1 << 31
AMD, NVIDIA = GPUTarget("hip", "gfx942", 64), GPUTarget("cuda", 90, 32)
print("triton", triton.__version__, "marks:", marks_of(SMALL), marks_of(LARGE))
found = {}
for kernel in (where, branches, elements, numbers):
    found[kernel.__name__] = results = {
        "both small": result(kernel, (SMALL, SMALL), AMD),
        "both large": result(kernel, (LARGE, LARGE), AMD),
        "one of each": result(kernel, (SMALL, LARGE), AMD),
        "sm_90": result(kernel, (), NVIDIA),
    }
    print(f"{kernel.__name__:9}", *(f"{which}: {how};" for which, how in results.items()))
others = {(name, which): how for name in found for which, how in found[name].items() if how != "compiled"}
failed = [(name, "one of each") for name in ("where", "branches", "elements")] + [("elements", "both small")]
sys.exit(others != ({} if triton.__version__ == "3.9.0" else dict.fromkeys(failed, "PassManager::run failed")))
PY
for version in 3.6.0 3.7.1 3.9.0; do
    TRITON_CACHE_DIR="$folder/cache-$version" PYTHONPATH="$folder/$version" \
        "$folder/venv/bin/python" "$folder/choice.py" 2> "$folder/stderr" ||
        { tail "$folder/stderr"; echo "the behaviour has changed"; exit 1; }
done
