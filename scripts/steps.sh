# shellcheck shell=bash
# Numbered steps with times, logs and a summary; sourced by scripts/test and scripts/demo.
#
#   step NAME NEEDS TITLE   declares a step; the function step_NAME does it; NEEDS: steps it needs, "-" for none
#   run_steps FOLDER        runs them in order; the output of each goes to FOLDER/NAME.log
#
# A step that exits with 77 is skipped (its last line says why); so is one that needs a step that did not pass.

step_names=() step_needs=() step_titles=()
step() { step_names+=("$1") step_needs+=("$2") step_titles+=("$3"); }

minutes() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

# Lines worth repeating from a log: closing lines of ctest and pytest, and what our own tools conclude.
closing_lines() {
  grep -E '^[0-9]+% tests passed|^=+ .*(passed|failed|error).* =+$|^(summary|warning): ' "$1" | tail -n 8 || true
}

# watch PID LOG: shows that the step lives: its last line on a terminal, a line every minute elsewhere.
watch_step() {
  local pid=$1 log=$2 began=$SECONDS shown=0
  while kill -0 "$pid" 2>/dev/null; do
    if [[ -t 1 ]]; then
      printf '\r\033[K      %s  %.90s' "$(minutes $((SECONDS - began)))" "$(tail -n 1 "$log" | tr -d '\r')"
      sleep 0.5
    else
      sleep 0.2
      if ((SECONDS - began >= shown + 60)); then
        shown=$((SECONDS - began))
        printf '      %s  %.100s\n' "$(minutes $shown)" "$(tail -n 1 "$log" | tr -d '\r')"
      fi
    fi
  done
  [[ -t 1 ]] && printf '\r\033[K'
  return 0
}

current=
trap '[[ -n $current ]] && kill -TERM -- "-$current" 2>/dev/null; exit 130' INT TERM

run_steps() {
  local folder=$1 i name need log rc began blocked total=${#step_names[@]}
  local passed=0 failed=0 skipped=0 times=()
  declare -A state=()
  mkdir -p "$folder"
  for i in "${!step_names[@]}"; do
    name=${step_names[i]} log=$folder/${step_names[i]}.log began=$SECONDS blocked=
    printf '[%2d/%d] %s  %s\n' $((i + 1)) "$total" "$(minutes $SECONDS)" "${step_titles[i]}"
    for need in ${step_needs[i]}; do
      [[ $need == - || ${state[$need]:-passed} == passed ]] || blocked=$need
    done
    if [[ -n $blocked ]]; then
      state[$name]=skipped skipped=$((skipped + 1))
      echo "      skipped: needs '$blocked'"
      continue
    fi
    set -m  # a process group of its own, so that an interrupt ends all of it
    (set -euo pipefail && "step_$name") >"$log" 2>&1 </dev/null &
    current=$!
    set +m
    watch_step "$current" "$log"
    rc=0
    wait "$current" || rc=$?
    current=
    closing_lines "$log" | sed 's/^/      /'
    if ((rc == 0)); then
      state[$name]=passed passed=$((passed + 1))
      echo "      passed in $(minutes $((SECONDS - began)))"
    elif ((rc == 77)); then
      state[$name]=skipped skipped=$((skipped + 1))
      echo "      skipped: $(tail -n 1 "$log")"
    else
      state[$name]=failed failed=$((failed + 1))
      tail -n 60 "$log" | sed 's/^/      | /'
      echo "      FAILED in $(minutes $((SECONDS - began))), exit $rc; whole output: $log"
    fi
    times+=("$(printf '%6s  %-8s %s' "$(minutes $((SECONDS - began)))" "${state[$name]}" "$name")")
  done
  printf '\n%s\n%6s  total\n' "$(printf '%s\n' "${times[@]}")" "$(minutes $SECONDS)"
  echo "$passed passed, $failed failed, $skipped skipped"
  ((failed == 0))
}
