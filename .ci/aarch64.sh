#!/usr/bin/env bash
# Compiles the core for aarch64 and runs what needs no peer process by emulation: kernels, tuner, and
# every interleaving of ranks that share memory. Emulation orders memory as x86 does, so it proves
# arithmetic and portability, not the barriers.
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=aarch64-linux-gnu-g++ emulator=qemu-aarch64 gtest=/usr/src/googletest/googletest
for needed in $compiler $emulator; do
  command -v $needed >/dev/null || { echo "skipped: no $needed here"; exit 0; }
done
[ -d $gtest ] || { echo "skipped: no $gtest here"; exit 0; }
out=build/aarch64
mkdir -p $out
flags=(-O2 -std=c++20 -fno-math-errno -ffp-contract=off -Wall -Wextra -Werror -Wno-missing-field-initializers
  -Icsrc -Icsrc/include -Itests/cpp -I$gtest -I$gtest/include)
ccache=$(command -v ccache || true)
export compiler out ccache
one() {
  local source=$1
  shift
  $ccache $compiler "$@" -c "$source" -o "$out/$(echo "$source" | tr / _).o"
}
export -f one
printf '%s\n' csrc/kernels/reduce_cpu.cc csrc/kernels/reduce_cpu_portable.cc csrc/base/*.cc csrc/platform/*.cc \
  csrc/collectives/*.cc csrc/transport/*.cc $gtest/src/gtest-all.cc $gtest/src/gtest_main.cc |
  xargs -P "$(nproc)" -I{} bash -c 'one "$@"' _ {} "${flags[@]}"
for test in kernels tuner local; do
  $ccache $compiler "${flags[@]}" -c tests/cpp/${test}_test.cc -o $out/test.object
  $compiler $out/test.object $out/*.o -static -lpthread -o $out/${test}_test 2> >(grep -v "statically linked\|in function" >&2 || true)
  SIM_SCENARIOS=200 $emulator $out/${test}_test --gtest_brief=1
done
echo "compiled for aarch64; kernels, tuner and interleavings passed by emulation"
