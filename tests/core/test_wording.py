"""The names that messages suggest for unknown ones: for synonyms and spelling mistakes, and for nothing else."""

import pytest

from hvdtrain import cli
from hvdtrain.core import flags
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.settings import TRACKERS
from hvdtrain.core.wording import COMMAND_SYNONYMS, SYNONYMS, closest
from hvdtrain.run.options import OPTIONS
from hvdtrain.tools import plan

KEYS = [*OPTIONS, *(key for key in Recipe.model_fields if key != "name")]
MEANT = {
    "base_lr": "lr LR learning_rate leraning_rate learningrate learning-rate base-lr baselr init_lr max_lr",
    "batch_size": "bs batch batchsize batch-size batch_sise bacth_size BatchSize global_batch train_batch_size",
    "batch_size_per_rank": "local_batch_size per_device_train_batch_size batch_size_per_gpu",
    "accumulation_steps": "gradient_accumulation_steps accumulate_grad_batches acumulation_steps",
    "epochs": "epoch n_epochs num_epochs nepochs max_epochs epcohs Epochs num_train_epochs",
    "max_steps": "steps num_steps iterations max_iters",
    "seed": "random_seed sed",
    "warmup_epochs": "warmup warm_up warmup_epoch lr_warmup",
    "lr_schedule": "scheduler lr_scheduler lr-shedule lr_policy sceduler",
    "lr_milestones": "milestones lr_milestone decay_epochs",
    "lr_factor": "gamma",
    "plateau_patience": "patience",
    "optimizer": "opt optim optimiser optimzer",
    "optimizer_args": "betas opt_args",
    "momentum": "momentun",
    "nesterov": "nestrov",
    "weight_decay": "wd weigth_decay decay",
    "clip_norm": "grad_clip max_grad_norm gradient_clip_val clip_nrom",
    "precision": "amp fp16 bf16 mixed_precision precison",
    "batch_norm": "sync_bn syncbn",
    "compression": "fp16_allreduce compresion",
    "fusion_threshold_mb": "fusion_threshold fusion_treshold_mb",
    "model": "arch net network modle backbone",
    "loss": "criterion loss_fn",
    "dataset": "datset dataest",
    "data_dir": "data root data_path data_root",
    "workers": "num_workers worker n_workers",
    "output": "out output_dir save_dir outptu",
    "resume": "resume_from ckpt resume_from_checkpoint resum",
    "engine": "backend engin",
    "evaluate": "test eval evalute",
    "devices": "gpus n_gpus",
    "tracker": f"{' '.join(TRACKERS)} logger trakcer",
    "log_every_steps": "log_interval print_freq log_every_step",
    "checkpoint_every_epochs": "save_every checkpoint_every",
    "classes": "num_classes",
    "image_size": "img_size",
}
UNRELATED = (
    "zzz foo hello time banana username colour temperature verbose color dropout hidden_size num_layers heads "
    "vocab_size tokens seq_len top_k beam port host timeout account partition qos walltime mail retries quiet "
    "debug version config yaml file rank size rate train valid every print max min width depth trian - -- 3"
)


@pytest.mark.parametrize(("key", "names"), [*MEANT.items(), (None, UNRELATED)], ids=[*MEANT, "no key"])
def test_what_a_person_meant(key, names):
    assert {name: closest(name, KEYS) for name in names.split()} == dict.fromkeys(names.split(), key)


def test_a_known_name_is_suggested_as_it_is_written():
    assert closest("learning_rate", ["params", "lr"]) == "lr"
    assert closest("lr", ["learning_rate", "momentum"]) == "learning_rate"
    assert closest("modle", ["Model"], ()) == "Model"
    assert closest("net", ["Model"], ()) is None


def test_a_synonym_is_no_key_of_another_name():
    known = {*KEYS, *plan.OWN}
    twice = [line.split() for line in SYNONYMS if len(known & set(line.split())) > 1]
    assert twice == []
    assert not [line for line in SYNONYMS if not line.isascii() or line != " ".join(line.split())]


def test_every_alias_of_a_flag_is_a_synonym_of_it():
    for name, aliases in flags.ALIASES.items():
        assert {closest(alias.lstrip("-"), KEYS) for alias in aliases} == {name}


COMMANDS = {
    "train": "trian fit",
    "plan": "pln dry-run",
    "bench": "benchmark bnech",
    "doctor": "diagnose",
    "slurm": "sbatch",
    "build": "install",
    None: "digits help lr",
}


def test_commands():
    known = [*cli.COMMANDS, "train"]
    found = {key: [closest(name, known, COMMAND_SYNONYMS) for name in names.split()] for key, names in COMMANDS.items()}
    assert found == {key: [key] * len(names.split()) for key, names in COMMANDS.items()}


def test_a_long_name_is_not_compared():
    assert closest("q" * 100_000, KEYS) is None
    assert closest("model", ["q" * 100_000, "model"]) == "model"
