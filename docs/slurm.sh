#!/bin/bash
# sbatch docs/slurm.sh: two machines of eight devices, which see one folder. One task per machine, and torchrun in it.
# All processors of a machine for its task, which has one otherwise; and ten minutes for a last checkpoint, for which
# torch 2.11 has no --shutdown-timeout: leave it out there, and 30 seconds are left.
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --signal=TERM@600
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / 8))
srun --cpus-per-task=$SLURM_CPUS_PER_TASK torchrun --shutdown-timeout=600 \
  --nnodes=$SLURM_NNODES --nproc-per-node=8 \
  --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$HEAD:29500 \
  train.py strategy=fsdp devices=$((8 * SLURM_NNODES)) \
  hydra.run.dir=runs/$SLURM_JOB_ID resume=auto
