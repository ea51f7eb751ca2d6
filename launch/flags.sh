#!/usr/bin/env bash
# Prints compiler flags for a generation of TPUs, or for GPUs.
#
#   ./launch/flags.sh v4|v5e|v5p|v6e|tpu7x [SLICES]   LIBTPU_INIT_ARGS=...
#   ./launch/flags.sh gpu                             XLA_FLAGS=...
#
# The other launchers use these flags. Your own flags in the same variable
# follow them and take precedence. The compilers' authors recommend the flags
# for models like ours; we have timed none of them on a TPU.

flags() { # GENERATION [SLICES]
  local variable=LIBTPU_INIT_ARGS all=()
  case "$1" in
    v4) ;; # the compiler's defaults
    # Overlaps the sum of gradients over chips with computation. It is the only
    # asynchronous collective of v5e that is off by default (OpenXLA's guide).
    v5e) all+=(--xla_tpu_enable_async_collective_fusion=true
      --xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true) ;;
    # Does not fuse all-gathers of weights with their consumers, so that they
    # overlap other computation (Google's recipe for a dense 7B model on v5p).
    v5p) all+=(--xla_tpu_megacore_fusion_allow_ags=false) ;;
    # Allows larger tiles: 96 instead of 16 of v6e's 128 MiB of VMEM for one
    # operation (Google's recipes for dense models on v6e).
    v6e) all+=(--xla_tpu_scoped_vmem_limit_kib=98304) ;;
    # The same for tpu7x's 64 MiB of VMEM (Google's tpu7x recipes).
    tpu7x) all+=(--xla_tpu_scoped_vmem_limit_kib=65536) ;;
    # Overlaps communication and computation; off by default (OpenXLA).
    gpu) variable=XLA_FLAGS
      all+=(--xla_gpu_enable_latency_hiding_scheduler=true) ;;
    *) return 1 ;;
  esac
  # Overlaps computation with the sum of gradients between slices, over the data
  # centre's network (OpenXLA, MaxText).
  if [ "$1" != gpu ] && [ "${2:-1}" -gt 1 ]; then
    all+=(--xla_tpu_enable_data_parallel_all_reduce_opt=true)
  fi
  [ -z "${!variable:-}" ] || all+=("${!variable}")
  printf '%s=%s' "$variable" "${all[*]}"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  # shellcheck source-path=SCRIPTDIR source=common.sh
  . "$(dirname "$0")/common.sh"
  parse "$@"
  if [ "${#words[@]}" -lt 1 ] || [ "${#words[@]}" -gt 2 ]; then
    fail "give a generation and the number of slices (see --help)"
  fi
  [[ ${words[1]:-1} =~ ^[1-9][0-9]{0,8}$ ]] ||
    fail "slices: ${words[1]}: must be a whole number of at least 1"
  line="$(flags "${words[@]}")" ||
    fail "unknown generation ${words[0]}: give v4, v5e, v5p, v6e, tpu7x, gpu"
  printf '%s\n' "${line%%=*}=$(quote "${line#*=}")"
fi
