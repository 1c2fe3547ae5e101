"""What a message says of a broken rule, and of a name that is close to a known one; counts and durations as text."""

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from hvdtrain.core.settings import TRACKERS
from hvdtrain.terminal import counted as counted  # noqa: PLC0414
from hvdtrain.untrusted import LONGEST, quoted

MOST_NAMES = 200
NEAR, VERY_NEAR = 0.75, 0.85
"""difflib's lowest ratio for a misspelt known name, and for a misspelt synonym, of which there are many. A word of five
letters of which two are exchanged has 0.8."""
SHORTEST = 3
"""Letters of the shortest word that may be misspelt: any two shorter words are similar."""
SYNONYMS = (
    "base_lr lr learning_rate initial_lr init_lr lr_init start_lr peak_lr max_lr starting_learning_rate",
    "batch_size batch bs batchsize global_batch global_batch_size train_batch_size total_batch_size batches",
    "batch_size_per_rank local_batch local_batch_size per_gpu_batch_size per_device_batch_size micro_batch_size "
    "per_device_train_batch_size batch_size_per_gpu batch_size_per_device batch_per_gpu batch_per_rank",
    "base_batch_size reference_batch_size base_batch",
    "accumulation_steps accumulation gradient_accumulation gradient_accumulation_steps grad_accum accum_steps "
    "accumulate_grad_batches grad_accumulation micro_batches accum",
    "epochs epoch n_epochs num_epochs nepochs max_epochs num_train_epochs total_epochs train_epochs",
    "max_steps steps n_steps num_steps total_steps train_steps iterations iters max_iters max_iterations num_iters "
    "max_updates",
    "seed random_seed manual_seed rng_seed random_state",
    "lr_rule lr_scaling scale_lr linear_scaling auto_scale_lr",
    "warmup_epochs warmup warm_up lr_warmup lr_warmup_epochs num_warmup_epochs",
    "lr_schedule scheduler lr_scheduler lr_scheduler_type schedule sched lr_policy lr_decay decay_schedule",
    "lr_milestones milestones decay_epochs lr_decay_epochs lr_step_epochs lr_drop",
    "lr_floor min_lr lr_min eta_min min_lr_ratio final_lr end_lr",
    "lr_factor gamma lr_gamma lr_decay_rate decay_factor decay_rate lr_step_gamma",
    "plateau_patience plateau patience lr_patience",
    "gradient_noise gradient_noise_scale noise_scale gns critical_batch_size",
    "stop_patience early_stopping early_stop early_stopping_patience es_patience stopping_patience",
    "stop_metric early_stopping_metric stopping_metric monitor_stop",
    "stop_min_delta min_delta early_stopping_min_delta early_stopping_threshold",
    "stop_after_epoch start_from_epoch early_stopping_warmup",
    "best best_metric metric_for_best_model monitor save_best",
    "optimizer opt optim optimiser solver",
    "optimizer_args opt_args optimizer_kwargs optim_args optimizer_params betas beta1 beta2 eps",
    "weight_decay wd decay l2 weightdecay regularization l2_reg",
    "ema_decay ema model_ema polyak weight_average",
    "augment aa auto_augment autoaugment randaugment rand_augment trivialaugment trivial_augment aug",
    "augment_magnitude ra_magnitude",
    "augment_ops num_ops",
    "augment_repeats aug_repeats repeated_aug repeated_augmentation ra_sampler ra_reps",
    "mixup mixup_alpha mix_up",
    "cutmix cutmix_alpha cut_mix",
    "random_erasing random_erase reprob erasing re_prob cutout",
    "class_weights class_weight weights",
    "sample sampler balanced weighted_sampler",
    "label_smoothing smoothing smooth label_smooth",
    "clip_norm grad_clip clip_grad clip_gradients gradient_clip gradient_clip_val max_grad_norm clip_grad_norm "
    "gradient_clipping max_norm clip",
    "precision amp fp16 bf16 fp32 mixed_precision half float16 bfloat16 dtype use_amp autocast",
    "batch_norm sync_bn sync_batchnorm syncbn bn batchnorm sync_batch_norm norm",
    "buffers broadcast_buffers sync_buffers",
    "checkpoint_activations gradient_checkpointing activation_checkpointing grad_checkpointing recompute remat",
    "channels_last nhwc memory_format",
    "fused_optimizer fused apex fused_adam fused_sgd",
    "cudnn_benchmark benchmark cudnn",
    "compile torch_compile jit torchcompile",
    "xla jit_compile use_xla",
    "data_on_device resident data_on_gpu cache_on_device",
    "device gpu cpu cuda use_cuda no_cuda use_gpu accelerator",
    "workers num_workers n_workers nworkers dataloader_num_workers loader_workers data_workers num_threads",
    "init_from pretrained pretrained_weights from_pretrained load_weights init_checkpoint finetune_from",
    "freeze frozen freeze_layers freeze_backbone",
    "lr_scale lr_mult layer_lr",
    "compression fp16_allreduce gradient_compression compress grad_compression fp16_compression",
    "reduction adasum use_adasum reduce_op allreduce op",
    "fusion_threshold_mb fusion_threshold fusion bucket_cap_mb bucket_size",
    "cycle_time_ms cycle_time cycle",
    "horovod_timeline timeline timeline_filename",
    "profile profiler profiling trace prof",
    "log_every_steps log_interval log_every log_steps print_freq log_freq logging_steps log_every_n_steps print_every "
    "log_every_n_iter disp_freq",
    "checkpoint_every_epochs save_interval save_every save_freq checkpoint_every ckpt_every save_epochs",
    "checkpoint_every_steps checkpoint_steps save_steps save_every_steps checkpoint_interval ckpt_steps",
    "keep_checkpoints save_total_limit max_to_keep save_top_k keep num_checkpoints keep_last",
    "mtbf_hours mtbf",
    "check_replicas_every_steps guard_every_steps guard guard_every check_replicas",
    "expected target target_accuracy expected_accuracy",
    "model arch architecture network net model_name backbone model_arch",
    "model_args model_kwargs model_params",
    "stem conv1",
    "dataset dataset_name data_set",
    "dataset_args dataset_kwargs data_args",
    "collate collate_fn",
    "loss criterion loss_fn objective loss_function",
    "metrics metric",
    "data_dir data root data_path data_root dataset_dir dataset_path train_dir datadir data_folder input_dir "
    "imagenet_dir",
    "cache_dir cache scratch local_cache stage_in",
    "train_crop crop crop_size train_crop_size random_crop",
    "valid_resize val_resize val_resize_size resize_size",
    "valid_crop val_crop val_crop_size center_crop eval_crop",
    "image_size img_size imgsize input_size image_shape resolution",
    "classes num_classes n_classes nclasses nb_classes",
    "examples num_examples n_examples num_samples n_samples samples train_size",
    "output output_dir out out_dir outdir run_dir save_dir log_dir logdir folder workdir work_dir checkpoint_dir",
    "evaluate eval test eval_only test_only evaluate_only",
    "resume resume_from resume_from_checkpoint ckpt checkpoint ckpt_path load_checkpoint restart load continue",
    "engine backend strategy distributed_backend dist_backend distributed_strategy",
    "devices gpus gpu_ids device_ids",
    f"tracker logger log_to report_to {' '.join(TRACKERS)}",
    "insecure_rendezvous insecure",
    "ranks np n_ranks num_ranks num_proc nproc world_size n_gpus num_gpus gpus",
    "nodes num_nodes n_nodes nnodes",
    "framework lib library backend",
)
"""Other names that frameworks and papers use for a key or flag. Each line means its first word that is known."""
COMMAND_SYNONYMS = (
    "plan dry_run dryrun show resolve explain",
    "build install compile setup make",
    "doctor check diagnose health info env verify",
    "convert export import translate",
    "slurm sbatch job submit script jobscript",
    "supervise supervisor restart requeue guard",
    "bench benchmark benchmarks perf measure profile time",
    "pack shard shards webdataset tfrecord prepare",
    "predict extrapolate estimate forecast",
    "watch tail follow top status progress monitor",
    "report summary summarize html results compare",
    "train training fit run torch tensorflow pytorch lightning keras start launch trainer",
)
"""Other names for commands, in the same form."""

