# shellcheck shell=bash
# Numbered steps with times, logs and a summary; sourced by scripts/test and scripts/demo.
#
#   step NAME NEEDS TITLE [beside]   declares a step; the function step_NAME does it; NEEDS: steps it needs, "-" for none;
#                                    beside: it goes on beside the next ones, until one needs it
#   run_steps FOLDER                 runs them in order; the output of each goes to FOLDER/NAME.log
#
# A step that exits with 77 is skipped (its last line says why); so is one that needs a step that did not pass.

step_names=() step_needs=() step_titles=() step_beside=()
step() { step_names+=("$1") step_needs+=("$2") step_titles+=("$3") step_beside+=("${4:-}"); }

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

declare -A step_pid=() step_began=() step_state=()
step_times=()
trap 'for name in "${!step_pid[@]}"; do kill -TERM -- "-${step_pid[$name]}" 2>/dev/null; done; exit 130' INT TERM

# start_step NAME LOG: when the step ends, it touches its log.
start_step() {
  step_began[$1]=$EPOCHSECONDS
  set -m  # a process group of its own, so that an interrupt ends all of it
  (trap "touch ${2@Q}" EXIT && set -euo pipefail && "step_$1") >"$2" 2>&1 </dev/null &
  step_pid[$1]=$!
  set +m
}

# finish_step NAME LOG [beside]: waits for a step and says how it ended; with its name, where others went on beside it.
finish_step() {
  local name=$1 log=$2 rc=0 took which=
  watch_step "${step_pid[$name]}" "$log"
  wait "${step_pid[$name]}" || rc=$?
  unset "step_pid[$name]"
  took=$(minutes $(($(stat -c %Y "$log") - step_began[$name])))  # a step beside others may have ended long ago
  [[ -z ${3:-} ]] || which="$name: "
  closing_lines "$log" | sed "s/^/      $which/"
  case $rc in
    0) step_state[$name]=passed && echo "      ${which}passed in $took" ;;
    77) step_state[$name]=skipped && echo "      ${which}skipped: $(tail -n 1 "$log")" ;;
    *)
      step_state[$name]=failed
      tail -n 60 "$log" | sed 's/^/      | /'
      echo "      ${which}FAILED in $took, exit $rc; whole output: $log"
      ;;
  esac
  step_times+=("$(printf '%6s  %-8s %s' "$took" "${step_state[$name]}" "$name")")
}

run_steps() {
  local folder=$1 i name need blocked total=${#step_names[@]} state
  declare -A count=([passed]=0 [failed]=0 [skipped]=0)
  mkdir -p "$folder"
  for i in "${!step_names[@]}"; do
    name=${step_names[i]} blocked=
    printf '[%2d/%d] %s  %s\n' $((i + 1)) "$total" "$(minutes $SECONDS)" "${step_titles[i]}"
    for need in ${step_needs[i]}; do
      [[ -z ${step_pid[$need]:-} ]] || finish_step "$need" "$folder/$need.log" beside
      [[ $need == - || ${step_state[$need]} == passed ]] || blocked=$need
    done
    if [[ -n $blocked ]]; then
      step_state[$name]=skipped
      echo "      skipped: needs '$blocked'"
      continue
    fi
    start_step "$name" "$folder/$name.log"
    if [[ -n ${step_beside[i]} ]]; then
      echo "      goes on beside the next"
    else
      finish_step "$name" "$folder/$name.log"
    fi
  done
  for name in "${!step_pid[@]}"; do finish_step "$name" "$folder/$name.log" beside; done
  for state in "${step_state[@]}"; do count[$state]=$((count[$state] + 1)); done
  printf '\n%s\n%6s  total\n' "$(printf '%s\n' "${step_times[@]}")" "$(minutes $SECONDS)"
  echo "${count[passed]} passed, ${count[failed]} failed, ${count[skipped]} skipped"
  ((count[failed] == 0))
}
