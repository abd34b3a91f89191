#!/bin/bash
# Trains on 2 hosts of 8 GPUs, a process a GPU:   sbatch experiments/launch/slurm.sh
#
# Not run on a cluster yet. The workdir and data are on a file system that all hosts share, and the
# environment of the submitting shell, with `.venv`, is there too. A job that ends by its time limit gets
# SIGTERM two minutes before it, saves, and goes on when the same script is submitted again.
#SBATCH --job-name=sparse_lm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --gpu-bind=none
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue

srun --kill-on-bad-exit=1 .venv/bin/python -m sparse_lm.train \
  --config=configs/llama1b.py --workdir=runs/llama1b --config.data.path=data/c4 \
  --config.batch_size=32 --config.mesh.data=16
