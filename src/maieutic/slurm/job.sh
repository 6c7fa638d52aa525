# ---- the same in every job: servers, steps, signals, requeue ---------------------------------------------------------
say() { printf '%s job %s: %s\n' "$(date +%FT%T)" "$SLURM_JOB_ID" "$*"; }

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# A requeued job starts afresh beside what the last turn left: an address file of then cannot be taken for one of now.
turn=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
state=$RUN/slurm/$turn
export MAIEUTIC_ENDPOINTS=$RUN/endpoints/$turn PYTHONUNBUFFERED=1
mkdir -p "$state" "$MAIEUTIC_ENDPOINTS" || exit 1
# The job's own servers are reached directly, whatever proxy the site has.
NO_PROXY=localhost,127.0.0.1,$(IFS=,; echo "${nodes[*]}")${NO_PROXY:+,$NO_PROXY}
export NO_PROXY no_proxy=$NO_PROXY

child='' asked='' servers=() pids=()

# What a job is told its step is told as SIGUSR1: at SIGTERM srun would kill the step. Again twice, as a step that is only starting
# may miss the first.
pass() {
  asked=${asked:-$1}
  say "SIG$1 after $SECONDS s"
  [[ -z $child ]] && return
  kill -USR1 "$child" 2>/dev/null
  ( for _ in 1 2; do sleep 5; kill -USR1 "$child" 2>/dev/null || exit 0; done ) &
}
trap 'pass USR1' USR1
trap 'pass TERM' TERM

end_servers() {
  local pid left end=$((SECONDS + GRACE))
  ((${#pids[@]})) || return 0
  kill -USR1 "${pids[@]}" 2>/dev/null
  while ((SECONDS < end)); do
    left=()
    for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null && left+=("$pid"); done
    ((${#left[@]})) || break
    sleep 0.5
  done
  ((${#left[@]})) && kill -KILL "${left[@]}" 2>/dev/null
  pids=()
}
trap end_servers EXIT

# server NAME NODE COMMAND…: a step of its own on node number NODE; NAME.json appears when it is healthy.
server() {
  srun "${SRUN[@]}" --nodes=1 --ntasks=1 --nodelist="${nodes[$2]}" --job-name="$1" "${@:3}" &
  servers+=("$1") pids+=($!)
}

# await SECONDS: until every server has published its address; the first failure ends the job by name.
await() {
  local i end=$((SECONDS + $1))
  for i in "${!servers[@]}"; do
    until [[ -e $MAIEUTIC_ENDPOINTS/${servers[i]}.json ]]; do
      [[ -z $asked ]] || finish 85
      kill -0 "${pids[i]}" 2>/dev/null || unhealthy "${servers[i]}" "ended before it was healthy"
      ((SECONDS < end)) || unhealthy "${servers[i]}" "was not healthy within $1 s"
      sleep 1
    done
    say "${servers[i]} is healthy after $SECONDS s"
  done
}

unhealthy() {
  say "ServerNotHealthyError: $1 $2; see $state/$1.log. Training was not begun; submit again when the cause is mended."
  exit 1
}

# step ARGUMENTS…: an srun step in the foreground, and its exit status.
step() {
  local code=0 last
  srun "${SRUN[@]}" "$@" &
  child=$!
  [[ -z $asked ]] || kill -USR1 "$child" 2>/dev/null
  while :; do
    code=0; wait "$child" || code=$?      # returns early (> 128) when a trap has run
    if ((code <= 128)) || ! kill -0 "$child" 2>/dev/null; then break; fi
  done
  if ((code > 128)); then                 # a trap's status, or the step's own
    last=0; wait "$child" 2>/dev/null || last=$?
    ((last == 127)) || code=$last
  fi
  child=''
  return "$code"
}

# train NODES PROCESSES ARGUMENTS…: trainers on the first nodes; a port that was taken means another try.
train() {
  local count=$1 processes=$2 try code list last
  shift 2
  list=$(IFS=,; echo "${nodes[*]:0:count}")
  for try in 1 2 3 4 5; do
    code=0
    step --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$list" --kill-on-bad-exit=1 --job-name=train \
      "${TRAINER[@]}" --state "$state/train-$try" --head "${nodes[0]}" --nodes "$count" --processes "$processes" \
      "${PORT[@]}" -- "$@" || code=$?
    PORT=()
    [[ -e $state/train-$try/port-taken && -z $asked ]] || break
    say "port $(<"$state/train-$try/port-taken") was taken: another one"
  done
  # Ranks that were asked to stop all end with 0 here; what they were asked stands in their files. At a failure the others are
  # ended by SLURM, whose signal says nothing.
  if ((code == 0)); then
    code=$(<"$state/train-$try/rank-0.exit") || code=1
  elif [[ -s $state/train-$try/rank-0.exit ]]; then
    last=$(<"$state/train-$try/rank-0.exit")
    code=$((last ? last : 1))
  elif ((code > 128)); then
    code=1
  fi
  return "$code"
}

# finish CODE: what becomes of the job.
finish() {
  local code=$1 i
  say "ended with code $code"
  for i in "${!servers[@]}"; do
    kill -0 "${pids[i]:-0}" 2>/dev/null || { ((code)) && say "${servers[i]} had ended by then; see $state/${servers[i]}.log"; }
  done
  case $code in
    0) ;;
    85 | 143) requeue ;;
    *)  # a step that has no checkpoint of its own to write, or was killed on the way; or a node that is gone
      if [[ -n $asked ]] || lost_node; then requeue; fi
      ;;
  esac
  exit "$code"
}

# Training fails within seconds of a node's death, SLURM notices it after minutes.
lost_node() {
  local node
  for node in "${nodes[@]}"; do
    timeout -k 5 60 srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" true >/dev/null 2>&1 && continue
    say "$node does not answer"
    return 0
  done
  return 1
}

requeue() {
  local turns=${SLURM_RESTART_COUNT:-0} config
  # One element of an array has the array's own number as SLURM_JOB_ID, under which SLURM would show and requeue all of them.
  local me=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
  me=${me:-$SLURM_JOB_ID}
  # A job that was cancelled, or whose time is up, is not running any more; one that is preempted, or whose node drains, is.
  [[ $(scontrol show job "$me") == *JobState=RUNNING* ]] || return
  if ((turns >= MAX_REQUEUES)); then
    say "RequeueLimitError: requeued $turns times (MAX_REQUEUES); the checkpoint is there, submit again to go on"
    exit 1
  fi
  end_servers
  say "requeued; it goes on from the newest checkpoint"
  # Where RequeueExit lists 85 the exit code does it.
  config=$(scontrol show config)         # whole, before it is searched: a pipe that grep closes early counts as a failure here
  grep -Eq '^RequeueExit *= *([0-9,-]*,)?85(,|$)' <<<"$config" && exit 85
  scontrol requeue "$me"
  exit 85
}
