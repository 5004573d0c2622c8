#!/usr/bin/env bash
# Builds picoquic, picotls and our peer of them into build/picoquic; quick when that is done. Their
# sources come in a Python package's source archive, and stay outside of git. Exits with 77 where
# they cannot be had or built.
#   [PYTHON=...] tests/picoquic/build.sh
set -Eeuo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/build/picoquic
python=${PYTHON:-$root/.venv/bin/python}
package=aiopquic-0.6.1
sha256=72579146e0f22859a5a7c197246604fef460b9e1b578a2910156dff7679efd29
source=$here/$package/third_party
export PATH=$(dirname "$python"):$PATH
launcher=$(command -v ccache || true)
mkdir -p "$here"
exec 9>"$here/lock"
flock 9
trap 'rm -f "$here"/*/build.ninja; exit 77' ERR

if [ ! -f "$source/unpacked" ]; then
  echo "${package/-/==} --hash=sha256:$sha256" >"$here/requirements.txt"
  "$python" -m pip download --quiet --disable-pip-version-check --retries 1 --no-deps \
    --no-binary "${package%-*}" --ignore-requires-python --require-hashes --dest "$here" \
    --requirement "$here/requirements.txt"
  tar xzf "$here/$package.tar.gz" -C "$here" "$package/third_party"
  touch "$source/unpacked"
fi

build() { # FOLDER SOURCE TARGETS [OPTION...]
  [ -f "$here/$1/build.ninja" ] || cmake -S "$2" -B "$here/$1" -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_COMPILER_LAUNCHER="$launcher" "${@:4}"
  # shellcheck disable=SC2086
  nice -n 10 cmake --build "$here/$1" -j 2 --target $3
}
# Fusion is its own AES-GCM, the fastest that it has.
fusion=$([ "$(uname -m)" = x86_64 ] && echo ON || echo OFF)
targets="picotls-core picotls-minicrypto picotls-openssl"
[ $fusion = OFF ] || targets+=" picotls-fusion"
build picotls "$source/picotls" "$targets" -DWITH_FUSION=$fusion -DWITH_DTRACE=OFF
build core "$source/picoquic" picoquic-core -DPTLS_PREFIX="$here/picotls" \
  -DPTLS_WITH_FUSION=$fusion -DDISABLE_DEBUG_PRINTF=ON -DBUILD_DEMO=OFF -DBUILD_HTTP=OFF \
  -DBUILD_PQBENCH=OFF -DBUILD_LOGLIB=OFF -DBUILD_LOGREADER=OFF -DBUILD_TESTING=OFF \
  -DBUILD_PICO_SIM=OFF
trap - ERR

peer=$root/tests/picoquic/peer.cc
if [ ! "$here/peer" -nt "$peer" ] || [ ! "$here/peer" -nt "$here/core/libpicoquic-core.a" ]; then
  libraries=("$here/core/libpicoquic-core.a")
  for target in openssl fusion minicrypto core; do
    library=$here/picotls/libpicotls-$target.a
    [ ! -f "$library" ] || libraries+=("$library")
  done
  $launcher g++ -std=c++20 -O2 -Wall -Wextra -I"$source/picoquic/picoquic" \
    -I"$source/picotls/include" -c "$peer" -o "$here/peer.o"
  g++ "$here/peer.o" "${libraries[@]}" -lssl -lcrypto -ldl -pthread -o "$here/peer"
fi