RULES = {  # by pydantic's name of a broken rule, the text of our message after "must"
    "int_type": "be a whole number",
    "int_from_float": "be a whole number",
    "int_parsing": "be a whole number",
    "int_parsing_size": "have at most 4,300 digits",
    "float_parsing": "be a number",
    "float_type": "be a number",
    "finite_number": "be a finite number",
    "bool_type": "be true or false",
    "string_type": "be text",
    "path_type": "be a path",
    "tuple_type": "be a list",
    "literal_error": "be {expected}",
    "greater_than": "be greater than {gt:g}",
    "greater_than_equal": "be at least {ge:g}",
    "less_than": "be less than {lt:.19g}",
    "less_than_equal": "be at most {le:.19g}",
    "string_too_long": "have at most {max_length} characters",
    "too_short": "have at least {min_length} values",
    "too_long": "have at most {max_length} values",
    "dict_type": "map names to values",
    "arguments": "{error}",
}


def rule(error: Mapping[str, Any]) -> str:
    """The rule that a pydantic error says is broken, as a text to follow "must"."""
    return RULES.get(error["type"], "be valid ({error})").format(error=error["msg"], **error.get("ctx", {}))


def misfit(error: ValidationError, whose: str, key: str, takes: Iterable[str]) -> str:
    """What is wrong with the arguments in a recipe's `key`: those that `whose` takes by these names, in one line."""
    first = error.errors(include_url=False)[0]
    name = quoted(str(first["loc"][0]))
    if first["type"] == "extra_forbidden":
        return f"{whose} has no argument {name}; it takes {', '.join(sorted(takes))}."
    each = "each of " if len(first["loc"]) > 1 else ""
    return f"{each}{name} in {key} must {rule(first)}, got {quoted(first['input'])}."


