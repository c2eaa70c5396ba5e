#!/bin/bash
# sbatch docs/slurm.sh: an example with two nodes of eight GPUs each, which share one file system.
# One task per node, and torchrun in it. --cpus-per-task gives the task all processors of the node (the default is one).
# --signal and --shutdown-timeout leave ten minutes for the last checkpoint. torch 2.11 has no --shutdown-timeout: remove
# the option there, and the ranks have 30 seconds.
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --signal=TERM@600
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / 8))
srun --cpus-per-task=$SLURM_CPUS_PER_TASK torchrun --shutdown-timeout=600 \
  --nnodes=$SLURM_NNODES --nproc-per-node=8 \
  --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$HEAD:29500 \
  train.py strategy=fsdp devices=$((8 * SLURM_NNODES)) \
  hydra.run.dir=runs/$SLURM_JOB_ID resume=auto
