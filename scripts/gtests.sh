# shellcheck shell=bash
# Runs test programs of GoogleTest in a few processes each; sourced by the scripts that test a build. ctest starts a process
# for each test: 10 ms of CPU time in a release build, 50 ms under the address sanitizer, a second under qemu, times thousands.

gtest_shards=8  # processes of each program
gtest_runner=() # command that runs the programs of another processor

# run_gtests FOLDER FILTER [LAYER...]: runs the tests of build/FOLDER that a filter of GoogleTest selects ('' for all), of these
# layers or of all. Each pattern of the filter must match a test of them: one whose test was renamed would select nothing.
# Logs are in build/logs/gtests/FOLDER-LAYER-SHARD.log.
run_gtests() {
  local folder=$1 filter=${2:-*} layers=("${@:3}") layer pattern pairs=() failed=0
  if ((${#layers[@]} == 0)); then
    mapfile -t layers < <(basename -s _test -a "build/$folder/tests/"{attention,engine,kernels}_test # which take longest
      basename -s _test -a "build/$folder"/tests/*_test | grep -vxE 'attention|engine|kernels')
  fi
  while read -r pattern; do
    for layer in "${layers[@]}"; do
      "${gtest_runner[@]}" "build/$folder/tests/${layer}_test" --gtest_list_tests --gtest_filter="$pattern"
    done | grep '^  ' >/dev/null || { echo "run_gtests: no test of build/$folder matches $pattern"; return 1; }
  done < <(tr ':' '\n' <<<"${filter#-}" | sed 's/^-//')
  mkdir -p build/logs/gtests
  rm -f build/logs/gtests/"$folder"-*
  for layer in "${layers[@]}"; do pairs+=("$(seq -f "$layer %g" 0 $((gtest_shards - 1)))"); done
  export GTEST_FILTER=$filter GTEST_TOTAL_SHARDS=$gtest_shards gtest_folder=$folder
  # shellcheck disable=SC2016 # the inner shell's
  printf '%s\n' "${pairs[@]}" | xargs -P "$(nproc)" -L 1 bash -c '
    log=build/logs/gtests/$gtest_folder-$2-$3.log
    words=()
    [[ -z $1 ]] || words=($1)
    GTEST_SHARD_INDEX=$3 timeout 1500 "${words[@]}" "build/$gtest_folder/tests/$2_test" >"$log" 2>&1 && exit
    echo "$2, part $3: exit $?"
    grep -v "^\[ *\(OK\|RUN\|SKIPPED\) \|^\[-*\]" "$log" | tail -n 200
    grep "^\[ *RUN" "$log" | tail -n 1 | sed "s/^/last test of $2, part $3: /"
    exit 1' - "${gtest_runner[*]}" || failed=1
  unset GTEST_FILTER GTEST_TOTAL_SHARDS
  cat build/logs/gtests/"$folder"-*.log | awk -v processes="$(wc -l <<<"$(printf '%s\n' "${pairs[@]}")")" '
    /^\[  PASSED  \]/ { passed += $4 }
    /^\[  FAILED  \] [0-9]+ test/ { failed += $4 }
    /^\[  SKIPPED \] [0-9]+ test/ { skipped += $4 }
    END { printf "summary: %d tests passed, %d failed, %d skipped in %d processes\n", passed, failed, skipped, processes }'
  return "$failed"
}