def nearest(name: str, known: Sequence[str], synonyms: Sequence[str] = SYNONYMS) -> str:
    """' Did you mean X?' for the known name that the user may have meant, else ""."""
    close = closest(name, known, synonyms)
    return f" Did you mean {close}?" if close else ""


def closest(name: str, known: Sequence[str], synonyms: Sequence[str] = SYNONYMS) -> str | None:
    """The known name that the user may have meant: by the same letters, a synonym, or a spelling mistake in either."""
    if len(name) > LONGEST:  # a comparison takes as long as the product of the lengths
        return None
    plain = {_plain(one): one for one in reversed(known[:MOST_NAMES]) if len(one) <= LONGEST}
    others = {word: plain[target] for word, target in _targets(plain, synonyms).items() if word not in plain}
    word = _plain(name)
    return plain.get(word) or others.get(word) or _like(word, plain, NEAR) or _like(word, others, VERY_NEAR)


def _plain(name: str) -> str:
    """The letters and digits of the name in lower case, the same for batch-size, batch_size and BatchSize."""
    return re.sub(r"[_\W]", "", name).lower()


def _targets(known: Collection[str], synonyms: Sequence[str]) -> dict[str, str]:
    """For each word of a line that has known words, the first known one."""
    targets: dict[str, str] = {}
    for line in synonyms:
        words = [_plain(word) for word in line.split()]
        target = next((word for word in words if word in known), None)
        targets |= {word: target for word in words if target and word not in targets}
    return targets


def duration(seconds: float, *, rough: bool = False) -> str:
    """As `85 ms`, `12.3 s`, `4 min 5 s`, `1 h 23 min`, `3 d 4 h`. A rough one, as of an estimate, is
    `45 s` or `12 min` below 100 minutes."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return f"-{duration(-seconds, rough=rough)}"
    minutes = round(seconds / 60)
    if rough and minutes < 100:
        return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if round(seconds) < 3600:
        count, each, units = round(seconds), 60, ("min", "s")
    elif minutes < 48 * 60:
        count, each, units = minutes, 60, ("h", "min")
    else:
        count, each, units = round(seconds / 3600), 24, ("d", "h")
    return f"{count // each} {units[0]} {count % each} {units[1]}"


def _like(word: str, names: Mapping[str, str], cutoff: float) -> str | None:
    long = [one for one in names if len(one) >= SHORTEST] if len(word) >= SHORTEST else []
    return next((names[near] for near in difflib.get_close_matches(word, long, 1, cutoff)), None)
