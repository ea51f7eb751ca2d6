#!/usr/bin/env bash
# The one table of compiler flags, for each generation of TPU, and for GPUs.
#
#   ./launch/flags.sh v4|v5e|v5p|v6e|tpu7x [SLICES]   LIBTPU_INIT_ARGS=...
#   ./launch/flags.sh gpu                             XLA_FLAGS=...
#
# The other launchers take their flags from here; flags of your own, in the
# variable of the same name, come after these and so win. None was timed by us
# on a TPU: each is what the compiler's makers advise for models like ours.

flags() { # GENERATION [SLICES]
  local variable=LIBTPU_INIT_ARGS all=()
  case "$1" in
    v4) ;; # the compiler's defaults
    # The sum of gradients over the chips goes on beside the computation; of
    # the asynchronous collectives of v5e it is the one that is off by default
    # (OpenXLA's guide to the flags).
    v5e) all+=(--xla_tpu_enable_async_collective_fusion=true
      --xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true) ;;
    # Gathering weights is not fused with what uses them, so that it can go on
    # beside other computation (Google's recipe for a dense 7B model on v5p).
    v5p) all+=(--xla_tpu_megacore_fusion_allow_ags=false) ;;
    # Larger tiles: 96 of v6e's 128 MiB of VMEM for one operation instead of 16
    # (Google's recipes for dense models on v6e).
    v6e) all+=(--xla_tpu_scoped_vmem_limit_kib=98304) ;;
    # The same with the 64 MiB of VMEM that it has (Google's tpu7x recipes).
    tpu7x) all+=(--xla_tpu_scoped_vmem_limit_kib=65536) ;;
    # Communication goes on beside computation; off by default (OpenXLA).
    gpu) variable=XLA_FLAGS
      all+=(--xla_gpu_enable_latency_hiding_scheduler=true) ;;
    *) return 1 ;;
  esac
  # The sum of gradients between slices, over the data centre's network, goes
  # on beside the computation (OpenXLA, MaxText).
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
  [[ ${words[1]:-1} =~ ^[1-9][0-9]{0,8}$ ]] || fail "slices: ${words[1]}"
  line="$(flags "${words[@]}")" ||
    fail "unknown generation ${words[0]}: give v4, v5e, v5p, v6e, tpu7x, gpu"
  printf '%s\n' "${line%%=*}=$(quote "${line#*=}")"
fi
