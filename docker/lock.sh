#!/bin/sh
# Rewrites docker/requirements/*.txt with every package of an image, pinned. Run it when
# pyproject.toml changes; it needs uv (docker/requirements/build.txt says which version).
#
# Another source of torch for CPU: INDEX_OPTIONS='--find-links URL' docker/lock.sh
set -eu
cd "$(dirname "$0")/.."
uv=${UV:-uv}
index_options=${INDEX_OPTIONS:---torch-backend=cpu}

# lock KIND EXTRA OPTIONS...
lock() {
    kind=$1 extra=$2
    shift 2
    "$uv" pip compile --quiet --no-header --no-annotate --generate-hashes --python-version 3.11 \
        ${extra:+--extra "$extra"} "$@" pyproject.toml -o "docker/requirements/$kind.txt"
}

# PyPI's builds of these are for CUDA and break transformers beside torch for CPU.
# triton: 1 GB, GPU only.
excludes=$(mktemp)
# FlashInfer compiles kernels with this nvcc, which refuses the headers of another CUDA than its own.
constraints=$(mktemp)
trap 'rm -f "$excludes" "$constraints"' EXIT
printf '%s\n' torchaudio torchcodec torchvision triton > "$excludes"
printf '%s==13.0.*\n' nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime \
    > "$constraints"

# shellcheck disable=SC2086
lock cpu cpu --python-platform x86_64-manylinux_2_28 --excludes "$excludes" $index_options
lock nvidia vllm --python-platform x86_64-manylinux_2_28 --constraints "$constraints"
lock ascend '' --universal  # x86-64 and Arm; the vendor's image has the engine
