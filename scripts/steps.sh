# shellcheck shell=bash
# Numbered steps with times, logs and a summary; sourced by the scripts that have such steps.
#
#   step NAME NEEDS TITLE [background]   declares a step, run by the function step_NAME; NEEDS: steps that it depends on,
#                                        "-" for none; background: runs concurrently with the next steps, until one needs it
#   reads NAME PATH...                   the files that decide the result of a step: it is left out if it has passed with
#                                        the same ones on this machine before, unless $run_all is true
#   in_turn NAME...                      of these steps only one runs, which the number of commits chooses, unless $run_all
#                                        is true
#   run_steps FOLDER                     runs them in order; the output of each goes to FOLDER/NAME.log
#
# A step that exits with 77 is skipped (its last line says why); so is one whose dependency did not pass.

step_names=() step_needs=() step_titles=() step_background=()
step() { step_names+=("$1") step_needs+=("$2") step_titles+=("$3") step_background+=("${4:-}"); }

declare -A step_reads=()
reads() { step_reads[$1]="${*:2}"; }
declare -A step_left_out=()
in_turn() {
  local name names=("$@") turn
  turn=$(($(git rev-list --count HEAD 2>/dev/null || echo 0) % $#))
  for name in "$@"; do
    [[ $name == "${names[turn]}" ]] || step_left_out[$name]="it is the turn of '${names[turn]}'"
  done
}

passed_folder=${XDG_CACHE_HOME:-$HOME/.cache}/kvanta/passed
run_all=false

# passed_mark NAME: the file that says that a step has passed with the present files, compilers, CPU and GPU; nothing where
# git lists no files, as in an unpacked archive.
passed_mark() {
  local paths files
  read -ra paths <<<"${step_reads[$1]} scripts"
  files=$(git ls-files --cached --others --exclude-standard -- "${paths[@]}" 2>/dev/null) || return 0
  [[ -n $files ]] || return 0
  {
    sort <<<"$files" | tr '\n' '\0' | xargs -0 sha256sum 2>/dev/null || true
    for compiler in c++ clang++-14 clang-tidy-14 aarch64-linux-gnu-g++ nvcc; do "$compiler" --version 2>/dev/null || true; done
    compgen -G '/dev/nvidia[0-9]*' || true
    grep -m 1 -E '^(flags|Features)' /proc/cpuinfo
    env | grep -E '^(KVANTA_|CUDA_|CXX|CFLAGS|LDFLAGS)' | sort || true
    # shellcheck disable=SC2016
    section_packages build ctest test cross | xargs dpkg-query -W -f '${Package} ${Version}\n' 2>/dev/null || true
  } | sha256sum | sed "s|^\([0-9a-f]*\).*|$passed_folder/$1-\1|"
}

minutes() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

# closing_lines LOG: the summaries of ctest, pytest and our own tools.
closing_lines() {
  grep -E '^[0-9]+% tests passed|^=+ .*(passed|failed|error).* =+$|^(summary|warning): ' "$1" | tail -n 8 || true
}

# progress_line LOG SECONDS: the last line of a log, or the last one with a count, as ninja's [31/84], with an estimate
# from the time that the counted ones have taken.
progress_line() {
  local line left=
  line=$(tail -n 100 "$1" | grep '^\[[0-9]*/[0-9]*\]' | tail -n 1 || true)
  [[ -n $line ]] || line=$(tail -n 1 "$1" | tr -d '\r')
  if [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]] && ((10#${BASH_REMATCH[1]} > 0)) &&
    ((10#${BASH_REMATCH[1]} * 8 >= 10#${BASH_REMATCH[2]})); then
    left=$(($2 * (10#${BASH_REMATCH[2]} - 10#${BASH_REMATCH[1]}) / 10#${BASH_REMATCH[1]}))
    line="${BASH_REMATCH[0]} about $(minutes $left) left ${line#*\]}"
  fi
  printf '      %s  %.100s' "$(minutes "$2")" "$line"
}

# watch_step PID LOG: shows progress: on a terminal at any time, elsewhere after 15 seconds and then every minute.
watch_step() {
  local pid=$1 log=$2 began=$SECONDS next=15
  while kill -0 "$pid" 2>/dev/null; do
    if [[ -t 1 ]]; then
      printf '\r\033[K%s' "$(progress_line "$log" $((SECONDS - began)))"
      sleep 0.5
    else
      sleep 0.2
      if ((SECONDS - began >= next)); then
        next=$((SECONDS - began < 60 ? 60 : SECONDS - began + 60))
        progress_line "$log" $((SECONDS - began))
        echo
      fi
    fi
  done
  [[ -t 1 ]] && printf '\r\033[K'
  return 0
}

declare -A step_pid=() step_began=() step_state=() step_mark=()
step_times=()
step_seconds=()  # "NAME=SECONDS" of each step that ran, then "all=SECONDS"
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
  took=$(($(stat -c %Y "$log.status") - step_began[$name]))  # a background step may have ended long ago
  step_seconds+=("$name=$took")
  took=$(minutes "$took")
  [[ -z ${3:-} ]] || which="$name: "
  closing_lines "$log" | sed "s/^/      $which/"
  case $rc in
    0)
      step_state[$name]=passed && echo "      ${which}passed in $took"
      if [[ -n ${step_mark[$name]:-} && $(passed_mark "$name") == "${step_mark[$name]}" ]]; then
        mkdir -p "$passed_folder" && date >"${step_mark[$name]}"
      fi
      ;;
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
    if [[ -n ${step_reads[$name]:-} ]]; then
      step_mark[$name]=$(passed_mark "$name")
      if ! $run_all && [[ -n ${step_mark[$name]} && -e ${step_mark[$name]} ]]; then
        step_state[$name]=passed
        echo "      nothing that it reads has changed since it passed ($(<"${step_mark[$name]}"))"
        step_times+=("$(printf '%6s  %-8s %s' - unchanged "$name")")
        continue
      fi
    fi
    if ! $run_all && [[ -n ${step_left_out[$name]:-} ]]; then
      step_state[$name]=skipped
      echo "      skipped: ${step_left_out[$name]}"
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
  step_seconds+=("all=$SECONDS")
  for state in "${step_state[@]}"; do count[$state]=$((count[$state] + 1)); done
  printf '\n%s\n%6s  total\n' "$(printf '%s\n' "${step_times[@]}")" "$(minutes $SECONDS)"
  echo "${count[passed]} passed, ${count[failed]} failed, ${count[skipped]} skipped"
  ((count[failed] == 0))
}
