#!/usr/bin/env bash
# Throughput on a GPU, at Pythia's shapes: benchmarks/results/gpu.json. Made for ten minutes of a data-centre GPU: an
# estimate, it has not run on one yet.
#
#   git clone ... scaleop && cd scaleop && bash benchmarks/gpu.sh
#
# Needs Python 3.11 or later with a torch that sees the GPU (PYTHON=/path/to/python names another than .venv's or
# python3). Packages which that Python lacks are installed beside it, pinned as in requirements.lock, into .venv-gpu;
# torch is left alone. Needs no hub, no data and no checkpoint: weights and text are random. 24 GB of GPU memory (the
# largest step computes at 17), 16 GB of memory and 5 GB of disk (TMPDIR) do. Arguments go to benchmarks/gpu.py: --tiny --out FILE tries it anywhere.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
needs="accelerate datasets filelock huggingface_hub numpy psutil pydantic safetensors tokenizers tqdm transformers"

lacks() { "$python" -c 'import importlib.util, sys
sys.exit(all(map(importlib.util.find_spec, sys.argv[1:])))' "$@"; }

lacks torch && { echo "$python has no torch: name one that has, PYTHON=/path/to/python" >&2; exit 1; }
if lacks yaml $needs; then
    "$python" -m venv .venv-gpu
    "$python" -c 'import site; print(*site.getsitepackages(), site.getusersitepackages(), sep="\n")' \
        > "$(echo .venv-gpu/lib/python*/site-packages)/outer.pth"  # so that torch is seen, whatever environment it is in
    grep -viE '^(torch|nvidia|triton|--)' requirements.lock > .venv-gpu/constraints.txt
    .venv-gpu/bin/python -m pip install --quiet --constraint .venv-gpu/constraints.txt pyyaml $needs
    python=.venv-gpu/bin/python
fi

store=$(mktemp -d)
trap 'rm -rf "$store"' EXIT
SCALEOP_STORE=$store PYTHONPATH=. HF_HUB_OFFLINE=1 "$python" benchmarks/gpu.py "$@"
