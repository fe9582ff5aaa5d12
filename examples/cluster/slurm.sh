#!/usr/bin/env bash
#SBATCH --job-name=async-grpo
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
# The whole run of a file, its data too, on one machine or several, in the top folder of a clone that
# all of them see, after `DEVICE=gpu make setup`:
#     sbatch examples/cluster/slurm.sh examples/deepscaler.toml
#     sbatch --nodes=4 examples/cluster/slurm.sh run.toml --trainer-nodes 2
#     async-grpo launch run.toml --plan-for 8,8,8 --emit slurm      prints it for a file, which it holds
# NETWORK=ib0 before `sbatch` names the interface that Ray takes for weights and samples.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start it with sbatch}"
export PATH="$PWD/.venv/bin:$PATH"
: "${1:?name the file of the run}"

# What follows is the same in every job.
# A step has one CPU, and waits for those before it, unless it is told otherwise.
step=(srun --overlap --cpu-bind=none "--cpus-per-task=${SLURM_CPUS_PER_TASK:-1}" --nodes=1 --ntasks=1)
launch=("${step[@]}")

if ((${SLURM_JOB_NUM_NODES:-1} > 1)); then # one Ray cluster, with a token of its own
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    port=$((20000 + SLURM_JOB_ID % 10000)) logs="runs/slurm-$SLURM_JOB_ID" # below the ephemeral ports
    mkdir -p "$logs"
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$PWD/$logs/ray-token" RAY_ADDRESS="${nodes[0]}:$port"
    export NETWORK="${NETWORK:-}"
    trap 'kill $(jobs -p) 2>/dev/null; rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT
    (umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH")
    # shellcheck disable=SC2016 # a node expands it
    start='address=$(ip -4 -brief address show $NETWORK | awk "{ sub(\"/.*\", \"\", \$3); print \$3; exit }")
        exec ray start --block ${NETWORK:+"--node-ip-address=$address"} "$@"'
    role=(--head "--port=$port" --include-dashboard=false)
    for node in "${nodes[@]}"; do
        "${step[@]}" "--nodelist=$node" bash -c "$start" ray "--num-cpus=${SLURM_CPUS_PER_TASK:-1}" \
            "${role[@]}" >>"$logs/ray-$node.log" 2>&1 &
        until (exec 3<>"/dev/tcp/${nodes[0]}/$port") 2>/dev/null; do # imports from a network disk take long
            if ((SECONDS > 300)) || ! kill -0 $!; then
                echo "error: no Ray head on ${nodes[0]} within 300 s: see $logs/ray-${nodes[0]}.log" >&2
                exit 1
            fi
            sleep 1
        done
        role=("--address=$RAY_ADDRESS")
    done
    launch+=("--nodelist=${nodes[0]}")
    set -- "$@" --ray-address=auto "--await-nodes=${#nodes[@]}"
fi

# When its time is nearly up the run ends with its batch and a checkpoint, from which it goes on in
# the queued job. srun passes SIGUSR1 on; SIGTERM it makes SIGKILL, but scancel sends it to all steps.
again=
"${launch[@]}" async-grpo launch "$@" &
run=$!
trap 'again=1; kill -USR1 "$run"' USR1
trap : TERM
while kill -0 "$run" 2>/dev/null; do wait "$run" || true; done # a signal interrupts it
code=0
wait "$run" || code=$?
if [ -n "$again" ] && ((code == 0 || code > 128)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
