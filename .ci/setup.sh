#!/usr/bin/env bash
# Brings what a target needs: setup.sh install|test|test-all. System packages that are missing are
# installed when root, and otherwise named with the command that installs them.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} VENV=${VENV:-.venv} TORCH=${TORCH:-torch==2.13.0}
target=${1:?usage: setup.sh install|test|test-all}
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

# need "what it is for" test-command package...
missing=() reasons=()
need() {
  local reason=$1 probe=$2
  shift 2
  if ! bash -c "$probe" >/dev/null 2>&1; then
    missing+=("$@")
    reasons+=("$reason")
  fi
}

require_packages() {
  [ ${#missing[@]} -eq 0 ] && return
  local command="apt-get install -y ${missing[*]}"
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    say "installing ${missing[*]}"
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive $command; } >/tmp/pycomm-apt.log 2>&1 ||
      { tail -5 /tmp/pycomm-apt.log; exit 1; }
  else
    say "missing: ${reasons[*]}"
    say "install with:  sudo $command"
    exit 1
  fi
}

command -v "$PYTHON" >/dev/null || { say "there is no '$PYTHON'; set PYTHON to Python 3.11 or later"; exit 1; }
need "a C++20 compiler" "echo 'int main(){}' | c++ -std=c++20 -x c++ -fsyntax-only -" g++
need "make" "command -v make" make
need "Python >= 3.11" "$PYTHON -c 'import sys; assert sys.version_info >= (3, 11)'" python3
need "Python's venv" "$PYTHON -c 'import venv, ensurepip'" python3-venv
need "Python's headers" "$PYTHON -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path(\"include\") + \"/Python.h\")'" python3-dev
if [ "$target" != install ]; then
  need "GoogleTest" "echo '#include <gtest/gtest.h>' | c++ -std=c++20 -x c++ -fsyntax-only -" libgtest-dev
  need "git" "command -v git" git
fi
if [ "$target" = test-all ]; then
  need "clang with libFuzzer" "command -v clang++-14 && ls /usr/lib/llvm-14/lib/clang/*/lib/linux/libclang_rt.fuzzer-x86_64.a" clang-14 libclang-rt-14-dev
  need "a compiler and an emulator for aarch64" "command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64" g++-aarch64-linux-gnu qemu-user
fi
# A compiler cache and a browser are kindnesses, not needs.
if [ "$(id -u)" -eq 0 ]; then
  need "ccache" "command -v ccache" ccache
  # The report's page is looked at in a real one.
  if [ "$target" != install ]; then need "a browser" "command -v chromium" chromium; fi
  if [ "$target" != install ]; then need "network namespaces" "command -v ip && command -v nft" iproute2 nftables; fi
  if [ "$target" != install ]; then need "a packet analyser" "command -v tshark" tshark; fi
  # RDMA is compiled in where the headers are; the library itself is loaded at run time.
  need "libibverbs' headers" "echo '#include <infiniband/verbs.h>' | c++ -x c++ -fsyntax-only -" libibverbs-dev
  # picoquic, a stranger to talk to, is built against OpenSSL's headers.
  if [ "$target" != install ]; then need "OpenSSL's headers" "command -v pkg-config && echo '#include <openssl/ssl.h>' | cc -x c -fsyntax-only -" libssl-dev pkg-config; fi
  # The fastest AES-GCM there is; the build takes it where it is.
  need "libipsec-mb" "[ $(uname -m) != x86_64 ] || ls /usr/include/intel-ipsec-mb.h" libipsec-mb-dev
fi
require_packages

if [ ! -x "$VENV/bin/python" ]; then
  say "creating $VENV"
  "$PYTHON" -m venv "$VENV"
fi
bin=$(realpath -m "$VENV")/bin
if [ "$(cat "$VENV/torch.spec" 2>/dev/null)" != "$TORCH" ]; then
  say "installing $TORCH"
  "$bin/pip" install -q --disable-pip-version-check "$TORCH" numpy 2>&1 | grep -v "^WARNING: Location" || true
  "$bin/python" -c 'import torch' 2>/dev/null || { say "torch could not be installed as '$TORCH'"; exit 1; }
  echo "$TORCH" >"$VENV/torch.spec"
  rm -f "$VENV/pycomm.stamp"
fi

# An editable install: Python from this folder, compiled modules in the environment. Built again
# only when what is compiled has changed, or a Python file has come or gone.
stamp=$({ find pycomm -name '*.py' -o -name '*.jinja' | sort; cat CMakeLists.txt pyproject.toml $(find csrc backends bench pycomm -name '*.cc' -o -name '*.h' -o -name '*.inc' -o -name '*.cmake' | sort); } | sha256sum)
extra=$([ "$target" = install ] && echo "[train]" || echo "[dev]")
if [ "$(cat "$VENV/pycomm.stamp" 2>/dev/null)" != "$stamp$extra" ]; then
  say "building pycomm"
  "$bin/pip" install -q --disable-pip-version-check -e ".$extra" 2>&1 | grep -v "^WARNING: Location" || true
  "$bin/python" -c 'import pycomm._core, pycomm._loader; pycomm._loader.torch_module()'
  echo "$stamp$extra" >"$VENV/pycomm.stamp"
fi
if [ "$target" != install ]; then
  "$bin/python" -c 'import cmake, ninja' 2>/dev/null ||
    "$bin/pip" install -q --disable-pip-version-check cmake ninja 2>&1 | grep -v "^WARNING: Location" || true
fi
