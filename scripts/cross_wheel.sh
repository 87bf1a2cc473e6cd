# shellcheck shell=bash
# Steps of scripts/cross --wheel, which sources this file: the wheel for aarch64, made on this machine and tried in Debian's
# Python for aarch64 under qemu. Packages of arm64 are unpacked below build/ and never installed.
sysroot=build/aarch64-sysroot
packages=build/aarch64-site
dist=dist/aarch64
python=$sysroot/python

# arm64_apt COMMAND [ARGUMENT...]: apt-get for arm64, with separate lists, archives and record of installed packages (none).
arm64_apt() {
  local apt=$PWD/$sysroot/apt
  apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User= -o Acquire::Languages=none \
    -o Dir::State::Lists="$apt/lists" -o Dir::Cache="$apt" -o Dir::State::status="$apt/status" -o Debug::NoLocking=true "$@"
}

step packages - "Debian packages"
step_packages() { setup_packages build cross; }

step sysroot packages "Debian packages of arm64 (build/aarch64-sysroot)"
step_sysroot() {
  local names=() archive link package
  mapfile -t names < <(section_packages sysroot)
  if [[ -e $sysroot/libraries && -e $sysroot/packages && $(<"$sysroot/packages") == "${names[*]}" ]]; then
    echo "all packages are unpacked"
    return
  fi
  rm -rf "$sysroot"
  mkdir -p "$sysroot"/apt/{lists,archives}/partial "$sysroot/usr/lib"
  touch "$sysroot/apt/status"
  arm64_apt update
  arm64_apt install --yes --no-install-recommends --download-only "${names[@]}"
  ln -s usr/lib "$sysroot/lib"
  for archive in "$sysroot"/apt/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$archive" | tar -x --keep-directory-symlink --no-same-owner -C "$sysroot"
    # shellcheck disable=SC2016  # dpkg-deb expands them
    package=$(dpkg-deb --show --showformat='${Package} ${Version} ${Architecture} ' "$archive")
    dpkg-deb --fsys-tarfile "$archive" | tar -t | sed -n "s|^.*/\([^/]*\.so\.[0-9.]*\)$|$package\1|p" >>"$sysroot/libraries"
  done
  # Links to absolute paths would lead out of the sysroot.
  find "$sysroot" -type l -lname '/*' | while read -r link; do
    ln -sfn --relative "$sysroot$(readlink "$link")" "$link"
  done
  cat >"$python" <<'END'
#!/bin/sh
# Debian's Python for aarch64 under qemu.
root=$(dirname "$(realpath "$0")")
exec qemu-aarch64-static -L "$root" "$root/usr/bin/python3.11" "$@"
END
  chmod +x "$python"
  rm -r "$sysroot/apt"
  echo "${names[*]}" >"$sysroot/packages"
}

step venv packages "Python environment (.venv)"
step_venv() { setup_python build wheel; }

step wheel "sysroot venv" "Build the wheel"
step_wheel() {
  local version suffix platform headers
  version=$("$python" -c 'import sysconfig; print(sysconfig.get_python_version())')
  if [[ $(.venv/bin/python -V) != "Python $version".* ]]; then
    echo "an extension for Python $version needs that version in .venv, which has $(.venv/bin/python -V)"
    return 77
  fi
  suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  platform=$("$python" -c 'import sysconfig; print(sysconfig.get_platform())')
  headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  SETUPTOOLS_EXT_SUFFIX=$suffix _PYTHON_HOST_PLATFORM=$platform build_wheel build/aarch64-wheel . \
    --config-settings=build-dir=build/aarch64-python \
    --config-settings=cmake.define.CMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64.cmake" \
    --config-settings=cmake.define.KVANTA_SYSROOT="$PWD/$sysroot" \
    --config-settings=cmake.define.KVANTA_STUB_PYTHON="$PWD/$python" \
    --config-settings=cmake.define.Python_INCLUDE_DIR="$headers" \
    --config-settings=cmake.define.KVANTA_CUDA=OFF --config-settings=cmake.define.KVANTA_GLOO=OFF
  rm -rf "$dist"
  auditwheel repair --ldpaths "$PWD/$sysroot/usr/lib/aarch64-linux-gnu" --wheel-dir "$dist" build/aarch64-wheel/kvanta-*.whl
  cp "$sysroot/libraries" "$dist/libraries.txt"  # for the bill of materials: dpkg does not know these files
  tools/check_wheel.py --notices "$dist"/kvanta-*.whl
}

# aarch64_kvanta CPU [ARGUMENT...]: the installed package's command on a processor that qemu emulates.
aarch64_kvanta() { QEMU_CPU=$1 PYTHONPATH=$packages "$python" -m kvanta "${@:2}"; }

step install wheel "Install the wheel in a folder, by pip in the Python for aarch64"
step_install() {
  local pip
  pip=$(.venv/bin/python -c 'import pip; print(pip.__path__[0])')
  rm -rf "$packages"
  "$python" "$pip" install --progress-bar off --no-compile --only-binary=:all: --constraint requirements/constraints.txt \
    --target "$packages" "$dist"/kvanta-*.whl
  aarch64_kvanta max --version
  aarch64_kvanta max formats
}

step native venv "The package of this machine, for comparison"
step_native() { setup_package; }

# compare MODEL FORMAT TOKENS CPU:UNIT...: generates a text by the portable unit of this machine, and requires it of these
# units on processors that qemu emulates. Pages are small, so that most of the text is read from quantized ones.
compare() {
  local options=(--raw --temperature 0 --kv-cache-dtype "$2" --max-tokens "$3" --block-size 16 --max-model-len 512)
  local arguments=(generate "$1" "Once upon a time" "${options[@]}") expected text place
  expected=$(.venv/bin/kvanta "${arguments[@]}" --isa portable)
  printf '\n%s, %s, %s portable:\n%s\n' "$1" "$2" "$(uname -m)" "$expected"
  for place in "${@:4}"; do
    text=$(aarch64_kvanta "${place%:*}" "${arguments[@]}" --isa "${place#*:}")
    [[ $text == "$expected" ]] || { printf 'error: aarch64 %s:\n%s\n' "${place#*:}" "$text" >&2 && return 1; }
    echo "aarch64 ${place#*:}: the same"
  done
}

step generate "install native" "Texts, the same as on this machine"
step_generate() {
  local format
  for format in int8 int4_per_token_head t4; do
    compare stories260k "$format" 250 max:portable max:i8mm neoverse-n1:dotprod cortex-a72:neon
  done
  compare smollm2 int4 40 max:portable  # a token per second under emulation; the others are several times slower
  echo "summary: $(basename "$dist"/kvanta-*.whl) generates the texts of $(uname -m)"
}
