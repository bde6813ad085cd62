#!/usr/bin/env bash
# A kernel's key in Triton's cache holds its constants, sorted by name and then by the address of the module that has
# them. Where two functions of a kernel use constants of one name with different values, the key follows the addresses:
# another process may find nothing in the cache and compile again. Not in triton 3.9.0. Nothing here needs a GPU.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; pip="$folder/venv/bin/python -m pip install -q --disable-pip-version-check"
$pip numpy==2.3.5
for version in 3.6.0 3.7.1; do $pip --no-deps --target "$folder/$version" triton==$version; done

cat > "$folder/one.py" <<'PY'
import triton, triton.language as tl
SIZE = tl.constexpr(1)


@triton.jit
def first(out):
    tl.store(out, SIZE)
PY
sed 's/constexpr(1)/constexpr(2)/; s/first/second/' "$folder/one.py" > "$folder/two.py"
cat > "$folder/kernel.py" <<'PY'
import importlib, sys
modules = [importlib.import_module(name) for name in sys.argv[1:]]
import triton
from one import first
from two import second


@triton.jit
def kernel(out):
    first(out)
    second(out + 1)


first.cache_key, second.cache_key
low, high = sorted(modules, key=lambda module: id(vars(module)))
print(triton.__version__, f"{low.__name__} before {high.__name__}:", kernel.cache_key)
PY
for version in 3.6.0 3.7.1; do
    for modules in "one two" "two one"; do  # the module imported first usually has the lower address
        for try in 1 2 3 4; do
            TRITON_DEFAULT_FP_FUSION=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$folder/$version" \
                "$folder/venv/bin/python" "$folder/kernel.py" $modules
        done
    done
done | sort -u | tee "$folder/seen"
for version in 3.6.0 3.7.1; do
    keys=$(grep -c "^$version " "$folder/seen")
    [ "$keys" = 2 ] || { echo "triton $version: $keys keys, the behaviour has changed"; exit 1; }
done
