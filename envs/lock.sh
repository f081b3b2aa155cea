#!/usr/bin/env bash
# Make the hashed locks from the .in files: bash envs/lock.sh [NAME ...]. Needs uv; pip's find-links must hold a CPU
# build of torch, or PyTorch's index of CPU builds must be set as an extra index. The locks name no host.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" UV_INDEX_STRATEGY=unsafe-best-match UV_CUSTOM_COMPILE_COMMAND="bash envs/lock.sh"
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(workflow cluster model-cpu model-cuda vllm-cpu vllm-cuda sglang-cpu sglang-cuda)
for name in "${names[@]}"; do
  options=()
  # What a CPU engine asks for and cannot use beside a CPU torch; nothing that is used here needs it.
  [ -f "$name.override" ] && options=(--override "$name.override")
  # sglang's wheels ask for a newer glibc than the others.
  platform=x86_64-manylinux_2_28
  [[ "$name" = sglang-* ]] && platform=x86_64-manylinux_2_34
  uv pip compile --quiet "$name.in" -o "$name.lock" --generate-hashes --no-emit-index-url --no-emit-find-links \
    --python-version 3.11 --python-platform $platform "${options[@]}"
  # The same environment for those who have conda: pip inside, from the same lock.
  printf 'name: breakeven-%s\nchannels: [conda-forge, nodefaults]\ndependencies:\n  - python=3.11\n  - pip\n  - pip:\n      - --require-hashes\n      - -r %s.lock\n' \
    "$name" "$name" > "$name.yaml"
done
