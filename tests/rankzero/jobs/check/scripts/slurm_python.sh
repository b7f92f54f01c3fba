#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --time=12:00:00

conda activate ddp
#SBATCH --mem=64G
python train.py --devices 4 --num_nodes 2
