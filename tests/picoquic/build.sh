#!/usr/bin/env bash
# Builds picoquic, picotls and our peer of them into build/picoquic; quick when that is done.
# Their sources come with a Python package's, and stay outside of git.
#   [PYTHON=...] tests/picoquic/build.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/build/picoquic
python=${PYTHON:-$root/.venv/bin/python}
package=aiopquic-0.6.1
sha256=72579146e0f22859a5a7c197246604fef460b9e1b578a2910156dff7679efd29
source=$here/$package/third_party
export PATH=$root/.venv/bin:$PATH
mkdir -p "$here"
exec 9>"$here/lock"
flock 9
renice -n 10 $$ >/dev/null

if [ ! -f "$source/unpacked" ]; then
  [ -f "$here/$package.tar.gz" ] || "$python" -m pip download --quiet --no-deps \
    --no-binary :all: --ignore-requires-python --dest "$here" "${package/-/==}"
  echo "$sha256  $here/$package.tar.gz" | sha256sum --check --quiet
  tar xzf "$here/$package.tar.gz" -C "$here" "$package/third_party"
  touch "$source/unpacked"
fi

launcher=$(command -v ccache || true)
fusion=$([ "$(uname -m)" = x86_64 ] && echo ON || echo OFF)
build() { # FOLDER TARGETS SOURCE [OPTION...]
  [ -f "$here/$1/build.ninja" ] || cmake -S "$3" -B "$here/$1" -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_COMPILER_LAUNCHER="$launcher" \
    -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" "${@:4}"
  # shellcheck disable=SC2086
  cmake --build "$here/$1" -j 2 --target $2
}
targets="picotls-core picotls-minicrypto picotls-openssl"
[ $fusion = OFF ] || targets+=" picotls-fusion"
build picotls "$targets" "$source/picotls" -DWITH_FUSION=$fusion -DWITH_DTRACE=OFF
build core picoquic-core "$source/picoquic" -DPTLS_WITH_FUSION=$fusion -DDISABLE_DEBUG_PRINTF=ON \
  -DPTLS_PREFIX="$here/picotls" -DBUILD_DEMO=OFF -DBUILD_HTTP=OFF -DBUILD_PQBENCH=OFF \
  -DBUILD_LOGLIB=OFF -DBUILD_LOGREADER=OFF -DBUILD_TESTING=OFF -Dpicoquic_BUILD_TESTS=OFF \
  -DBUILD_PICO_SIM=OFF

peer=$root/tests/picoquic/peer.cc
if [ ! "$here/peer" -nt "$peer" ] || [ ! "$here/peer" -nt "$here/core/libpicoquic-core.a" ]; then
  libraries=("$here/core/libpicoquic-core.a")
  for target in openssl fusion minicrypto core; do
    library=$here/picotls/libpicotls-$target.a
    [ ! -f "$library" ] || libraries+=("$library")
  done
  $launcher g++ -std=c++20 -O2 -Wall -Wextra -I"$source/picoquic/picoquic" -I"$source/picotls/include" -c "$peer" \
    -o "$here/peer.o"
  g++ "$here/peer.o" "${libraries[@]}" -lssl -lcrypto -ldl -pthread -o "$here/peer"
fi
