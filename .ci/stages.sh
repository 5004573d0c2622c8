#!/usr/bin/env bash
# Runs stages by name, each within its time budget, and says how long each took.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath -m "${VENV:-.venv}")/bin
export bin PATH=$bin:$PATH CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 OMP_NUM_THREADS=1
export PYTHONDONTWRITEBYTECODE=1

build() { # folder, cmake arguments...
  local folder=build/$1
  shift
  cmake -S . -B "$folder" -G Ninja -DPYCOMM_TESTS=ON "$@" >"$folder.log" 2>&1 || { cat "$folder.log"; return 1; }
  ninja -C "$folder" >"$folder.log" 2>&1 || { grep -E "error|FAILED" -A3 "$folder.log" | head -40; return 1; }
}

core_tests() { # without torch and Python in sight
  build release && ctest --test-dir build/release --output-on-failure --no-tests=error
}

# Whole collectives under delay, reordering, loss, partition and death: 10,000 seeds; and ranks of
# one host in 20,000 orders of turns.
simulate() {
  build release && SIM_SCENARIOS=5000 build/release/tests/cpp/simulation_test --gtest_brief=1 &&
    SIM_SCENARIOS=20000 build/release/tests/cpp/local_test --gtest_brief=1
}

aarch64() { .ci/aarch64.sh; }

large_messages() { TEST_LARGE=1 python -m pytest -q tests/python/test_large_messages.py; }

python_tests() { python -m pytest tests/python tests/torch tests/tidy; }

train_tests() { python -m pytest tests/train; }

# Hosts that are network namespaces; without root they are skipped, with the reason.
host_tests() { python -m pytest tests/hosts; }

# In a machine that has RDMA devices (tests/softroce): the contract, collectives, every fault.
rdma_tests() {
  if [ "$(uname -m)" != x86_64 ]; then
    echo "skipped: the virtual machine is for x86-64 hosts"
    return 0
  fi
  build release || return 1
  python tests/softroce/vm.py run --links 2 --timeout 600 -- env PYTHONDONTWRITEBYTECODE=1 TMPDIR=/tmp \
    "$bin/python" -m pytest tests/rdma -p no:cacheprovider
}

# Thirty deaths at random moments, saves included, and the trainer's page with its whole first run;
# not part of a test run.
soak() {
  TRAIN_KILLS=${TRAIN_KILLS:-30} python -m pytest -q tests/train/test_run.py -k killed --timeout 3000 &&
    TRAIN_WHOLE_PAGE=1 python -m pytest -q tests/train/test_docs.py
}

sanitize() {
  local kind
  # What runs in one thread has no races to find.
  local single='^(decoders|kernels|local|message_core|quic_paths|quic_protection|quic_session|schedule|simulation|tuner)_test$'
  for kind in address thread; do
    build "$kind" -DPYCOMM_SANITIZE=$kind &&
      ctest --test-dir "build/$kind" --output-on-failure --no-tests=error \
        -E "$([ $kind = thread ] && echo "$single" || echo '^$')" || return 1
  done
}

