# shellcheck shell=bash
# Numbered steps with times, logs and a summary; sourced by the scripts that have such steps.
#
#   step NAME NEEDS TITLE [background]   declares a step, run by the function step_NAME; NEEDS: steps that it depends on,
#                                        "-" for none; background: runs concurrently with the next steps, until one needs it
#   run_steps FOLDER                     runs them in order; the output of each goes to FOLDER/NAME.log
#
# A step that exits with 77 counts as skipped (its last line says why); so does one whose dependency did not pass.

step_names=() step_needs=() step_titles=() step_background=()
step() { step_names+=("$1") step_needs+=("$2") step_titles+=("$3") step_background+=("${4:-}"); }

minutes() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

# closing_lines LOG: the summaries of ctest, pytest and our own tools.
closing_lines() {
  grep -E '^[0-9]+% tests passed|^=+ .*(passed|failed|error).* =+$|^(summary|warning): ' "$1" | tail -n 8 || true
}

# watch_step PID LOG: shows progress: the last line of the log on a terminal, a line per minute elsewhere.
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

# start_step NAME LOG: starts a step, which writes its exit status to LOG.status. The shell's own record of a background
# process is lost once it has had some thousand others (a long wait is a loop of sleeps).
start_step() {
  step_began[$1]=$EPOCHSECONDS
  set -m  # its own process group, so that an interrupt ends all of it
  rm -f "$2.status"
  # shellcheck disable=SC2064
  (trap "echo \$? >${2@Q}.status" EXIT && set -euo pipefail && "step_$1") >"$2" 2>&1 </dev/null &
  step_pid[$1]=$!
  set +m
}

# finish_step NAME LOG [background]: waits for a step and prints its result, for a background step with its name.
finish_step() {
  local name=$1 log=$2 rc took which=
  watch_step "${step_pid[$name]}" "$log"
  unset "step_pid[$name]"
  [[ -e $log.status ]] || echo 137 >"$log.status"  # it was killed
  rc=$(<"$log.status")
  took=$(minutes $(($(stat -c %Y "$log.status") - step_began[$name])))  # a background step may have ended long ago
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
      [[ -z ${step_pid[$need]:-} ]] || finish_step "$need" "$folder/$need.log" background
      [[ $need == - || ${step_state[$need]} == passed ]] || blocked=$need
    done
    if [[ -n $blocked ]]; then
      step_state[$name]=skipped
      echo "      skipped: needs '$blocked'"
      continue
    fi
    start_step "$name" "$folder/$name.log"
    if [[ -n ${step_background[i]} ]]; then
      echo "      continues in the background"
    else
      finish_step "$name" "$folder/$name.log"
    fi
  done
  for name in "${!step_pid[@]}"; do finish_step "$name" "$folder/$name.log" background; done
  for state in "${step_state[@]}"; do count[$state]=$((count[$state] + 1)); done
  printf '\n%s\n%6s  total\n' "$(printf '%s\n' "${step_times[@]}")" "$(minutes $SECONDS)"
  echo "${count[passed]} passed, ${count[failed]} failed, ${count[skipped]} skipped"
  ((count[failed] == 0))
}
