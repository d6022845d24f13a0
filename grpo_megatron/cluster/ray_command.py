"""The command `ray` with changes to Ray's internals, for nodes where Ray's processes are slow to start.

slurm/train.sbatch starts Ray with it on each node of a job.

python -m grpo_megatron.cluster.ray_command start [arguments of `ray start`]
"""

from ray.scripts.scripts import main

from grpo_megatron.cluster.ray_patches import choose_agent_ports

if __name__ == "__main__":
    with choose_agent_ports():
        main()