fuzz() {
  local seconds=${FUZZ_SECONDS:-20} name
  local flags="-std=c++20 -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"
  flags+=" -DPYCOMM_VERSION=\"fuzz\" -Icsrc -Icsrc/include -Itests/cpp"
  local compile="$(command -v ccache) clang++-14 $flags"
  mkdir -p build/fuzz/objects
  # What is fuzzed is compiled once, for all.
  printf '%s\n' csrc/base/*.cc csrc/transport/*.cc csrc/transport/tcp/membership.cc \
    csrc/communicator/hello.cc csrc/transport/quic/{session*,stream,qlog,recovery,protection,bbr,cubic}.cc \
    csrc/lab/link_model.cc csrc/platform/{crypto,aead,aead_ipsec_mb,openssl,udp,system}.cc |
    xargs -P 2 -I{} sh -c "$compile -fsanitize=fuzzer-no-link -c {} -o build/fuzz/objects/\$(echo {} | tr / _).o" ||
    return 1
  for name in message_core hello membership quic; do
    mkdir -p build/fuzz/corpus_$name
    # shellcheck disable=SC2086
    clang++-14 $flags -fsanitize=fuzzer tests/cpp/fuzz_$name.cc build/fuzz/objects/*.o \
      -o build/fuzz/$name -ldl -pthread || return 1
    build/fuzz/$name -max_total_time="$seconds" -max_len=8192 -timeout=10 -verbosity=0 \
      -print_final_stats=1 build/fuzz/corpus_$name 2>&1 | grep -E "ERROR|SUMMARY|number_of_executed" ||
      true
    [ "${PIPESTATUS[0]}" -eq 0 ] || return 1
  done
}

cuda() {
  if ! command -v nvcc >/dev/null; then
    echo "skipped: no nvcc here; the kernels' bodies ran on the CPU in kernels_test"
    return 0
  fi
  cmake -S . -B build/cuda -G Ninja -DPYCOMM_CUDA=ON >build/cuda.log 2>&1 && ninja -C build/cuda pycomm_cuda >>build/cuda.log 2>&1 ||
    { tail -20 build/cuda.log; return 1; }
  echo "compiled for sm_80 and sm_90; no GPU ran it"
}

# A plain `pip install .` beside a torch that is there already, and its first use.
install_check() {
  rm -rf build/install-check
  "$bin/python" -m venv build/install-check || return 1
  local here there
  here=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  there=$(build/install-check/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # Torch and its needs by reference; not this environment's own pycomm.
  local item
  for item in "$here"/*; do
    case $(basename "$item") in pip* | *pycomm* | setuptools* | *distutils* | __pycache__) ;; *) ln -sf "$item" "$there/" ;; esac
  done
  build/install-check/bin/pip install -q --disable-pip-version-check . 2>&1 | grep -v "^WARNING: Location"
  (cd / && "$OLDPWD/build/install-check/bin/pycomm" bench all_reduce -e 64 -n 2 -m 2)
}

prove() {
  local failed=0
  build release || return 1
  # Benchmarks are not timed tests: PROVE_TIMING=report prints the two figures and goes on.
  local claim
  for claim in latency shared; do
    build/release/tests/cpp/prove_core $claim || [ "${PROVE_TIMING:-hold}" = report ] || failed=1
  done
  build/release/tests/cpp/prove_core kill 100 || failed=1
  python tests/prove_encrypted.py || failed=1
  return $failed
}

# The fifth claim needs a virtual machine.
prove_verbs() {
  build release || return 1
  if [ "$(uname -m)" = x86_64 ]; then
    python tests/softroce/vm.py run --timeout 120 -- env TEST_IB_DEVICES="rxe0;rxe1" \
      "$PWD/build/release/tests/cpp/transport_conformance_test" --gtest_filter='*/verbs' --gtest_brief=1 &&
      echo "5 verbs      holds  the transport contract over the kernel's rdma_rxe (make test-rdma: all else)" || return 1
  else
    echo "5 verbs      skipped: the VM is for x86-64 hosts"
  fi
}

declare -A budget=([core-tests]=600 [python-tests]=700 [train-tests]=800 [host-tests]=300 [rdma-tests]=800 [soak]=3600 [simulate]=200 [large-messages]=300 [sanitize]=900 [fuzz]=200 [cuda]=200 [aarch64]=300 [install-check]=240 [prove]=300 [prove-verbs]=200)
mkdir -p build
status=0
for stage in "$@"; do
  start=$SECONDS
  printf '\n=== %s\n' "$stage"
  export -f build core_tests simulate large_messages python_tests train_tests host_tests rdma_tests soak sanitize fuzz cuda aarch64 install_check prove prove_verbs
  timeout --foreground "${budget[$stage]:?unknown stage}" bash -c "set -uo pipefail; ${stage//-/_}"
  code=$?
  [ $code -eq 124 ] && echo "stage $stage ran past its ${budget[$stage]} s"
  [ $code -eq 0 ] || status=1
  printf -- '--- %s: %s after %d s\n' "$stage" "$([ $code -eq 0 ] && echo ok || echo FAILED)" $((SECONDS - start))
done
exit $status
