#!/usr/bin/env bash
#SBATCH --job-name=async-grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
# A run of a file on several machines: sbatch examples/cluster/slurm.sh examples/qwen_7b.toml
#
# In the top folder of a clone that all of them see, after `make setup` and the [launch] prepare of
# the file. The first TRAINER_NODES machines (1) train, a rank a device; the others generate, a
# worker each TENSOR_PARALLEL (1) devices. All are nodes of one Ray cluster with a token of its own.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start it with sbatch}"
. .venv/bin/activate
config=${1:?name the file of the run}
devices=${SLURM_GPUS_ON_NODE:-8} trainer_nodes=${TRAINER_NODES:-1} tensor_parallel=${TENSOR_PARALLEL:-1}
mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")
((${#nodes[@]} > trainer_nodes)) || {
    echo "the job needs more than its $trainer_nodes trainer nodes, got ${#nodes[@]}: raise --nodes, " \
        "or use async-grpo launch on one machine" >&2
    exit 1
}
trainers=("${nodes[@]:0:trainer_nodes}") generators=("${nodes[@]:trainer_nodes}")
first=${nodes[0]} port=$((20000 + SLURM_JOB_ID % 10000))
logs="runs/slurm-$SLURM_JOB_ID"

mkdir -p "$logs"
(umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$logs/ray-token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$PWD/$logs/ray-token" RAY_ADDRESS="$first:$port"
trap 'kill $(jobs -p) 2>/dev/null; rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT

# A step would otherwise get one CPU of each node, and wait for those before it.
step=(srun --overlap --cpu-bind=none --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
on() { # a node, then a command that is a task of its own there
    "${step[@]}" --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"
}

on "$first" ray start --head --port "$port" --include-dashboard=false --block >"$logs/ray-$first.log" 2>&1 &
for _ in {1..120}; do
    (exec 3<>"/dev/tcp/$first/$port") 2>/dev/null && break
    sleep 1
done
for node in "${nodes[@]:1}"; do
    on "$node" ray start --address "$RAY_ADDRESS" --block >"$logs/ray-$node.log" 2>&1 &
done
sleep 15 # they join while workers begin to import
for node in "${generators[@]}"; do
    on "$node" async-grpo worker --config "$config" --mode generation \
        --num-workers $((devices / tensor_parallel)) --tensor-parallel-size "$tensor_parallel" \
        >"$logs/generation-$node.log" 2>&1 &
done
"${step[@]}" --nodes="$trainer_nodes" --ntasks="$trainer_nodes" --nodelist="$(IFS=, && echo "${trainers[*]}")" \
    torchrun --nnodes "$trainer_nodes" --nproc-per-node "$devices" --rdzv-backend c10d \
    --rdzv-endpoint "$first:$((port + 10000))" --rdzv-id "$SLURM_JOB_ID" \
    trainer_core.py --config "$config" --nproc-per-node "$devices"
